"""Roles of layers: which see a window, and how those that see the whole text read it."""

from dataclasses import dataclass

from coca_attention.errors import UserError
from coca_attention.ops.checks import check_real, check_whole

LONGEST = 2**40
"""Tokens of any text; a length beyond it is a mistake, which PyTorch would not name."""


@dataclass
class Roles:
    """Local layers, which see a window, and global ones, which see the whole text.

    This is HWFA (Su, 2023, kexue.fm/archives/9603) or RNoPE-SWA (arXiv 2501.18795) with queries
    times log n; the decay, off by default, is KERPLE's (arXiv 2205.09921). A query at distance d
    from a key in a global layer scores
    ``q · k * ln(n + 1) / ln(L + 1) / sqrt(D) - decay * ln(1 + d / decay_length)``, where it sees n
    keys and L is the training length. The defaults are what this project recommends.

    Raises:
        UserError: If a letter is unknown or a value out of range.
    """

    layers: str = "llg"
    """Roles of the layers, such as llg, repeated over all layers. l is local: attention over the
    last window tokens; g is global: dot products without positions over the whole text, with a
    temperature."""
    window: int | None = None
    """Tokens that a local layer sees, the query's own included, at least 2; by default an eighth of
    the training length."""
    turning_pairs: int | None = None
    """Rotary pairs that turn in layers that see the whole text; by default 0 with layers, and all
    without."""
    temperature: bool | None = None
    """Whether queries grow with the logarithm of the tokens in sight in layers that see the whole
    text, beginning from the training length; by default true with layers, and false without."""
    decay: float = 0.0
    """Exponent of a power law by which attention decays with the distance in layers that see the
    whole text; 0 is none. 1 keeps perplexity flatter, and can cost retrieval."""
    decay_length: float | None = None
    """Distance in tokens at which it begins; by default an eighth of the training length."""

    def __post_init__(self) -> None:
        if set(self.layers) - set("lg"):
            raise UserError(f"layers must consist of the letters l and g, got {self.layers!r}")
        for name, smallest in (("window", 2), ("turning_pairs", 0)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, smallest, LONGEST, error=UserError)
        check_real("decay", self.decay, error=UserError)
        if self.decay_length is not None:
            check_real("decay_length", self.decay_length, above=True, error=UserError)

    def rotation_fields(self, length: int) -> dict[str, float]:
        """Rotary parameters of layers that see the whole text, for a training length in tokens."""
        with_roles = bool(self.layers)
        turning = 0 if self.turning_pairs is None and with_roles else self.turning_pairs
        fields: dict[str, float] = {} if turning is None else {"turning_pairs": turning}
        if with_roles if self.temperature is None else self.temperature:
            fields["temperature"] = length
        if self.decay:
            fields |= {"decay": self.decay, "decay_length": self.decay_length or length / 8}
        return fields
