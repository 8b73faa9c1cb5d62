"""The sections of a recipe, with the paper's settings (§3.3) as defaults.

Types say which values a field can have; `Recipe.check` refuses settings that contradict each other.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coca_attention.method_names import MethodName
from coca_attention.roles import Roles
from coca_lab.settings.sources import (
    LARGEST_VOCABULARY,
    SMALLEST_VOCABULARY,
    Dtype,
    PathText,
    SourceSettings,
)

PASSKEY, VALIDATION = "passkey", "validation"
"""Names of the blocks of `passkey_share`, and of the text that validation reads."""
OWN = "own"
BASELINES = ("rope", "alibi", OWN)
# Where rotary attention differs from that of the body.
POSITIONS = "layers", "turning_pairs", "temperature", "decay", "near", "interpolation"
# What a stage may set of the section training.
SCHEDULE = ("steps", "learning_rate", "warmup_share", "final_share")

Count = Annotated[int, Field(ge=1, le=2**40)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PartialShare = Annotated[float, Field(ge=0, lt=1)]
TaskShare = Annotated[float, Field(gt=0, lt=1)]
Objective = Literal["next_token", "attention", "logits", "hidden_states"]
Trained = Literal["t", "qt", "qtv", "all", "lora"]


@dataclass
class Architecture:
    """A new model's attention, body and sizes."""

    attention: str = "slack"
    """slack, strict or magnitude (CoCA), rope (RoFormer) or alibi. Also a form that your code
    registers; own is the body's own attention."""
    body: str = "gpt_neox"
    """Architecture around the attention: the model_type of a family, such as gpt_neox, llama or
    qwen3; with attention own any that Transformers knows. alibi requires gpt_neox."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body's configuration."""
    hidden_size: Count = 1024
    """Width of the residual stream."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 24
    """Number of decoder layers."""
    num_heads: Count = 16
    """Number of query heads."""
    num_key_value_heads: Count | None = None
    """Number of key/value heads, not with gpt_neox; by default as many as query heads."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layers; by default 4 x hidden_size."""
    rope_base: Positive = 10000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = True
    """Whether the input and output embeddings share one matrix."""


@dataclass
class ModelRecipe(Roles, Architecture):
    """The model."""

    layers: str = ""
    """Roles of the layers, such as llg, repeated over all layers. l is local: attention over the
    last window tokens; g is global: dot products without positions over the whole text, with a
    temperature. By default all layers apply attention to the whole text."""
    near: Count | None = None
    """Keys farther back than this many tokens are scored as if this far back, and a temperature
    makes no query smaller: what a rotary start says of texts up to this long does not change. Less
    than its training length may lose passkeys within it, which coca extend --check measures. Not
    with layers or a decay. By default no limit."""
    linear: bool = False
    """Whether attention is linear: a state in place of a cache, for strict and magnitude."""
    start: PathText | None = None
    """Folder of a trained model to start from, or its NAME or NAME@REVISION on the Hub, instead of
    random weights. Its sizes and its tokenizer are used. A rotary model is converted if attention
    names a CoCA form (T projections begin as the pair means of its key projections); a model that
    already has the attention is trained further."""
    teacher: PathText | None = None
    """Model that objectives other than next_token learn from; by default start."""
    interpolation: Annotated[float, Field(ge=1)] | None = None
    """Factor of position interpolation; the model is trained with it and saved with it."""
    scaling: MethodName = "linear"
    """Method that changes frequencies by the factor interpolation: linear is PI."""
    dtype: Dtype = "auto"
    """Precision in which the trained model is saved; auto is that of start, or float32 without one.
    Training itself keeps weights in float32."""


# What the files of a start say.
SIZES = [
    item.name
    for item in (*fields(Architecture), *fields(Roles))
    if item.name not in ("attention", "options")
]


@dataclass
class WeightedSource(SourceSettings):
    """A source of a mixture."""

    source: PathText = ""
    """Same values as data.source."""
    weight: Positive = 0.0
    """Share of the training tokens; the weights of a mixture sum to 1."""
    max_tokens: Count | None = None
    """Maximum number of training tokens to read; by default a stream is read as far as needed."""


@dataclass
class DataRecipe(SourceSettings):
    """The text."""

    mixture: dict[str, WeightedSource] = field(default_factory=dict)
    """Several sources by name in place of source, such as {text: {source: BOOKS, weight: 0.75},
    code: {source: CODE, weight: 0.25}}. A source that is too short for its share is repeated."""
    held_out: PartialShare = 0.05
    """Share of documents excluded from training. A hash of their text chooses them."""
    max_tokens: Count | None = None
    """Maximum number of training tokens to read. Required for endless streams."""
    tokenizer: PathText | None = None
    """Folder or name of a Transformers tokenizer. By default the tokenizer of model.start is used;
    without a start, a byte-level BPE is trained."""
    vocab_size: Annotated[int, Field(ge=SMALLEST_VOCABULARY, le=LARGEST_VOCABULARY)] = 32768
    """Vocabulary size of a newly trained tokenizer."""
    split_digits: bool = False
    """Whether a newly trained tokenizer encodes every digit as a token of its own."""
    block_length: Count = 512
    """Training length in tokens."""
    passkey_share: PartialShare = 0.0
    """Share of the blocks that are passkey texts with answers. Each has a different key."""
    tasks: Annotated[dict[str, TaskShare], Field()] = field(default_factory=dict)
    """Shares of the blocks with texts of further tasks, such as {recall: 0.3}, by the names that
    modules in COCA_IMPORT register."""
    separate_documents: bool = False
    """Whether documents in the same block are separated: attention does not cross document
    boundaries, and positions restart in each document."""
    cache: PathText | None = "auto"
    """Folder for tokenised text, which later runs reuse; auto means coca-attention in the user's
    cache (XDG_CACHE_HOME, or ~/.cache), null keeps the tokens in memory."""

    @property
    def token_folder(self) -> Path | None:
        """The folder of tokenised text; None for memory."""
        if self.cache == "auto":
            from coca_lab.files import cache_folder  # imports the Hub's client

            return cache_folder()
        return None if self.cache is None else Path(self.cache).expanduser()

    @property
    def task_shares(self) -> dict[str, float]:
        """Shares of the blocks by task, passkeys included."""
        return ({PASSKEY: self.passkey_share} if self.passkey_share else {}) | self.tasks


@dataclass
class ValidationRecipe:
    """What is measured during training, on text that is not trained on."""

    every: Count | None = None
    """Optimizer steps between measurements; by default nothing is measured. They also take place
    before the first step and after the last."""
    source: PathText | None = None
    """Text to measure on, with the same values as data.source; data.text_field and data.bad_lines
    also apply. By default the documents of data.held_out are used."""
    batches: Count = 4
    """Global batches to measure on, made of blocks spread evenly over the text; each takes about a
    third of the time of an optimizer step."""
    passkeys: NonNegativeInt = 0
    """Passkeys to ask for at every measurement and length. It is done as by coca eval passkey."""
    needles: NonNegativeInt = 0
    """Prompts of RULER's niah_single_1, and as many of niah_multikey_2, at every measurement and
    length. It is done as by coca eval ruler."""
    lengths: list[Count] = field(default_factory=list)
    """Tokens of the prompts with passkeys and needles, needles with the answer; by default
    data.block_length."""


@dataclass
class TrainingRecipe:
    """The optimisation."""

    steps: Count = 10000
    """Optimizer steps. With stages, those of every stage that sets none itself."""
    global_batch_size: Count = 256
    """Blocks per optimizer step over all processes."""
    micro_batch_size: Count = 16
    """Blocks per process and forward pass. Gradients accumulate up to the global batch."""
    learning_rate: Positive = 1e-4
    """Peak learning rate."""
    warmup_share: Share = 0.01
    """Share of the steps over which the learning rate rises linearly."""
    initial_learning_rate: NonNegative = 1e-7
    """Learning rate at the start of the warm-up."""
    final_share: Share = 0.1
    """Learning rate at the end of the linear decay, as a share of the peak."""
    beta1: PartialShare = 0.9
    """AdamW's first moment decay."""
    beta2: PartialShare = 0.95
    """AdamW's second moment decay."""
    weight_decay: NonNegative = 0.1
    """AdamW's weight decay."""
    max_grad_norm: NonNegative = 1.0
    """Maximum norm of the gradients; larger gradients are scaled down."""
    precision: Dtype = "auto"
    """Autocast dtype of forward and backward pass. Weights stay in float32. auto is bfloat16 where
    the device computes in it natively, else float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """Compile the model with torch.compile; the first step then takes half a minute or more. Not
    with FSDP."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and of the order of the blocks."""
    save_every: Count = 500
    """Steps between checkpoints."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    log_every: Count = 10
    """Steps between entries of the training curve."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Loggers that also receive the curves, by their names in Transformers, such as tensorboard or
    wandb."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further fields of Transformers' TrainingArguments, for example {optim: sgd}: those that the
    recipe does not set itself and that take effect, which an error lists."""


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
    steps: Count | None = None
    """Optimizer steps."""
    learning_rate: Positive | None = None
    """Peak learning rate."""
    warmup_share: Share | None = None
    """Share of the stage's steps over which the learning rate rises."""
    final_share: Share | None = None
    """Learning rate at the end of the stage, as a share of the peak."""
    lora_rank: Count = 16
    """Rank of the adapters of lora; they are scaled by 2."""
