"""Settings of ``coca bench``."""

from dataclasses import dataclass, field
from typing import Literal

from coca_attention.errors import UserError, did_you_mean

TITLES = {
    "decode": "One token decoded, by the length of the cache",
    "decode-compiled": "One token decoded with torch.compile, static caches",
    "memory": "Memory of the operator, forward",
    "operator": "Operator, forward",
    "operator-decode": "One query over a cache, attention alone",
    "operator-training": "Operator, forward and backward",
    "prefill": "Prefill of a model",
    "training": "Training step of a model",
}
"""Titles of all cases by name, for the command line; the cases themselves import torch."""
CHECKED_QUERIES = 4
"""Number of queries compared with the oracle: the last ones, which see the whole text."""


@dataclass
class BenchSettings:
    """What is measured, and how."""

    cases: list[str] = field(default_factory=lambda: ["operator", "operator-training"])
    """Names of the cases, which are listed below."""
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    """Tokens in the text or, for decoding, in the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device."""
    batch: int = 1
    """Batch size."""
    heads: int = 16
    """Query heads of the operator."""
    kv_heads: int | None = None
    """Key/value heads; by default as many as query heads."""
    head_width: int = 64
    """Width of a head."""
    hidden_size: int = 512
    """Hidden size of the models; 12 layers of 512 have 50 million parameters."""
    layers: int = 12
    """Layers of the models."""
    roles: str | None = None
    """Roles of the layers in training and prefill, as model.layers in a recipe (llg: two local
    layers and a global one, repeated); by default, CoCA in every layer."""
    window: int | None = None
    """Tokens that a local layer sees; required with roles."""
    longest_contraction: int = 4096
    """Longest text for the paper's contraction, whose memory is quadratic in the length."""
    rounds: int = 15
    """Maximum number of rounds; each round times every variant once."""
    seconds: float = 60.0
    """Time limit for each case and length; at least three rounds always run."""
    threads: int | None = None
    """CPU threads; by default PyTorch decides."""


def check_settings(settings: BenchSettings) -> None:
    """Raise UserError unless all cases are known and all numbers in range."""
    unknown = [name for name in settings.cases if name not in TITLES]
    if unknown or not settings.cases:
        hint = f"; choose from {', '.join(TITLES)}"
        raise UserError(f"unknown cases {unknown}{did_you_mean((*unknown, '')[0], TITLES, hint)}")
    if not settings.lengths or min(settings.lengths) < CHECKED_QUERIES:
        raise UserError(f"lengths must be at least {CHECKED_QUERIES}, got {settings.lengths}")
    for name in ("batch", "heads", "head_width", "hidden_size", "layers", "rounds"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if settings.threads is not None and settings.threads < 1:
        raise UserError(f"threads must be at least 1, got {settings.threads}")
    if settings.head_width % 2 or settings.hidden_size % settings.head_width:
        raise UserError(
            f"head_width must be even and divide hidden_size, got {settings.head_width} and "
            f"{settings.hidden_size}"
        )
    if set(settings.roles or "l") - {"l", "g"} or (settings.window or 0) < bool(settings.roles):
        raise UserError(
            "roles must consist of the letters l and g, and requires a window of at least 1; got "
            f"roles {settings.roles!r} and window {settings.window}"
        )
    if settings.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("there is no CUDA device here; use --device cpu")
