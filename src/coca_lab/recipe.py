"""Recipes: what one says as a whole, what contradicts itself, how it is read and compared."""

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError, did_you_mean, error_prefix, install
from coca_lab.options import checked, read_settings
from coca_lab.recipe_sections import (
    BASELINES,
    OWN,
    PASSKEY,
    POSITIONS,
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
from coca_lab.settings.sources import NO_DOCUMENTS, TOKEN_IDS, SourceSettings
from coca_lab.yaml_files import dump_yaml

TEXT = "text"
"""Name of the only text of a recipe without a mixture."""


@dataclass(frozen=True)
class Text:
    """A text that a recipe reads."""

    name: str  # of the source of a mixture, `TEXT` or `VALIDATION`
    where: str  # the field that names it, for errors
    source: SourceSettings
    what: str  # the text, or the first one that has the same source
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
    def schedules(self) -> list[TrainingRecipe]:
        """The section training with the values of each stage."""
        every = [{name: getattr(stage, name) for name in SCHEDULE} for stage in self.run_stages]
        given = [{n: value for n, value in each.items() if value is not None} for each in every]
        return [replace(self.training, **values) for values in given]

    @property
    def texts(self) -> list[Text]:
        """The texts to read: those of training, and that of validation."""
        data = self.data
        validation = self.validation
        found = []
        what = dict[str, str]()
        for name, each in (data.mixture or {TEXT: data}).items():
            where = f"data.mixture.{name}: " if data.mixture else "data.source: "
            weight = each.weight if isinstance(each, WeightedSource) else 1.0
            own = what.setdefault(each.source, "training text" if name == TEXT else f"{name} text")
            found.append(
                Text(name, where, each, own, data.held_out, False, weight, each.max_tokens)
            )
        if validation.every is not None:
            named = validation.source
            read = data.source if named is None else named
            source = SourceSettings(read, data.text_field, data.bad_lines)
            where = "data.held_out: " if named is None else "validation.source: "
            own = what.get(source.source, f"{VALIDATION} text")
            share = data.held_out if named is None else 0.0
            found.append(Text(VALIDATION, where, source, own, share, from_held_out=named is None))
        return found

    @property
    def is_ordered(self) -> bool:
        """Whether blocks are read in an order of their own; otherwise one pass is shuffled."""
        return bool(self.data.mixture or self.stages)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, over all stages."""
        return sum(settings.steps for settings in self.schedules)

    def changed(self, section: str, **fields: Any) -> "Recipe":
        """The recipe with other fields in one section."""
        return replace(self, **{section: replace(getattr(self, section), **fields)})

    def resolved(self) -> "Recipe":
        """The recipe with what every stage takes from training, and the steps of the whole run."""
        if not self.stages:
            return self
        stages = [
            replace(stage, **{name: getattr(settings, name) for name in SCHEDULE})
            for stage, settings in zip(self.stages, self.schedules, strict=True)
        ]
        return replace(self.changed("training", steps=self.steps), stages=stages)

    def check(self) -> None:
        """Raise UserError if settings contradict each other."""
        checked(Recipe, asdict(self))  # defaults, too, and fields that were set in Python
        checks = {"model": _check_model, "data": _check_data, "validation": _check_validation}
        for name, check in checks.items():
            with error_prefix(f"{name}."):
                check(getattr(self, name))
        for text in self.texts:
            has_ids = text.source.source.endswith(TOKEN_IDS)
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
                _check_stage(stage, self.model)


def _check_model(model: ModelRecipe) -> None:
    from coca_attention.ops import FORMS  # imports torch, for which a help need not wait

    known = (*FORMS, *BASELINES)
    if model.attention not in known:
        hint = did_you_mean(model.attention, known)
        raise UserError(
            f"attention must be one of {', '.join(known)}, got {model.attention!r}{hint}"
        )
    given = [name for name in POSITIONS if getattr(model, name)]
    if model.attention == "alibi" and given:
        raise UserError(f"attention alibi has no {', '.join(given)}: leave it out")
    if model.attention == "alibi" and model.body != "gpt_neox":
        raise UserError(f"body must be gpt_neox for attention alibi, got {model.body}")
    if model.attention != OWN:
        from coca_attention.models.families import decoders  # imports transformers

        if model.body not in (bodies := decoders()):
            raise UserError(
                f"body must be one of {', '.join(bodies)} for attention {model.attention}, got "
                f"{model.body}; with attention {OWN} it may be any model_type of Transformers"
            )
    if model.linear:
        invariant = model.attention in FORMS and FORMS[model.attention].shift_invariant
        if given or model.start or not invariant:
            raise UserError(
                "linear is for new models with a shift-invariant form, such as strict, "
                f"without {', '.join(POSITIONS)}"
            )
    if len(model.layers) > model.num_layers:
        raise UserError(
            f"layers must have at most num_layers letters, got {model.layers!r} for "
            f"{model.num_layers} layers"
        )
    if model.window and not model.layers:
        raise UserError("window is for local layers: set layers")
    if model.decay_length and not model.decay:
        raise UserError(f"decay_length {model.decay_length} requires a decay")
    if model.near and model.attention == "slack":
        raise UserError(
            "near needs scores that depend on the distance of rotary pairs alone, got "
            f"attention {model.attention}: use rope, strict or magnitude"
        )
    if model.near and (model.layers or model.decay):
        raise UserError("near is for models without layers and decay: leave it out")
    default = ModelRecipe()
    sizes = [name for name in SIZES if getattr(model, name) != getattr(default, name)]
    if model.start is not None and sizes:
        raise UserError(f"start determines the model's sizes: leave out {', '.join(sizes)}")
    heads = model.num_heads
    kv_heads = model.num_key_value_heads or model.num_heads
    head_width, rest = divmod(model.hidden_size, heads)
    if rest:
        raise UserError(
            f"hidden_size must be a multiple of num_heads, got {model.hidden_size} and {heads}"
        )
    if head_width % 2:
        raise UserError(f"hidden_size / num_heads must be even, got {head_width}")
    if (model.turning_pairs or 0) > head_width // 2:
        raise UserError(
            f"turning_pairs must be at most {head_width // 2}, the number of pairs per head; "
            f"got {model.turning_pairs}"
        )
    if model.body == "gpt_neox" and model.num_key_value_heads:
        raise UserError("gpt_neox has no num_key_value_heads: leave it out, or use body llama")
    if heads % kv_heads:
        raise UserError(f"num_key_value_heads must divide num_heads, got {kv_heads} and {heads}")


def _check_data(data: DataRecipe) -> None:
    if PASSKEY in data.tasks:
        raise UserError("passkeys have a field of their own: set data.passkey_share")
    shares = data.task_shares
    if sum(shares.values()) >= 1:
        raise UserError(
            f"the shares of tasks and passkey_share must sum to less than 1, got {shares}"
        )
    if not data.mixture:
        return
    names = [*(item.name for item in fields(SourceSettings)), "max_tokens"]
    given = [name for name in names if getattr(data, name) != getattr(DataRecipe(), name)]
    if given:
        raise UserError(
            f"{', '.join(given)} cannot be combined with data.mixture: leave it out, or set "
            "it for each source of the mixture"
        )
    for name, source in data.mixture.items():
        if not isinstance(name, str):
            raise UserError(f"names of a mixture are text, got {name!r}: put it into quotes")
        if not source.source:
            raise UserError(f"mixture.{name}.source is missing: name the text to read")
    weights = [source.weight for source in data.mixture.values()]
    if abs(sum(weights) - 1) > 1e-6:
        raise UserError(
            f"mixture needs weights that sum to 1, got {' + '.join(map(str, weights))} = "
            f"{sum(weights):g}"
        )
    if {*shares, VALIDATION} & data.mixture.keys():
        raise UserError(
            f"a source of the mixture has the name of a task or {VALIDATION}: rename it"
        )


def _check_validation(validation: ValidationRecipe) -> None:
    prompts = validation.passkeys or validation.needles
    if prompts and validation.every is None:
        raise UserError(
            "passkeys and needles are asked for in validation: set validation.every, or both to 0"
        )
    if validation.lengths and not prompts:
        raise UserError("lengths are those of prompts: set validation.passkeys or needles")


def _check_stage(stage: StageRecipe, model: ModelRecipe) -> None:
    from coca_attention.ops import FORMS  # imports torch

    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", stage.name):
        raise UserError("name is also a folder's name: use letters, digits, . _ and -")
    if stage.train == "lora" and find_spec("peft") is None:
        raise UserError(f"lora needs peft: {install('lora')}")
    if stage.objective == "attention" and stage.train in ("all", "lora"):
        raise UserError(
            "objective attention trains attention layers only: set train to t, qt or qtv, got "
            f"{stage.train}"
        )
    if stage.train in ("t", "qt", "qtv") and model.attention not in FORMS:
        raise UserError(
            f"train {stage.train} needs T projections, which attention {model.attention} does "
            f"not have: train all, or choose one of {', '.join(FORMS)}"
        )
    if stage.objective != "next_token" and not (model.teacher or model.start):
        raise UserError(
            f"objective {stage.objective} needs a teacher: set model.start or model.teacher"
        )


def all_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe by section, but for the sizes of a start, which its files have."""
    content = asdict(recipe.resolved())
    for name in SIZES if recipe.model.start is not None else ():
        del content["model"][name]
    return content


def as_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, including every default that applies."""
    return dump_yaml(all_fields(recipe))


def load_recipe(
    path: str | Path | None = None, overrides: list[str] | None = None, *, check: bool = True
) -> Recipe:
    """Read a recipe from a YAML file and command-line overrides.

    Args:
        path: YAML file; None for the defaults.
        overrides: Command-line words, such as ``["--training.steps", "100"]``.
        check: Whether to check the whole, too, for which torch is imported.

    Returns:
        The recipe.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
    """
    return read_settings(
        Recipe, path, overrides or (), kind="recipe", program="coca train", check=check
    )


def check_same_recipe(recipe: Recipe, path: Path, may_change: Collection[str] = ()) -> None:
    """Raise UserError if a run's file has another recipe, but for fields that may change."""
    ours, theirs = (asdict(each.resolved()) for each in (recipe, load_recipe(path)))
    stages = ours.pop("stages")
    changed = list[str]()
    if ours["training"]["precision"] == "auto":  # of the machine where the run began
        ours["training"]["precision"] = theirs["training"]["precision"]
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
