"""Which tasks and methods measure models, and which models a study has."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from coca_attention.errors import UserError
from coca_attention.method_names import MethodName
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.settings.sources import PathText, Precision

Options = dict[str, Any]
"""Fields of a recipe by dotted names, such as {model.attention: rope}."""
ModelOptions = Annotated[
    Options, BeforeValidator(lambda x: {"path": x} if isinstance(x, str) else x)
]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]


@dataclass
class MethodSettings:
    """By what method a model reads farther while it is evaluated."""

    method: MethodName = "none"
    """none is the model as it was saved; the others are those of coca extend. ntk_text computes the
    base from each window or prompt, as dynamic does, but keeps it for the answer."""
    factor: Factor | None = None
    """T / L, how many times the length that it was made for it is to read; by default 1.5."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method by name, such as {near: 4096} of limited."""
    length: PositiveInt | None = None
    """L, the length that the model was made for; by default what its configuration says."""

    def check_is_used(self) -> None:
        """Raise UserError for settings of a method where none is named."""
        for name in ("factor", "length"):
            if self.method == "none" and getattr(self, name) is not None:
                raise UserError(
                    f"`{name}` is for a method: set `method`, for example to yarn (lengths or "
                    "windows are how many tokens are read)"
                )

    @property
    def name(self) -> str:
        """The method, with its options."""
        options = {**self.options, "length": self.length} if self.length else self.options
        given = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
        return f"{self.method} ({given})" if given else self.method

    @property
    def facts(self) -> dict[str, Any]:
        """What a cell says about it; there is no factor without a method."""
        from coca_attention.models.methods import REACH  # imports torch

        factor = None if self.method == "none" else float(self.factor or REACH)
        return {"scaling": self.name, "factor": factor}

    @property
    def words(self) -> list[str]:
        """What a line of progress says about it: nothing without a method."""
        return [] if self.method == "none" else [self.name]

    @contextmanager
    def applied(self, module: Any, length: int) -> Iterator[dict[str, Any] | None]:
        """Change a model for texts of a length in tokens; yields its rotary parameters."""
        from coca_attention.models import applied, made_for  # imports torch

        to = None
        trained = self.length or made_for(module.config.get_text_config())[0]
        if self.factor is not None and trained is not None:
            to = round(self.factor * trained)
        options = {"to": to, "length": self.length, "text": length, **self.options}
        with applied(module, self.method, **options):
            yield getattr(module.config.get_text_config(), "rope_parameters", None)

    def parameters(self, module: Any, length: int) -> dict[str, Any] | None:
        """The rotary parameters for texts of a length; UserError if it cannot be applied."""
        with self.applied(module, length) as parameters:
            return parameters


@dataclass
class ModelsMethod(MethodSettings):
    """A method that models are evaluated with."""

    models: list[str] | None = None
    """Names of the models to apply it to; by default all."""

    def __post_init__(self) -> None:
        self.check_is_used()


@dataclass
class Plan:
    """What is measured of models."""

    methods: list[ModelsMethod] = field(default_factory=lambda: [ModelsMethod()])
    """Methods to evaluate with; by default models are as they were saved."""
    dtype: Precision = "float32"
    """Precision of the weights in the evaluation."""
    device: str | None = None
    """Where to evaluate: cpu, cuda, …; by default the accelerator if there is one. auto spreads a
    model over all GPUs of its process, and what does not fit over the CPU's memory."""
    endpoint: str | None = None
    """Server with OpenAI's completions in place of models with path, such as
    http://127.0.0.1:8000/v1. It calls them by their names; folders are those of tokenizers."""
    requests: PositiveInt = 8
    """Requests to the endpoint at once."""
    timeout: PositiveFloat = 600.0
    """Seconds in which the server has to answer a request, those before it included: enough for
    100,000 tokens at 170 a second. It is asked twice."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Settings of every evaluation task, by its name."""

    def methods_of(self, model: str) -> list[ModelsMethod]:
        """The methods that apply to a model."""
        return [s for s in self.methods if s.models is None or model in s.models]

    def of(self, model: str) -> "Plan":
        """What is measured of one model, without its name."""
        methods = [replace(each, models=None) for each in self.methods_of(model)]
        own: dict[str, Any] = {name: getattr(self, name) for name in Plan.__dataclass_fields__}
        own["methods"] = methods
        return Plan(**own)


@dataclass
class StudySettings(Plan):
    """What to train and evaluate; a study file also has one section per task, named after it."""

    title: str = ""
    """Heading of the report."""
    recipe: PathText = ""
    """The recipe that models change: a file, or the name of one of the project's; by default the
    settings of the paper."""
    models: Annotated[dict[str, ModelOptions], Field()] = field(default_factory=dict)
    """Models by name, each with the fields of the recipe that it sets, such as {RoFormer:
    {model.attention: rope}}; recipe names another recipe, seeds are others than those of the study.
    With path, a folder or name, a model is evaluated as it is, or converted: {path: MODEL,
    convert.form: rope}; a name: FOLDER is short for {path: FOLDER}. path and model.start may name
    another model of the study."""
    options: Options = field(default_factory=dict)
    """Fields of the recipe that all trained models set."""
    sizes: Annotated[dict[str, Options], Field()] = field(default_factory=dict)
    """Sizes by name, each with fields of the recipe, such as {0.2M: {model.hidden_size: 64}}, and
    seeds if they differ. Every model is trained in every size; the report has a chart a size."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the training."""
    learning_rates: list[float] = field(default_factory=list)
    """Learning rates of which every trained model gets the best, unless it sets its own: each is
    tried with tuning_seed, and the seeds are trained with the one that choose finds."""
    tuning_seed: int = 100
    """Seed of the trials of learning rates, whose cells are no results."""
    choose: Options = field(default_factory=dict)
    """Which cells decide: those with these fields, such as {task: perplexity, window: 256}, by
    their perplexity, needles by nats a digit, or else by the share of right answers (RULER: the
    mean score)."""
    text: PathText = ""
    """Text to train and evaluate on, in place of the recipe's and of stdlib; a data.source of
    models or options, and a source of a task, come first."""
    num_cpus: PositiveInt = 1
    """Threads of a trial, and with --ray cores of a process."""
    num_gpus: float | None = None
    """With --ray: GPUs of a process; by default one if there are GPUs. A model that needs several
    has device auto."""

    def check(self) -> None:
        """Raise UserError where settings contradict each other; `trials` checks the recipes."""
        if not self.models:
            raise UserError("a study needs models, such as {RoFormer: {model.attention: rope}}")
        if self.learning_rates and self.choose.get("task") not in self.tasks:
            raise UserError(
                "`learning_rates` need `choose`, such as {task: perplexity, window: 256}, with a "
                f"task of the study; got {self.choose}"
            )
        if not self.tasks:
            raise UserError(f"a study needs a task: one or more of {', '.join(TASK_OPTIONS)}")
        for method in self.methods:
            unknown = sorted(set(method.models or []) - self.models.keys())
            if unknown:
                raise UserError(
                    f"method {method.method} names models that the study does not have: "
                    f"{', '.join(unknown)}"
                )
        unscaled = [name for name in self.models if not self.methods_of(name)]
        if unscaled:
            raise UserError(
                f"no method applies to {', '.join(unscaled)}: add {{method: none}} to the methods"
            )
