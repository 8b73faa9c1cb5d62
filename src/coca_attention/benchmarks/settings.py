"""Settings of ``coca bench``."""

from dataclasses import dataclass, field
from typing import Literal


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
