"""Sizes, models and settings of a reproduction; nothing here needs torch."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coca_attention.errors import UserError, did_you_mean
from coca_lab.studies.quickstart import MODELS as QUICKSTART_MODELS

MODELS: dict[str, dict[str, Any]] = {
    **{name: QUICKSTART_MODELS[name] for name in ("RoFormer", "CoCA-Slack", "CoCA-Strict")},
    "Roles": {"attention": "rope", "layers": "llg"},
    "ALiBi": QUICKSTART_MODELS["ALiBi"],
}
"""Fields of the model's recipe, in the order of training."""


@dataclass(frozen=True)
class Size:
    """Shape of the models and of the evaluation: the paper's, scaled down."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 32768
    block_length: int = 512
    longest: int = 64
    documents: int = 100
    samples: int = 100


SIZES = {
    "toy": Size(32, 3, 2, vocab_size=512, block_length=256, longest=4, documents=2, samples=2),
    "50m": Size(512, 12, 8),
    "125m": Size(768, 12, 12),
    "350m": Size(1024, 24, 16),
}

# What may change from one command to the next; of the text, runs check that it is the same.
CHANGES = (
    "output", "models", "minutes", "hours", "prepare",
    "longest", "documents", "samples", "factors",
    "text", "text_field", "test_text", "max_tokens", "tokenised", "tokenizer",
)  # fmt: skip


@dataclass
class ReproduceSettings:
    """What to train and evaluate, and how much of it now."""

    size: Literal["toy", "50m", "125m", "350m"] = "50m"
    """Parameters of the models; toy is for a try on a CPU."""
    output: str = ""
    """Folder of everything; by default runs/reproduce-SIZE."""
    text: str = ""
    """Text to tokenise, as data.source of a recipe; not needed once there is tokenised text."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    test_text: str = ""
    """Text to evaluate on, as text; by default a twentieth of its documents, held out."""
    max_tokens: int | None = None
    """Tokens of the text to keep at most; by default all."""
    tokenised: str = ""
    """Folder of tokenised text; by default OUTPUT/text."""
    tokenizer: str | None = None
    """Folder or name of a Transformers tokenizer; by default a byte-level BPE is trained."""
    models: list[str] = field(default_factory=lambda: list(MODELS))
    """Which models: RoFormer, CoCA-Slack, CoCA-Strict, Roles (two local layers and a global one,
    repeated) and ALiBi."""
    tokens: int | None = None
    """Training tokens of every model; by default tokens_per_parameter."""
    tokens_per_parameter: float = 20.0
    """Training tokens for each parameter of RoFormer."""
    passkey_share: float = 0.0
    """Share of the blocks that are passkey texts; the paper trains on text alone, and small models
    then find no passkeys."""
    factors: list[float] = field(default_factory=lambda: [2.0, 4.0, 8.0])
    """NTK factors that rotary models without roles are evaluated with, besides none."""
    longest: int | None = None
    """Longest window and prompt as a multiple of the training length; by default 64."""
    documents: int | None = None
    """Documents to evaluate on; by default 100."""
    samples: int | None = None
    """Passkey prompts of each length; by default 100."""
    learning_rate: float | None = None
    """Peak learning rate of all models; by default 3e-3 x 128 / the width of the model."""
    precision: Literal["float32", "bfloat16"] | None = None
    """By default bfloat16 on a GPU and float32 on a CPU."""
    compile: bool = False
    """Train with torch.compile."""
    seed: int = 0
    """Seed of the weights, the order of the text and the prompts."""
    minutes: float | None = None
    """Stop after this time, with a checkpoint; the same command goes on. By default nothing stops
    it."""
    hours: float | None = None
    """The same in hours."""
    prepare: bool = False
    """Only tokenise the text."""

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output or f"runs/reproduce-{self.size}")

    @property
    def text_folder(self) -> Path:
        """The folder of tokenised text."""
        return Path(self.tokenised) if self.tokenised else self.folder / "text"

    @property
    def shape(self) -> Size:
        """The size, with what is set in its place."""
        names = ("longest", "documents", "samples")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(SIZES[self.size], **given)

    @property
    def lengths(self) -> list[int]:
        """Windows and prompts to evaluate at: the training length times 1, 2, 4 … longest."""
        shape = self.shape
        return [shape.block_length * 2**power for power in range(shape.longest.bit_length())]

    @property
    def kept(self) -> dict[str, Any]:
        """The settings that no later command may change."""
        return {name: value for name, value in asdict(self).items() if name not in CHANGES}

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        for name in self.models:
            if name not in MODELS:
                raise UserError(
                    f"models are of {', '.join(MODELS)}; got {name!r}{did_you_mean(name, MODELS)}"
                )
        if not self.models:
            raise UserError(f"models: name at least one of {', '.join(MODELS)}")
        names = (
            "max_tokens", "tokens", "tokens_per_parameter", "longest", "documents", "samples",
            "learning_rate", "minutes", "hours",
        )  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} must be above 0, got {value}")
        if self.minutes is not None and self.hours is not None:
            raise UserError("minutes and hours say the same: set one of them")
