"""The sections of a recipe: what its YAML may say, with the paper's settings (§3.3) as defaults."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

from coca_attention.errors import UserError, did_you_mean, error_prefix, install
from coca_lab.data import SourceSettings
from coca_lab.settings import Initialisation, check_letters, check_vocab_size, form_names

# Names of the only source of a recipe without a mixture, and of the blocks of `passkey_share`.
TEXT = "text"
PASSKEY = "passkey"
# Further tasks.
TASKS = ("recall",)

BODIES = ("gpt_neox", "llama")
OWN = "own"
BASELINES = ("rope", "alibi", OWN)
SIZES = (
    "body", "hidden_size", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size",
    "rope_base", "tie_embeddings", "layers", "window", "turning_pairs", "temperature", "decay",
    "decay_length",
)  # fmt: skip

# What a stage may set of the section training.
SCHEDULE = ("steps", "learning_rate", "warmup_share", "final_share")

LARGEST = 2**40
"""Of any count."""

Objective = Literal["next_token", "attention", "logits", "hidden_states"]
Trained = Literal["t", "qt", "qtv", "all", "lora"]


def check_positive_counts(settings: Any, *names: str) -> None:
    """Raise UserError if one of the named fields is set and below 1, or beyond any use."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
        if value is not None and value > LARGEST:
            raise UserError(f"{name} must be at most {LARGEST}, got {value}")


def check_positive(settings: Any, *names: str) -> None:
    """Raise UserError if one of the named fields is not finite and above 0."""
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise UserError(f"{name} must be above 0, got {getattr(settings, name)}")


@dataclass
class ModelRecipe:
    """The model."""

    attention: str = "slack"
    """A CoCA score form (slack, strict, magnitude, or one that your code registers), or a baseline:
    rope (RoFormer) or alibi; own with another body, which has an attention of its own."""
    body: str = "gpt_neox"
    """Architecture around the attention: gpt_neox or llama, or another model_type of Transformers,
    such as baseline_llama; alibi requires gpt_neox."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of the configuration of another body."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    num_layers: int = 24
    """Number of decoder layers."""
    num_heads: int = 16
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key/value heads (llama only); by default as many as query heads."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; by default 4 x hidden_size."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = True
    """Whether the input and output embeddings share one matrix."""
    layers: str = ""
    """Roles of the layers, a letter each, repeated over all layers: l (local: attention over the
    last window tokens) and g (global: dot products without positions over the whole text, with a
    temperature and a decay). By default all layers apply attention to the whole text."""
    window: int | None = None
    """Tokens that a local layer sees; by default an eighth of the training length."""
    turning_pairs: int | None = None
    """Rotary pairs that turn in layers that see the whole text; by default 0 with layers, and all
    without."""
    temperature: bool | None = None
    """Whether queries grow with the logarithm of the tokens in sight in layers that see the whole
    text, beginning from the training length; by default true with layers, and false without."""
    decay: float | None = None
    """Exponent of a power law by which attention decays with the distance in layers that see the
    whole text; 0 is none. By default 1 with layers, and 0 without."""
    decay_length: float | None = None
    """Distance in tokens at which it begins; by default an eighth of the training length."""
    max_distance: int | None = None
    """Keys farther back than this many tokens are scored as if this far back, in layers that see
    the whole text; a decay begins there, and a temperature makes no query smaller: what a rotary
    start says of texts up to this long does not change. Less than its training length may lose
    passkeys within it, which coca convert --check measures. By default no limit."""
    start: str | None = None
    """Folder or name of a trained Transformers model to start from instead of random weights. Its
    sizes and its tokenizer are used. A rotary model is converted if attention names a CoCA form; a
    model that already has the attention is trained further."""
    init: Initialisation = "fold"
    """How the T projections are initialised when start is converted: fold (pair means of the key
    projections), calibrated (fitted to the attention scores of start on some blocks of the text),
    or random."""
    teacher: str | None = None
    """Model that objectives other than next_token learn from; by default start."""
    interpolation: float | None = None
    """Factor of position interpolation; the model is trained with it and saved with it."""
    scaling: Literal["linear", "ntk", "dynamic", "yarn", "llama3"] = "linear"
    """Rule by which positions are scaled by the factor interpolation: linear is PI."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision in which the trained model is saved; auto is that of start, or float32 without one.
    Training itself keeps weights in float32."""

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        known = (*form_names(), *BASELINES)
        if self.attention not in known:
            renamed = "; the form linear is now called magnitude"
            raise UserError(
                f"attention must be one of {', '.join(known)}, got "
                f"{self.attention!r}"
                f"{renamed if self.attention == 'linear' else did_you_mean(self.attention, known)}"
            )
        if (self.attention == OWN) == (self.body in BODIES):
            raise UserError(
                f"a body other than {' or '.join(BODIES)} has attention {OWN}, and no other body "
                f"has; got attention {self.attention} with body {self.body}"
            )
        if self.options and self.body in BODIES:
            raise UserError(f"options are for other bodies than {self.body}: leave them out")
        check_positive_counts(self, "hidden_size", "num_layers", "num_heads")
        check_positive_counts(self, "num_key_value_heads", "intermediate_size", "window")
        check_positive_counts(self, "max_distance")
        if self.num_layers > 10_000:
            raise UserError(f"num_layers must be at most 10000, got {self.num_layers}")
        check_positive(self, "rope_base")
        if self.layers:
            check_letters(self.layers)
            if self.num_layers < len(self.layers):
                raise UserError(
                    f"layers {self.layers} needs num_layers of at least {len(self.layers)}, got "
                    f"{self.num_layers}"
                )
        if self.layers and self.attention == "alibi":
            raise UserError("layers requires a score form or rope, got attention alibi")
        if self.attention == "alibi" and (self.temperature or self.decay or self.turning_pairs):
            raise UserError(
                "attention alibi has no turning_pairs, temperature or decay: leave them out"
            )
        if (
            self.max_distance is not None
            and self.attention in ("alibi", "slack")
            and not self.layers
        ):
            raise UserError(
                "max_distance needs scores that depend on the distance of rotary pairs alone, got "
                f"attention {self.attention}: use rope, strict or magnitude"
            )
        if self.window is not None and not self.layers:
            raise UserError(f"window is for local layers: set layers, got window {self.window}")
        if self.decay is not None and not self.decay >= 0:
            raise UserError(f"decay must be 0 or above, got {self.decay}")
        if self.decay_length is not None:
            check_positive(self, "decay_length")
            if self.decay == 0 or (self.decay is None and not self.layers):
                raise UserError(f"decay_length {self.decay_length} requires a decay")
        head_width, rest = divmod(self.hidden_size, self.num_heads)
        if rest:
            raise UserError(
                f"hidden_size must be a multiple of num_heads, got {self.hidden_size} and "
                f"{self.num_heads}"
            )
        if head_width % 2:
            raise UserError(f"hidden_size / num_heads must be even, got {head_width}")
        if not 0 <= (self.turning_pairs or 0) <= head_width // 2:
            raise UserError(
                f"turning_pairs must be between 0 and {head_width // 2}, the number of pairs per "
                f"head; got {self.turning_pairs}"
            )
        if self.body != "gpt_neox" and self.attention == "alibi":
            raise UserError(f"body must be gpt_neox for attention alibi, got {self.body}")
        if self.body == "gpt_neox" and self.num_key_value_heads is not None:
            raise UserError(f"num_key_value_heads requires body llama, got {self.body}")
        if self.num_heads % (self.num_key_value_heads or self.num_heads):
            raise UserError(
                f"num_key_value_heads must divide num_heads, got {self.num_key_value_heads} and "
                f"{self.num_heads}"
            )
        if self.interpolation is not None:
            if not self.interpolation >= 1:
                raise UserError(f"interpolation must be at least 1, got {self.interpolation}")
            if self.attention == "alibi":
                raise UserError("interpolation requires rotary positions: leave it out for alibi")
        default = ModelRecipe()
        given = [name for name in SIZES if getattr(self, name) != getattr(default, name)]
        if self.start is not None and given:
            raise UserError(f"start determines the model's sizes: leave out {', '.join(given)}")


@dataclass
class WeightedSource(SourceSettings):
    """A source of a mixture."""

    source: str = ""
    """Same values as data.source."""
    weight: float = 0.0
    """Share of the training tokens; the weights of a mixture sum to 1."""
    max_tokens: int | None = None
    """Maximum number of training tokens to read; by default a stream is read as far as needed."""

    def check(self) -> None:
        """Raise UserError if a setting is missing or out of range."""
        if not self.source:
            raise UserError("source is missing: name the text to read")
        check_positive(self, "weight")
        check_positive_counts(self, "max_tokens")


@dataclass
class DataRecipe(SourceSettings):
    """The text."""

    mixture: dict[str, WeightedSource] = field(default_factory=dict)
    """Several sources by name in place of source, such as {text: {source: BOOKS, weight: 0.75},
    code: {source: CODE, weight: 0.25}}. A source that is too short for its share is repeated."""
    held_out: float = 0.05
    """Share of documents, chosen by a hash of their text, that are excluded from training."""
    max_tokens: int | None = None
    """Maximum number of training tokens to read; required for endless streams."""
    tokenizer: str | None = None
    """Folder or name of a Transformers tokenizer. By default the tokenizer of model.start is used;
    without a start, a byte-level BPE is trained."""
    vocab_size: int = 32768
    """Vocabulary size of a newly trained tokenizer."""
    split_digits: bool = False
    """Whether a newly trained tokenizer encodes every digit as a token of its own."""
    block_length: int = 512
    """Training length in tokens."""
    passkey_share: float = 0.0
    """Share of the blocks that are passkey texts with answers, each with a different key."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Shares of the blocks with texts of further tasks, such as {recall: 0.3}: associative recall
    of random tokens, of which the answers alone are trained."""
    separate_documents: bool = False
    """Whether documents in the same block are separated: attention does not cross document
    boundaries, and positions restart in each document."""
    cache: str | None = "auto"
    """Folder for tokenised text, which later runs reuse; auto means coca-attention in the user's
    cache (XDG_CACHE_HOME, or ~/.cache), null keeps the tokens in memory."""

    @property
    def task_shares(self) -> dict[str, float]:
        """Shares of the blocks by task, passkeys included."""
        return ({PASSKEY: self.passkey_share} if self.passkey_share else {}) | self.tasks

    @property
    def sources(self) -> "Mapping[str, DataRecipe | WeightedSource]":
        """The sources by name: those of the mixture, or the only one."""
        return self.mixture or {TEXT: self}

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        check_positive_counts(self, "block_length", "max_tokens")
        if self.tokenizer is None:
            check_vocab_size(self.vocab_size)
        for name in ("held_out", "passkey_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise UserError(f"tasks has {', '.join(unknown)}; known: {', '.join(TASKS)}")
        shares = self.task_shares
        if not all(0 < share < 1 for share in shares.values()) or not sum(shares.values()) < 1:
            raise UserError(
                f"the shares of tasks and passkey_share must lie between 0 and 1, and so must "
                f"their sum; got {shares}"
            )
        if not self.mixture:
            return
        default = DataRecipe()
        for name in ("source", "text_field", "bad_lines", "max_tokens"):
            if getattr(self, name) != getattr(default, name):
                raise UserError(
                    f"{name} cannot be combined with data.mixture: leave it out, or set it for "
                    "each source of the mixture"
                )
        for name, source in self.mixture.items():
            with error_prefix(f"mixture.{name}."):
                source.check()
        weights = [source.weight for source in self.mixture.values()]
        if abs(sum(weights) - 1) > 1e-6:
            terms = " + ".join(f"{weight:g}" for weight in weights)
            raise UserError(f"mixture needs weights that sum to 1, got {terms} = {sum(weights):g}")
        if taken := sorted(shares.keys() & self.mixture.keys()):
            raise UserError(
                f"mixture.{taken[0]} has the name of a task whose texts are mixed in: rename the "
                "source"
            )


@dataclass
class ValidationRecipe:
    """Perplexity on text that is not trained on, passkeys and needles, measured during training."""

    every: int | None = None
    """Optimizer steps between measurements, which also take place before the first step and after
    the last; by default nothing is measured."""
    source: str | None = None
    """Text to measure on, with the same values as data.source; data.text_field and data.bad_lines
    also apply. By default the documents of data.held_out are used."""
    batches: int = 4
    """Global batches to measure on, made of blocks spread evenly over the text; each takes about a
    third of the time of an optimizer step."""
    passkeys: int = 0
    """Passkeys to ask for at every measurement and length, as coca eval passkey does."""
    needles: int = 0
    """Prompts with one fact, and as many with four of which one is asked for, at every measurement
    and length, as coca eval needles does."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of the prompts with passkeys and needles; by default data.block_length."""

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        check_positive_counts(self, "every", "batches")
        for name in ("passkeys", "needles"):
            value = getattr(self, name)
            if value:
                check_positive_counts(self, name)
            if value and self.every is None:
                raise UserError(f"{name} are asked for in validation: set validation.every")
        for length in self.lengths:
            if not 1 <= length <= LARGEST:
                raise UserError(f"lengths must be between 1 and {LARGEST}, got {length}")
        if self.lengths and not (self.passkeys or self.needles):
            raise UserError("lengths are those of prompts: set validation.passkeys or needles")


@dataclass
class TrainingRecipe:
    """The optimisation."""

    steps: int = 10000
    """Optimizer steps; with stages, the steps of every stage that sets none itself."""
    global_batch_size: int = 256
    """Blocks per optimizer step over all processes."""
    micro_batch_size: int = 16
    """Blocks per process and forward pass; gradients accumulate up to the global batch."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    warmup_share: float = 0.01
    """Share of the steps over which the learning rate rises linearly."""
    initial_learning_rate: float = 1e-7
    """Learning rate at the start of the warm-up."""
    final_share: float = 0.1
    """Learning rate at the end of the linear decay, as a share of the peak."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    weight_decay: float = 0.1
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Maximum norm of the gradients; larger gradients are scaled down."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Autocast dtype of the forward and backward pass; weights stay in float32."""
    context_parallel: int = 1
    """Number of processes that share each sequence; their memory for it falls accordingly. Set
    gradient_checkpointing, too."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    loss_chunk: int | None = None
    """Compute the next-token loss from the logits of this many tokens at a time, which saves memory
    with a large vocabulary; by default from those of a micro-batch."""
    compile: bool = False
    """Compile the model with torch.compile; the first step then takes half a minute or more. Not
    with FSDP."""
    seed: int = 0
    """Seed of the initial weights and of the order of the blocks."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep; older ones are deleted."""
    log_every: int = 10
    """Steps between entries of the training curve."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Loggers that also receive the curves, by their names in Transformers, such as tensorboard or
    wandb."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further fields of Transformers' TrainingArguments, for example fsdp or deepspeed."""

    def check(self) -> None:
        """Raise UserError if a setting is out of range."""
        check_positive_counts(self, "steps", "global_batch_size", "micro_batch_size")
        check_positive_counts(self, "save_every", "keep_checkpoints", "log_every", "loss_chunk")
        check_positive_counts(self, "context_parallel")
        check_positive(self, "learning_rate")
        for name in ("warmup_share", "final_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("initial_learning_rate", "weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 or above, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be between 0 and {2**32 - 1}, got {self.seed}")


@dataclass
class StageRecipe:
    """One of several stages of a run; what it leaves out is taken from the section training."""

    name: str
    """Name of the stage and of its folder."""
    train: Trained = "all"
    """Parameters to train: t (the T projections), qt (also the query projections), qtv (also the
    value projections), all, or lora (adapters on every linear layer, merged into the weights at the
    end of the stage)."""
    objective: Objective = "next_token"
    """Loss to minimise: next_token; attention, the distance of every attention layer's output from
    the teacher's, given the teacher's input; logits, the KL divergence from the teacher's
    prediction; or hidden_states, logits plus the distance of every layer's output."""
    steps: int | None = None
    """Optimizer steps."""
    learning_rate: float | None = None
    """Peak learning rate."""
    warmup_share: float | None = None
    """Share of the stage's steps over which the learning rate rises."""
    final_share: float | None = None
    """Learning rate at the end of the stage, as a share of the peak."""
    lora_rank: int = 16
    """Rank of the adapters of lora; they are scaled by 2."""

    def settings(self, training: TrainingRecipe) -> TrainingRecipe:
        """The section training with this stage's own values."""
        own = {name: getattr(self, name) for name in SCHEDULE}
        return replace(training, **{n: value for n, value in own.items() if value is not None})

    def check(self, training: TrainingRecipe) -> None:
        """Raise UserError if a setting is out of range or needs a package that is missing.

        Args:
            training: The recipe's section training.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", self.name):
            raise UserError("name is also a folder's name: use letters, digits, . _ and -")
        self.settings(training).check()
        check_positive_counts(self, "lora_rank")
        if self.train == "lora" and find_spec("peft") is None:
            raise UserError(f"lora needs peft: {install('lora')}")
        if self.objective == "attention" and self.train in ("all", "lora"):
            raise UserError(
                f"objective attention trains attention layers only: set train to t, qt or qtv, got "
                f"{self.train}"
            )
