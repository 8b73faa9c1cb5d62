"""A training run as typed data: what a recipe's YAML may say, with the paper's settings (§3.3)."""

import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

from coca_attention.data import SourceSettings
from coca_attention.errors import UserError
from coca_attention.models.conversion import Initialisation
from coca_attention.ops import FORMS
from coca_attention.options import OptionParser, check_sections

# What the blocks of `passkey_share` are called beside the sources of a mixture.
PASSKEY = "passkey"

Objective = Literal["next_token", "attention", "logits", "hidden_states"]
Trained = Literal["t", "qt", "qtv", "all", "lora"]


@dataclass
class ModelRecipe:
    """The model."""

    attention: Literal["slack", "strict", "magnitude", "rope", "alibi"] = "slack"
    """CoCA in its slack, strict or magnitude form, or a baseline: rope (RoFormer) or alibi."""
    body: Literal["gpt_neox", "llama"] = "gpt_neox"
    """The decoder around the attention; alibi comes on gpt_neox alone."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    num_layers: int = 24
    """Decoder layers."""
    num_heads: int = 16
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key/value heads (llama only); by default as many as query heads."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer; by default 4 x hidden_size."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = True
    """Whether input and output embeddings are one matrix."""
    start: str | None = None
    """Folder or name of a trained Transformers model to begin with, in place of drawn weights; it
    brings its sizes and its tokenizer. A rotary one is converted where attention names a CoCA form,
    one that has the attention already is trained on."""
    init: Initialisation = "fold"
    """How T begins where start is converted: the pair means of the key projections, fitted to the
    start's own scores on some blocks of the text, or drawn."""
    teacher: str | None = None
    """Model that the objectives other than next_token learn from; by default start."""
    interpolation: float | None = None
    """Factor of position interpolation (PI) that the model is trained under and keeps."""


SIZES = (
    "body", "hidden_size", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size",
    "rope_base", "tie_embeddings",
)  # fmt: skip


@dataclass
class WeightedSource(SourceSettings):
    """A source of a mixture."""

    source: str = ""
    """What is read, as data.source."""
    weight: float = 0.0
    """Share of the training tokens; the weights of a mixture sum to 1."""
    max_tokens: int | None = None
    """Read at most this many training tokens; by default a stream is read as far as needed."""


@dataclass
class DataRecipe(SourceSettings):
    """The text."""

    mixture: dict[str, WeightedSource] = field(default_factory=dict)
    """In place of source: sources by name, such as {text: {source: BOOKS, weight: 0.75}, code:
    {source: CODE, weight: 0.25}}; one that is too short for its share is read again."""
    held_out: float = 0.05
    """Share of documents, chosen by a hash of their text, that training never sees."""
    max_tokens: int | None = None
    """Read at most this many training tokens; needed for endless streams."""
    tokenizer: str | None = None
    """Folder or name of a Transformers tokenizer; by default that of model.start, or else a
    byte-level BPE is trained."""
    vocab_size: int = 32768
    """Entries of the tokenizer that is trained where none is named."""
    split_digits: bool = False
    """Whether every digit is a token of its own in a tokenizer that is trained."""
    block_length: int = 512
    """Training length in tokens."""
    passkey_share: float = 0.0
    """Share of the blocks that are passkey texts with their answers, each of another key."""
    separate_documents: bool = False
    """Whether the documents in a block are kept apart: attention does not cross from one to the
    next, and positions begin anew in each."""
    cache: str | None = "auto"
    """Folder that keeps tokenised text for the next start; auto is coca-attention in the user's
    cache (XDG_CACHE_HOME, else ~/.cache), null keeps the tokens in memory."""


@dataclass
class ValidationRecipe:
    """Perplexity on text that is not trained on, measured in the course of training."""

    every: int | None = None
    """Optimizer steps between measurements; there is one before the first step and one after the
    last. By default nothing is measured."""
    source: str | None = None
    """Text to measure on, as data.source, whose text_field and bad_lines hold here too; by default
    the documents that data.held_out keeps from training."""
    batches: int = 4
    """Global batches to measure on, of blocks spread evenly over the text; each takes about a third
    of the time of an optimizer step."""


@dataclass
class TrainingRecipe:
    """The optimisation."""

    steps: int = 10000
    """Optimizer steps; of every stage that does not say its own, where there are stages."""
    global_batch_size: int = 256
    """Blocks per optimizer step over all processes."""
    micro_batch_size: int = 16
    """Blocks per process in one pass; the rest of the global batch is accumulated."""
    learning_rate: float = 1e-4
    """Peak rate."""
    warmup_share: float = 0.01
    """Share of the steps over which the rate rises linearly."""
    initial_learning_rate: float = 1e-7
    """Rate at the start of the rise."""
    final_share: float = 0.1
    """Share of the peak rate that the linear decay ends at."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    weight_decay: float = 0.1
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Autocast dtype of the forward and backward pass; weights stay in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    seed: int = 0
    """Seed of the weights and of the order of the blocks."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are removed."""
    log_every: int = 10
    """Steps between entries of the training curve."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where curves also go: names that Transformers knows, such as tensorboard or wandb."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further fields of Transformers' TrainingArguments, for example fsdp or deepspeed."""


@dataclass
class StageRecipe:
    """One of several stages of a run; what is left out is as in the section training."""

    name: str
    """Name of the stage and of its folder."""
    train: Trained = "all"
    """Parameters that learn: t (the T projections), qt (with the queries'), qtv (with the values'),
    all, or lora (adapters on every linear layer, merged into the weights when the stage ends)."""
    objective: Objective = "next_token"
    """What is minimised: next_token; attention, the distance of every attention layer's output from
    the teacher's on the teacher's own input; logits, the KL divergence from the teacher's
    prediction; or hidden_states, that and the distance of what leaves every layer."""
    steps: int | None = None
    """Optimizer steps."""
    learning_rate: float | None = None
    """Peak rate."""
    warmup_share: float | None = None
    """Share of the stage's steps over which the rate rises."""
    final_share: float | None = None
    """Share of the peak rate at the end of the stage."""
    lora_rank: int = 16
    """Rank of the adapters of lora; they are scaled by 2."""

    def settings(self, training: TrainingRecipe) -> TrainingRecipe:
        """The section training as it holds for this stage."""
        names = ("steps", "learning_rate", "warmup_share", "final_share")
        own = {name: getattr(self, name) for name in names}
        return replace(training, **{n: value for n, value in own.items() if value is not None})


@dataclass
class Recipe:
    """A training run."""

    model: ModelRecipe = field(default_factory=ModelRecipe)
    """The model."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """The text."""
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    """Perplexity on text that is not trained on, measured in the course of training."""
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    """The optimisation."""
    stages: list[StageRecipe] = field(default_factory=list)
    """Stages of the run in their order, each with a name and what it trains, for example
    [{name: first, train: t, steps: 100}]; without them everything is trained at once."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, over all stages."""
        if not self.stages:
            return self.training.steps
        return sum(stage.settings(self.training).steps for stage in self.stages)

    def check(self) -> None:
        """Raise UserError where settings contradict each other or leave their range."""
        model, data, training = self.model, self.data, self.training
        for section, name in (
            (model, "hidden_size"),
            (model, "num_layers"),
            (model, "num_heads"),
            (data, "block_length"),
            (model, "intermediate_size"),
            (model, "num_key_value_heads"),
            (training, "steps"),
            (training, "global_batch_size"),
            (training, "micro_batch_size"),
            (training, "save_every"),
            (training, "keep_checkpoints"),
            (training, "log_every"),
        ):
            value = getattr(section, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if model.hidden_size % model.num_heads:
            raise UserError(
                f"hidden_size must be a multiple of num_heads, got {model.hidden_size} and "
                f"{model.num_heads}"
            )
        if (model.hidden_size // model.num_heads) % 2:
            raise UserError(
                f"the head width hidden_size / num_heads must be even, got "
                f"{model.hidden_size // model.num_heads}"
            )
        if model.body != "gpt_neox" and model.attention == "alibi":
            raise UserError("alibi comes on the body gpt_neox alone")
        if model.body != "llama" and model.num_key_value_heads is not None:
            raise UserError("num_key_value_heads needs the body llama")
        if model.num_heads % (model.num_key_value_heads or model.num_heads):
            raise UserError(
                f"num_key_value_heads must divide num_heads, got {model.num_key_value_heads} and "
                f"{model.num_heads}"
            )
        if not model.rope_base > 0:
            raise UserError(f"rope_base must be above 0, got {model.rope_base}")
        if not 0 <= data.held_out < 1:
            raise UserError(f"held_out must be at least 0 and below 1, got {data.held_out}")
        if not 0 <= data.passkey_share < 1:
            raise UserError(
                f"passkey_share must be at least 0 and below 1, got {data.passkey_share}"
            )
        for part in (data, *data.mixture.values()):
            if part.max_tokens is not None and part.max_tokens < 1:
                raise UserError(f"max_tokens must be at least 1, got {part.max_tokens}")
        check_mixture(data)
        _check_validation(self)
        _check_schedule(training)
        _check_start(model)
        _check_stages(self)


def _check_schedule(training: TrainingRecipe) -> None:
    if not training.learning_rate > 0:
        raise UserError(f"learning_rate must be above 0, got {training.learning_rate}")
    if not 0 <= training.warmup_share <= 1 or not 0 <= training.final_share <= 1:
        raise UserError("warmup_share and final_share must lie between 0 and 1")


def _check_start(model: ModelRecipe) -> None:
    if model.interpolation is not None and not model.interpolation >= 1:
        raise UserError(f"interpolation must be at least 1, got {model.interpolation}")
    if model.interpolation is not None and model.attention == "alibi":
        raise UserError("interpolation is of rotary positions, which alibi has not: leave it out")
    if model.start is None:
        return
    default = ModelRecipe()
    given = [name for name in SIZES if getattr(model, name) != getattr(default, name)]
    if given:
        raise UserError(f"start brings the model's sizes with it: leave out {', '.join(given)}")


def _check_stages(recipe: Recipe) -> None:
    """Raise UserError where stages contradict each other, the model, or what is installed."""
    model, names = recipe.model, [stage.name for stage in recipe.stages]
    if len(set(names)) < len(names):
        raise UserError(f"stages need names of their own, got {', '.join(names)}")
    for stage in recipe.stages:
        where = f"stage {stage.name!r}"
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", stage.name):
            raise UserError(f"{where}: a name becomes a folder: use letters, digits, . _ and -")
        settings = stage.settings(recipe.training)
        if settings.steps < 1:
            raise UserError(f"{where}: steps must be at least 1, got {settings.steps}")
        try:
            _check_schedule(settings)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if stage.lora_rank < 1:
            raise UserError(f"{where}: lora_rank must be at least 1, got {stage.lora_rank}")
        if stage.train == "lora" and find_spec("peft") is None:
            raise UserError(f"{where}: lora needs peft: pip install 'coca-attention[lora]'")
        if stage.train in ("t", "qt", "qtv") and model.attention not in FORMS:
            raise UserError(
                f"{where} would train nothing: attention {model.attention} has no T projections; "
                f"train all, or choose one of {', '.join(FORMS)}"
            )
        if stage.objective == "attention" and stage.train not in ("t", "qt", "qtv"):
            raise UserError(
                f"{where}: the objective attention reaches attention layers alone: train t, qt or "
                f"qtv, got {stage.train}"
            )
        if stage.objective != "next_token" and not (model.teacher or model.start):
            raise UserError(
                f"{where}: the objective {stage.objective} needs a teacher: set model.start or "
                "model.teacher"
            )


def check_mixture(data: DataRecipe) -> None:
    """Raise UserError where a mixture contradicts itself or the settings of a single source."""
    if not data.mixture:
        return
    plain = DataRecipe()
    for name in ("source", "text_field", "bad_lines", "max_tokens"):
        if getattr(data, name) != getattr(plain, name):
            raise UserError(
                f"data.{name} is given beside data.mixture: leave it out, or set it in each source "
                "of the mixture"
            )
    for name, part in data.mixture.items():
        if not part.source:
            raise UserError(f"data.mixture.{name} names no source to read; give it a source")
        if not part.weight > 0:
            raise UserError(f"data.mixture.{name} needs a weight above 0, got {part.weight}")
    total = sum(part.weight for part in data.mixture.values())
    if abs(total - 1) > 1e-6:
        weights = " + ".join(f"{part.weight:g}" for part in data.mixture.values())
        raise UserError(f"the weights of data.mixture must sum to 1, got {weights} = {total:g}")
    if data.passkey_share and PASSKEY in data.mixture:
        raise UserError(
            f"a source of data.mixture is called {PASSKEY} and there is a passkey_share: give the "
            "source another name"
        )


def _check_validation(recipe: Recipe) -> None:
    """Raise UserError where validation is asked for and there is nothing to measure it on."""
    validation, data = recipe.validation, recipe.data
    if validation.every is None:
        return
    for name in ("every", "batches"):
        if getattr(validation, name) < 1:
            raise UserError(
                f"validation.{name} must be at least 1, got {getattr(validation, name)}"
            )
    if validation.source is None and (data.mixture or not data.held_out):
        why = "data.mixture has several sources" if data.mixture else "data.held_out is 0"
        raise UserError(f"validation.every needs validation.source, the text to measure on: {why}")


def as_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out."""
    return yaml.safe_dump(asdict(recipe), sort_keys=False)


def load_recipe(path: str | Path | None = None, overrides: list[str] | None = None) -> Recipe:
    """A recipe from a YAML file and command-line overrides.

    Args:
        path: YAML file; without it the defaults.
        overrides: Command-line words, such as ``["--training.steps", "100"]``.

    Returns:
        The checked recipe.

    Raises:
        UserError: If the file is missing or broken, a key unknown, or a value unfit.
    """
    if path is not None and not Path(path).is_file():
        raise UserError(f"{path}: no such recipe; the project's own are in the folder recipes/")
    if path is not None:
        check_sections(Path(path), "recipe", [item.name for item in fields(Recipe)])
    words = [] if path is None else [f"--recipe={path}"]
    try:
        read = recipe_parser().read([*words, *(overrides or [])])
    except UserError as error:
        raise UserError(f"{path}: {error}" if path is not None else str(error)) from error
    recipe = Recipe(**{item.name: read[item.name] for item in fields(Recipe)})
    recipe.check()
    return recipe


def recipe_parser() -> OptionParser:
    """The parser of recipe files and overrides; its help comes from the fields above."""
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
