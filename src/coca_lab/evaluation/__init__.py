"""Evaluation: the table of tasks.

A new task is a file with a `Task`, and its entries in `TASKS` here and in the table of
`coca_lab.report`. From outside the package, `coca_lab.evaluation.suite.register_task` adds one.
"""

from coca_lab.evaluation import perplexity, recall, retrieval
from coca_lab.evaluation.task import Cell, Model, RotaryScaling, Task, evaluate, open_model

TASKS: dict[str, Task] = {
    task.name: task for task in (perplexity.TASK, retrieval.PASSKEYS, retrieval.RULER, recall.TASK)
}
"""Tasks by name: ``coca eval NAME`` and the sections of a suite."""

__all__ = ["TASKS", "Cell", "Model", "RotaryScaling", "Task", "evaluate", "open_model"]
