"""Needles of RULER's kinds. README.md in this folder describes the task."""

from coca_lab.evaluation.needles.task import TASK, NeedleSettings, evaluate_needles

__all__ = ["TASK", "NeedleSettings", "evaluate_needles"]
