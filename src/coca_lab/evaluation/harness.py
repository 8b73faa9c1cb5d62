"""Short-context tasks of EleutherAI's lm-evaluation-harness, an optional extra."""

import hashlib
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from yaml import YAMLError

from coca_attention.errors import UserError, install
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Part, Session, Subject, Task, check_at_least


@dataclass
class HarnessSettings:
    """Which tasks of the harness to run."""

    tasks: list[str] = field(default_factory=list)
    """Names of tasks or groups of the harness, or YAML files of your own tasks."""
    include_path: str | None = None
    """Folder with your own task files. They can contain code: use only files that you trust."""
    num_fewshot: int | None = None
    """Few-shot examples per question; by default the task's own number."""
    limit: int | None = None
    """Maximum number of questions per task."""
    batch_size: int = 8
    """Requests per batch."""
    seed: int = 0
    """Random seed of the few-shot examples."""


def check_settings(settings: HarnessSettings) -> None:
    """Raise UserError unless the harness is installed and the settings name a task."""
    if find_spec("lm_eval") is None:
        raise UserError(f"this needs the lm-evaluation-harness: {install('harness')}")
    if not settings.tasks:
        raise UserError("name at least one task: --tasks hellaswag,arc_easy")
    check_at_least(settings, 1, "batch_size", "limit")
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise UserError(f"{settings.include_path}: no such folder of task files")


def evaluate_harness(subject: Subject, settings: HarnessSettings, session: Session) -> list[Cell]:
    """Metrics of the harness' tasks for a loaded model, CoCA or any other.

    Args:
        subject: The model; the harness receives this object and loads nothing itself.
        settings: Tasks and how they are asked.
        session: Its engine keeps the metrics of all tasks together. Scaling does not apply, and
            the harness draws its own progress bars.

    Returns:
        One cell per task: the metrics under the harness' names, and the version of the task.

    Raises:
        UserError: If the harness is not installed, a task is unknown, or its data is unavailable.
    """
    return session.finish(_parts(subject, settings, session))


def _parts(subject: Subject, settings: HarnessSettings, session: Session) -> list[Part]:
    """The work of `evaluate_harness`, one item."""
    check_settings(settings)
    import lm_eval  # an optional package

    key = {
        "task": "harness",
        "model": subject.identity,
        "harness": lm_eval.__version__,
        "settings": asdict(settings),
        "files": _task_files(settings),
    }

    def work(_: list[Any]) -> list[list[Cell]]:
        return [_evaluate(subject, settings)]

    def cells(values: list[list[Cell]], seconds: float) -> list[Cell]:
        return [{**cell, **subject.facts} for cell in values[0]]

    item = Item([key], work, [None], label=f"{subject.name} harness", group=subject.name)
    return [Part([item], cells)]


def _evaluate(subject: Subject, settings: HarnessSettings) -> list[Cell]:
    import lm_eval  # an optional package
    from lm_eval.models.huggingface import HFLM

    manager = _task_manager(settings)
    make: Any = HFLM
    adapter = make(
        pretrained=subject.loaded(),
        tokenizer=subject.tokenizer,
        batch_size=settings.batch_size,
        backend="causal",
    )
    try:
        evaluate: Any = lm_eval.simple_evaluate
        found: Any = evaluate(
            model=adapter,
            tasks=list(settings.tasks),
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    except (ConnectionError, OSError, ValueError, YAMLError) as error:
        raise UserError(
            f"the harness could not run {', '.join(settings.tasks)}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    return [
        {
            "task": "harness",
            **subject.facts,
            "name": task,
            "version": found.get("versions", {}).get(task),
            "num_fewshot": found.get("n-shot", {}).get(task),
            "questions": found.get("n-samples", {}).get(task, {}).get("effective"),
            "harness": lm_eval.__version__,
            "limit": settings.limit,
            "seed": settings.seed,
            "metrics": {
                metric: value
                for metric, value in results.items()
                if isinstance(value, int | float) and metric != "sample_len"
            },
        }
        for task, results in found["results"].items()
    ]


def _task_manager(settings: HarnessSettings) -> Any:
    """The harness' table of tasks, with those of the settings; UserError if one is unknown."""
    from lm_eval.tasks import TaskManager  # an optional package

    def unknown_to(manager: Any) -> list[str]:
        return [
            task
            for task in settings.tasks
            if not Path(task).is_file() and not manager.match_tasks([task])
        ]

    # Reading the harness' thousands of task files takes ten seconds: avoided where possible.
    try:
        manager = TaskManager(include_path=settings.include_path, include_defaults=False)
        if unknown_to(manager):
            manager = TaskManager(include_path=settings.include_path)
        unknown = unknown_to(manager)
    except Exception as error:
        raise UserError(f"a task file cannot be read: {' '.join(str(error).split())}") from error
    if unknown:
        raise UserError(
            f"the harness has no task {', '.join(unknown)}; list its tasks with: lm-eval ls tasks "
            "(your own tasks: --include-path FOLDER)"
        )
    return manager


def _task_files(settings: HarnessSettings) -> dict[str, str]:
    """SHA-256 of every local task file."""
    files = [Path(task) for task in settings.tasks if Path(task).is_file()]
    if settings.include_path is not None:
        files += [f for f in sorted(Path(settings.include_path).rglob("*")) if f.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


TASK = Task(
    "harness",
    "Short-context tasks of EleutherAI's lm-evaluation-harness (an optional extra).",
    HarnessSettings,
    check=check_settings,
    parts=_parts,
    scaled=False,
)
