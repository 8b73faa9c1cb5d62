"""Recipes: what one says as a whole, and how it is read, written and compared."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from coca_attention.errors import UserError, error_prefix
from coca_lab.arguments import SettingsParser, checked, read_settings, settings_parser
from coca_lab.data import SourceSettings
from coca_lab.data.documents import TOKENS
from coca_lab.data.text import NO_DOCUMENTS
from coca_lab.recipe_sections import (
    SCHEDULE,
    SIZES,
    VALIDATION,
    DataRecipe,
    ModelRecipe,
    StageRecipe,
    TrainingRecipe,
    ValidationRecipe,
    WeightedSource,
)

TEXT = "text"
"""Name of the only text of a recipe without a mixture."""


@dataclass(frozen=True)
class Text:
    """A text that a recipe reads."""

    name: str  # of the source of a mixture, `TEXT` or `VALIDATION`
    where: str  # the field that names it, for errors
    source: SourceSettings
    held_out: float  # share of its documents
    from_held_out: bool = False  # whether these are read, and not the others
    weight: float = 1.0
    max_tokens: int | None = None

    @property
    def trains(self) -> bool:
        """Whether it is trained on."""
        return self.name != VALIDATION


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
    def texts(self) -> list[Text]:
        """The texts to read: those of training, and that of validation."""
        data, validation = self.data, self.validation
        found = []
        for name, each in (data.mixture or {TEXT: data}).items():
            where = f"data.mixture.{name}: " if data.mixture else "data.source: "
            weight = each.weight if isinstance(each, WeightedSource) else 1.0
            found.append(Text(name, where, each, data.held_out, False, weight, each.max_tokens))
        if validation.every is not None:
            named = validation.source
            source = SourceSettings(named or data.source, data.text_field, data.bad_lines)
            where = "validation.source: " if named else "data.held_out: "
            found.append(
                Text(VALIDATION, where, source, 0.0 if named else data.held_out, not named)
            )
        return found

    @property
    def is_ordered(self) -> bool:
        """Whether blocks are read in an order of their own; otherwise one pass is shuffled."""
        return bool(self.data.mixture or self.stages)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, over all stages."""
        return sum(stage.settings(self.training).steps for stage in self.run_stages)

    def changed(self, section: str, **fields: Any) -> "Recipe":
        """The recipe with other fields in one section."""
        return replace(self, **{section: replace(getattr(self, section), **fields)})

    def resolved(self) -> "Recipe":
        """The recipe with what every stage takes from training, and the steps of the whole run."""
        if not self.stages:
            return self
        stages = []
        for stage in self.stages:
            settings = stage.settings(self.training)
            stages.append(replace(stage, **{name: getattr(settings, name) for name in SCHEDULE}))
        return replace(self.changed("training", steps=self.steps), stages=stages)

    def check(self) -> None:
        """Raise UserError if settings contradict each other."""
        checked(Recipe, asdict(self))  # a field set in Python may have any value
        for name in ("model", "data", "validation"):
            with error_prefix(f"{name}."):
                getattr(self, name).check()
        for text in self.texts:
            has_ids = text.source.source.endswith(TOKENS)
            if has_ids and not (self.data.tokenizer or self.model.start):
                raise UserError(
                    f"{text.source.source} has token ids, which need data.tokenizer: set it to the "
                    "tokenizer that the file was made with"
                )
            if has_ids and text.held_out:
                raise UserError(f"{text.source.source} {NO_DOCUMENTS}")
        if self.validation.every is not None and self.validation.source is None:
            if self.data.mixture:
                raise UserError(
                    "validation.every needs validation.source because data.mixture is set"
                )
            if not self.data.held_out:
                raise UserError(
                    "validation.every needs validation.source because data.held_out is 0"
                )
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise UserError(f"stages must have different names, got {', '.join(names)}")
        for stage in self.stages:
            with error_prefix(f"stage {stage.name!r}: "):
                stage.check(self.model)


def all_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe by section, but for the sizes of a start, which its files have."""
    content = asdict(recipe.resolved())
    for name in SIZES if recipe.model.start is not None else ():
        del content["model"][name]
    return content


def as_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, including every default that applies."""
    return yaml.safe_dump(all_fields(recipe), sort_keys=False)


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


def check_same_recipe(recipe: Recipe, path: Path, may_change: Collection[str] = ()) -> None:
    """Raise UserError if a run's file has another recipe, but for fields that may change."""
    ours, theirs = (asdict(each.resolved()) for each in (recipe, load_recipe(path)))
    stages, changed = ours.pop("stages"), list[str]()
    for section, part in ours.items():
        changed += [f"{section}.{name}" for name in part if part[name] != theirs[section][name]]
    if stages != theirs["stages"]:
        changed.append("stages")
    # Where tokens are stored has no influence on what is trained.
    if changed := [name for name in changed if name not in ("data.cache", *may_change)]:
        raise UserError(
            f"{path.parent} holds a run of another recipe (different: {', '.join(changed)}); "
            "choose another --output, or remove the folder"
        )
