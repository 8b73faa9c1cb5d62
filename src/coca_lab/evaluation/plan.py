"""A plan: the tasks and methods with which models are measured, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError, error_prefix
from coca_lab.engine import Engine
from coca_lab.environment import describe_environment, usable_device
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.endpoint import Endpoint
from coca_lab.evaluation.task import (
    Cell,
    Measurement,
    Model,
    Task,
    finish,
    free_weights,
    open_model,
    served_model,
)
from coca_lab.files import keep_other_results, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.settings.studies import Plan

Texts = dict[str, dict[str, Any]]
"""What tasks have read, by the rules of the tokenizer, which models may share."""


def measurements_of(
    plan: Plan,
    models: Mapping[str, str],
    tasks: Sequence[tuple[Task, Any]] | None = None,
    texts: Texts | None = None,
) -> tuple[list[Measurement], list[str]]:
    """The work of tasks, by default the plan's, for models by their names and folders.

    Nothing is computed yet, but what cannot be done is refused.

    Returns:
        The measurements, and their fingerprints, which say what the cells depend on.

    Raises:
        UserError: If a model cannot be loaded or extended, or a task cannot be done with it.
    """
    tasks = tasks or [(TASKS[name], settings) for name, settings in plan.tasks.items()]
    measurements = []
    measured = []
    for model in open_models(plan, models, {} if texts is None else texts):
        for number, method in enumerate(plan.methods_of(model.name)):
            for task, settings in tasks:
                if task.scaled or number == 0:
                    with error_prefix(f"model {model.name}: {task.name}: "):
                        if plan.endpoint and not (task.endpoint and method.method == "none"):
                            raise UserError(
                                "`endpoint` is for tasks of prompts or needles, without a method"
                            )
                        found = task.measurements(model, settings, method)
                    measurements += found
                    keys = [item.keys for each in found for item in each.items]
                    measured.append(fingerprint([model.name, keys]))
    return measurements, measured


def open_models(plan: Plan, paths: Mapping[str, str], texts: Texts) -> list[Model]:
    """The models, without weights, if they can be loaded and extended; texts are shared."""
    if plan.device not in (None, "auto"):
        usable_device(str(plan.device))
    models = []
    for name, path in paths.items():
        prefix = f"model {name}: "
        # What cannot be loaded is told with its path, which often ends in the name.
        with error_prefix("" if name in (path, Path(path).name) else prefix):
            if plan.endpoint:
                endpoint = Endpoint(plan.endpoint, name, plan.requests, plan.timeout)
                model = served_model(path, endpoint)
            else:
                model = open_model(path, name, plan.dtype, plan.device)
        tokenizer: Any = model.tokenizer
        rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else path
        rules = f"{rules} {tokenizer.bos_token_id} {tokenizer.eos_token_id}"
        with error_prefix(prefix):
            for method in plan.methods_of(name) if not plan.endpoint else ():
                method.parameters(model.module, 1)
        models.append(replace(model, texts=texts.setdefault(rules, {})))
    return models


def write_cells(
    plan: Plan, models: Mapping[str, str], task: Task, settings: Any, engine: Engine, path: Path
) -> list[Cell]:
    """Write the result file of one task for models; returns its cells."""
    measurements, measured = measurements_of(plan, models, [(task, settings)])
    try:
        cells = finish(measurements, engine)
    finally:
        free_weights()
    keep_other_results(path, measured)
    facts = {"measured": measured, "environment": describe_environment()}
    asked = {"models": models, **asdict(plan), "tasks": {task.name: asdict(settings)}}
    write_json(path, {"results": cells, "settings": asked, **facts})
    return cells
