"""Short-context quality through EleutherAI's lm-evaluation-harness, an optional extra."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError


@dataclass
class HarnessSettings:
    """What the harness measures."""

    tasks: list[str] = field(default_factory=list)
    """Names of the harness' tasks or groups, or YAML files of tasks of one's own."""
    include_path: str | None = None
    """Folder with task files of one's own; such files can hold code, so use none that you do not
    trust."""
    num_fewshot: int | None = None
    """Examples shown before each question; by default as the task says."""
    limit: int | None = None
    """Ask only so many questions of each task."""
    batch_size: int = 8
    """Requests answered at once."""
    seed: int = 0
    """Seed of the examples shown."""


def check_settings(settings: HarnessSettings) -> None:
    """Raise UserError unless the harness is there and a task is named."""
    if find_spec("lm_eval") is None:
        raise UserError(
            "this needs the lm-evaluation-harness: pip install 'coca-attention[harness]'"
        )
    if not settings.tasks:
        raise UserError("name at least one task: --tasks hellaswag,arc_easy")
    for name in ("batch_size", "limit"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise UserError(f"{settings.include_path}: no such folder of task files")


def evaluate_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: HarnessSettings,
    *,
    name: str = "model",
    progress: Callable[[str, int, int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Figures of the harness' tasks for a loaded model, CoCA or any other.

    Args:
        model: A causal language model of Transformers; the harness gets this object and loads
            nothing itself.
        tokenizer: Its tokenizer.
        settings: Tasks and how they are asked.
        name: What the results call the model.
        progress: Unused; the harness draws its own bars.

    Returns:
        One cell per task: the metrics as the harness names them, its version of the task.

    Raises:
        UserError: If the harness is not installed, or a task unknown or not to be had.
    """
    check_settings(settings)
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    def unknown_to(manager: Any) -> list[str]:
        return [
            task
            for task in settings.tasks
            if not Path(task).is_file() and not manager.match_tasks([task])
        ]

    # Reading the harness' thousands of task files takes ten seconds: only where they are needed.
    manager = TaskManager(include_path=settings.include_path, include_defaults=False)
    if unknown_to(manager):
        manager = TaskManager(include_path=settings.include_path)
    unknown = unknown_to(manager)
    if unknown:
        raise UserError(
            f"the harness has no task {', '.join(unknown)}; list its tasks with: lm-eval ls tasks "
            "(tasks of your own: --include-path FOLDER)"
        )
    make: Any = HFLM
    adapter = make(
        pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size, backend="causal"
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
    except (ConnectionError, OSError, ValueError) as error:
        raise UserError(
            f"the harness could not run {', '.join(settings.tasks)}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    return [
        {
            "task": "harness",
            "model": name,
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
