"""Perplexity under a sliding window. README.md in this folder describes the task."""

from coca_lab.evaluation.perplexity.task import (
    TASK,
    PerplexitySettings,
    TextSettings,
    WindowSettings,
    evaluate_perplexity,
    load_text,
    tokens_needed,
)

__all__ = [
    "TASK",
    "PerplexitySettings",
    "TextSettings",
    "WindowSettings",
    "evaluate_perplexity",
    "load_text",
    "tokens_needed",
]
