"""Needles of RULER's kinds. README.md beside this file says what is measured."""

from coca_attention.evaluation.needles.samples import KINDS, NeedleText, needle_text
from coca_attention.evaluation.needles.task import (
    NeedleSettings,
    check_settings,
    evaluate_needles,
    needle_prompts,
    recall,
)

__all__ = [
    "KINDS",
    "NeedleSettings",
    "NeedleText",
    "check_settings",
    "evaluate_needles",
    "needle_prompts",
    "needle_text",
    "recall",
]
