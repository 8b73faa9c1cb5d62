"""A whole recipe: its sections, the checks across them, YAML files and command-line overrides."""

from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from coca_attention.errors import UserError, error_prefix
from coca_lab.data.documents import TOKENS
from coca_lab.data.tokens import NO_DOCUMENTS
from coca_lab.options import OptionParser, check_sections, from_file
from coca_lab.settings import form_names
from coca_lab.training.sections import (
    SCHEDULE,
    SIZES,
    DataRecipe,
    ModelRecipe,
    StageRecipe,
    TrainingRecipe,
    ValidationRecipe,
)


@dataclass
class Recipe:
    """A training run."""

    model: ModelRecipe = field(default_factory=ModelRecipe)
    """The model."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """The text."""
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    """Perplexity on text that is not trained on, measured during training."""
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    """The optimisation."""
    stages: list[StageRecipe] = field(default_factory=list)
    """Stages to train one after another, for example [{name: first, train: t, steps: 100}]; by
    default all parameters are trained at once."""

    @property
    def run_stages(self) -> list[StageRecipe]:
        """The stages; a recipe without any is a single nameless stage that trains everything."""
        return self.stages or [StageRecipe("")]

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, over all stages."""
        return sum(stage.settings(self.training).steps for stage in self.run_stages)

    def resolved(self) -> "Recipe":
        """The recipe with what every stage takes from training, and the steps of the whole run."""
        if not self.stages:
            return self
        stages = []
        for stage in self.stages:
            settings = stage.settings(self.training)
            stages.append(replace(stage, **{name: getattr(settings, name) for name in SCHEDULE}))
        return replace(self, training=replace(self.training, steps=self.steps), stages=stages)

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        for name in ("model", "data", "validation", "training"):
            with error_prefix(f"{name}."):
                getattr(self, name).check()
        data, validation = self.data, self.validation
        sources = [source.source for source in data.sources.values()]
        for source in [*sources, validation.source or ""]:
            if source.endswith(TOKENS) and not (data.tokenizer or self.model.start):
                raise UserError(
                    f"{source} has token ids, which need data.tokenizer: set it to the tokenizer "
                    "that the file was made with"
                )
        for source in sources:
            if data.held_out and source.endswith(TOKENS):
                raise UserError(f"{source} {NO_DOCUMENTS}")
        no_held_out = data.mixture or not data.held_out
        if validation.every is not None and validation.source is None and no_held_out:
            why = "data.mixture is set" if data.mixture else "data.held_out is 0"
            raise UserError(f"validation.every needs validation.source because {why}")
        if self.training.context_parallel > 1:
            self._check_context_parallel()
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise UserError(f"stages must have different names, got {', '.join(names)}")
        for stage in self.stages:
            with error_prefix(f"stage {stage.name!r}: "):
                stage.check(self.training)
                self._check_stage(stage)

    def _check_context_parallel(self) -> None:
        """Raise UserError if sequences cannot be split over processes."""
        problems = {
            "model.attention alibi": self.model.attention == "alibi",
            "data.separate_documents": self.data.separate_documents,
            "training.loss_chunk": self.training.loss_chunk is not None,
            "validation.passkeys": bool(self.validation.passkeys),
            "validation.needles": bool(self.validation.needles),
        } | {
            f"objective {stage.objective} (stage {stage.name})": stage.objective != "next_token"
            for stage in self.stages
        }
        for problem in [name for name, found in problems.items() if found]:
            raise UserError(f"training.context_parallel cannot be combined with {problem}")

    def _check_stage(self, stage: StageRecipe) -> None:
        """Raise UserError if a stage does not fit the model."""
        model = self.model
        if stage.train in ("t", "qt", "qtv") and model.attention not in form_names():
            raise UserError(
                f"train {stage.train} needs T projections, which attention {model.attention} does "
                f"not have: train all, or choose one of {', '.join(form_names())}"
            )
        if stage.objective != "next_token" and not (model.teacher or model.start):
            raise UserError(
                f"objective {stage.objective} needs a teacher: set model.start or model.teacher"
            )


def as_yaml(recipe: Recipe, start: dict[str, Any] | None = None) -> str:
    """The recipe as YAML, including every default.

    Args:
        recipe: The recipe.
        start: Sizes of the model to start from. They are written as a comment, in place of the
            recipe's own, which do not apply.
    """
    content = asdict(recipe.resolved())
    if start is None:
        return yaml.safe_dump(content, sort_keys=False)
    for name in SIZES:
        del content["model"][name]
    if recipe.data.vocab_size == DataRecipe().vocab_size:
        del content["data"]["vocab_size"]
    sizes = ", ".join(f"{name} {value}" for name, value in start.items())
    return f"# {recipe.model.start}: {sizes}\n" + yaml.safe_dump(content, sort_keys=False)


def load_recipe(path: str | Path | None = None, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from a YAML file and command-line overrides.

    Args:
        path: YAML file; None for the defaults.
        overrides: Command-line words, such as ``["--training.steps", "100"]``.

    Returns:
        The checked recipe.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
    """
    if path is not None and not Path(path).is_file():
        raise UserError(f"{path}: no such recipe; the project's own are in the folder recipes/")
    names = [item.name for item in fields(Recipe)]
    overrides = overrides or []

    def make(words: list[str]) -> Recipe:
        read = recipe_parser().read(words)
        recipe = Recipe(**{name: read[name] for name in names})
        recipe.check()
        return recipe

    if path is None:
        return make(overrides)
    for name, value in check_sections(Path(path), "recipe", names).items():
        if name != "stages" and not isinstance(value, dict | None):
            raise UserError(f"{path}: section {name} needs fields and values, got {value!r}")
    return from_file(path, [f"--recipe={path}"], overrides, make)


def recipe_parser() -> OptionParser:
    """The parser of recipe files and overrides; its help comes from the fields' docstrings."""
    parser = OptionParser("coca train")
    parser.add_argument("--recipe", action="config", help="YAML file; also the first argument.")
    parser.add_class_arguments(Recipe)
    return parser


def differences(first: Recipe, second: Recipe) -> list[str]:
    """Dotted names of the fields in which two recipes differ."""

    def walk(left: Any, right: Any, prefix: str) -> list[str]:
        names = []
        for item in fields(left):
            a, b = getattr(left, item.name), getattr(right, item.name)
            if is_dataclass(a):
                names += walk(a, b, f"{prefix}{item.name}.")
            elif a != b:
                names.append(prefix + item.name)
        return names

    return walk(first, second, "")
