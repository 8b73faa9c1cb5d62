"""Evaluation: one folder per task, and the table of tasks.

A new task is a folder (or file) with a `Task`, its import and its entry in `TASKS` here, and its
entry in the table of `coca_lab.report`. From outside the package, one call of
`coca_lab.registry.register_task` does the same.
"""

from coca_lab.evaluation import needles, passkey, perplexity
from coca_lab.evaluation.task import Cell, Model, RotaryScaling, Task, evaluate, open_model

TASKS: dict[str, Task] = {task.name: task for task in (perplexity.TASK, passkey.TASK, needles.TASK)}
"""Tasks by name: ``coca eval NAME`` and the sections of a suite."""

__all__ = ["TASKS", "Cell", "Model", "RotaryScaling", "Task", "evaluate", "open_model"]
