"""A whole recipe: its sections, the checks across them, YAML files and command-line overrides."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from coca_attention.errors import UserError, error_prefix
from coca_attention.ops import FORMS
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.data.documents import TOKENS
from coca_lab.data.tokens import NO_DOCUMENTS
from coca_lab.training.sections import (
    SCHEDULE,
    SIZES,
    DataRecipe,
    ModelRecipe,
    StageRecipe,
    TrainingRecipe,
    ValidationRecipe,
    check_types,
    refuse,
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
        """Raise UserError if settings contradict each other."""
        for name in ("model", "data", "validation", "training"):
            with error_prefix(f"{name}."):
                check_types(getattr(self, name))
        for name in ("model", "data", "validation"):
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
            if source in sources and source.endswith(TOKENS) and data.held_out:
                raise UserError(f"{source} {NO_DOCUMENTS}")
        names = [stage.name for stage in self.stages]
        why = "data.mixture is set" if data.mixture else "data.held_out is 0"
        refuse(
            {
                f"validation.every needs validation.source because {why}": (
                    validation.every is not None
                    and validation.source is None
                    and (data.mixture or not data.held_out)
                ),
                f"stages must have different names, got {', '.join(names)}": (
                    len(set(names)) < len(names)
                ),
            }
        )
        for stage in self.stages:
            with error_prefix(f"stage {stage.name!r}: "):
                check_types(stage)
                stage.check()
                self._check_stage(stage)

    def _check_stage(self, stage: StageRecipe) -> None:
        """Raise UserError if a stage does not fit the model."""
        model = self.model
        refuse(
            {
                f"train {stage.train} needs T projections, which attention {model.attention} does "
                f"not have: train all, or choose one of {', '.join(FORMS)}": (
                    stage.train in ("t", "qt", "qtv") and model.attention not in FORMS
                ),
                f"objective {stage.objective} needs a teacher: set model.start or model.teacher": (
                    stage.objective != "next_token" and not (model.teacher or model.start)
                ),
            }
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
    return read_settings(Recipe, path, overrides or (), kind="recipe", program="coca train")


def recipe_parser(shown: Collection[str] = ()) -> SettingsParser:
    """The parser of recipe files and overrides; ``shown`` as for `SettingsParser`."""
    return settings_parser(Recipe, "coca train", shown=shown)


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
