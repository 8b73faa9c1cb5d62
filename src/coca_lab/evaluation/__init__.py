"""Evaluation: the table of tasks.

A new task is a file with a `Task`, its entry in `TASKS` here, what its cells hold in
`coca_lab.cells`, and how they are shown in `coca_lab.report`. From outside the package,
`register_task` adds one.
"""

from coca_attention.errors import UserError
from coca_lab.evaluation.needles import NEEDLES_TASK
from coca_lab.evaluation.perplexity import PERPLEXITY_TASK
from coca_lab.evaluation.prompts import PASSKEY_TASK, RULER_TASK
from coca_lab.evaluation.task import Cell, MethodSettings, Model, Task, evaluate, open_model
from coca_lab.settings.evaluations import TASK_OPTIONS

TASKS: dict[str, Task] = {
    task.name: task for task in (PERPLEXITY_TASK, NEEDLES_TASK, PASSKEY_TASK, RULER_TASK)
}
"""Tasks by name: ``coca eval NAME`` and the sections of a study."""


def register_task(task: Task) -> None:
    """Add a task to ``coca eval`` and studies; UserError if its name is taken.

    Without an entry in `coca_lab.report.REPORTS` the report leaves its cells out.
    """
    if task.name in TASKS:
        raise UserError(f"there is already a task named {task.name!r}")
    TASKS[task.name] = task
    TASK_OPTIONS[task.name] = task


__all__ = [
    "TASKS",
    "Cell",
    "MethodSettings",
    "Model",
    "Task",
    "evaluate",
    "open_model",
    "register_task",
]  # fmt: skip
