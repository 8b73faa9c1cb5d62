"""Perplexity under a sliding window. README.md in this folder describes the task."""

from coca_lab.evaluation.perplexity.task import (
    TASK,
    PerplexitySettings,
    TextSettings,
    WindowSettings,
    load_text,
    measure_windows,
    tokens_needed,
)

__all__ = [
    "TASK",
    "PerplexitySettings",
    "TextSettings",
    "WindowSettings",
    "load_text",
    "measure_windows",
    "tokens_needed",
]
