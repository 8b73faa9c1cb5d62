"""Adding an evaluation task from outside; docs/extending.md has an example."""

from coca_attention.errors import UserError
from coca_lab.evaluation import TASKS, Task
from coca_lab.evaluation.suite import Suite, own_sections
from coca_lab.report.tasks import REPORTS, TaskReport


def register_task(task: Task, report: TaskReport | None = None) -> None:
    """Add an evaluation task to ``coca eval``, to suites and to the report.

    Args:
        task: The task. Its name becomes a command, the name of a section in suite files, and the
            ``task`` of its cells.
        report: Turns its cells into sections of the page; without it the page leaves them out.

    Raises:
        UserError: If the name is taken.
    """
    if task.name in (*TASKS, *own_sections(Suite), "suite") or task.name in REPORTS:
        raise UserError(f"there is already a task or suite section named {task.name!r}")
    TASKS[task.name] = task
    if report is not None:
        REPORTS[task.name] = report
