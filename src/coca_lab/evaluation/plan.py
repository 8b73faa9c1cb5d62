"""A plan: the tasks and methods with which models are measured, and their results."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from coca_attention.errors import UserError, error_prefix
from coca_lab.arguments import checked
from coca_lab.engine import Engine
from coca_lab.environment import describe_environment
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.endpoint import Endpoint
from coca_lab.evaluation.task import (
    Cell,
    Measurement,
    MethodSettings,
    Model,
    Task,
    finish,
    free_weights,
    open_model,
    served_model,
)
from coca_lab.files import keep_other_results, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.loading import usable_device
from coca_lab.old_names import methods_of_scalings


@dataclass
class ModelsMethod(MethodSettings):
    """A method that models are evaluated with."""

    models: list[str] | None = None
    """Names of the models to apply it to; by default all."""


@dataclass
class ModelsMethods:
    """Several."""

    methods: list[ModelsMethod]


@dataclass
class Plan:
    """What is measured of models."""

    methods: list[ModelsMethod] = field(default_factory=lambda: [ModelsMethod()])
    """Methods to evaluate with; by default models are as they were saved."""
    scalings: list[dict[str, Any]] | None = None
    """Old name of methods, whose method was called kind."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights in the evaluation."""
    device: str | None = None
    """Where to evaluate: cpu, cuda, …; by default the accelerator if there is one. auto spreads a
    model over all GPUs of its process, and what does not fit over the CPU's memory."""
    endpoint: str | None = None
    """Server with OpenAI's completions that answers prompts in place of models with path, such as
    http://127.0.0.1:8000/v1. It calls them by their names; folders are those of tokenizers."""
    requests: PositiveInt = 8
    """Requests to the endpoint at once."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Settings of every evaluation task, by its name."""

    def __post_init__(self) -> None:
        if self.scalings is not None:
            if self.methods != [ModelsMethod()]:
                raise UserError("scalings is the old name of methods: leave it out")
            translated = methods_of_scalings(self.scalings)
            self.methods = checked(ModelsMethods, {"methods": translated}).methods
            self.scalings = None

    def check_plan(self, models: Collection[str]) -> None:
        """Raise UserError where settings contradict each other, or name other models."""
        if not self.tasks:
            raise UserError(f"a study needs a task: one or more of {', '.join(TASKS)}")
        for method in self.methods:
            unknown = sorted(set(method.models or []) - set(models))
            if unknown:
                raise UserError(
                    f"method {method.method} names models that the study does not have: "
                    f"{', '.join(unknown)}"
                )
        unscaled = [name for name in models if not self.methods_of(name)]
        if unscaled:
            raise UserError(
                f"no method applies to {', '.join(unscaled)}: add {{method: none}} to the methods"
            )

    def methods_of(self, model: str) -> list[ModelsMethod]:
        """The methods that apply to a model."""
        return [s for s in self.methods if s.models is None or model in s.models]

    def of(self, model: str) -> "Plan":
        """What is measured of one model, without its name."""
        methods = [replace(each, models=None) for each in self.methods_of(model)]
        own: dict[str, Any] = {name: getattr(self, name) for name in Plan.__dataclass_fields__}
        own["methods"] = methods
        return Plan(**own)


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
    measurements, measured = [], []
    for model in open_models(plan, models, {} if texts is None else texts):
        for number, method in enumerate(plan.methods_of(model.name)):
            for task, settings in tasks:
                if task.scaled or number == 0:
                    with error_prefix(f"model {model.name}: {task.name}: "):
                        if plan.endpoint and not (task.prompts and method.method == "none"):
                            raise UserError("an endpoint answers prompts, without a method")
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
        with error_prefix(f"model {name}: "):
            if plan.endpoint:
                model = served_model(path, Endpoint(plan.endpoint, name, plan.requests))
            else:
                model = open_model(path, name, plan.dtype, plan.device)
            tokenizer: Any = model.tokenizer
            rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else path
            rules = f"{rules} {tokenizer.bos_token_id} {tokenizer.eos_token_id}"
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
