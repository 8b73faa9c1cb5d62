"""Needles of RULER's kinds. README.md in this folder describes the task."""

from coca_attention.evaluation.needles.samples import KINDS, NeedleText, needle_text
from coca_attention.evaluation.needles.task import (
    TASK,
    NeedleSettings,
    check_settings,
    evaluate_needles,
    needle_prompts,
    recall,
)

__all__ = [
    "KINDS",
    "TASK",
    "NeedleSettings",
    "NeedleText",
    "check_settings",
    "evaluate_needles",
    "needle_prompts",
    "needle_text",
    "recall",
]
