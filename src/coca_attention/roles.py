"""What a model is converted to: its score form, and the roles of its layers."""

from dataclasses import dataclass
from typing import Literal

from coca_attention.errors import UserError, check_real, check_whole, did_you_mean

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
            raise UserError(f"`layers` must consist of the letters l and g, got {self.layers!r}")
        for name, smallest in (("window", 2), ("turning_pairs", 0)):
            value = getattr(self, name)
            if value is not None:
                check_whole(f"`{name}`", value, smallest, LONGEST, error=UserError)
        check_real("`decay`", self.decay, error=UserError)
        if self.decay_length is not None:
            check_real("`decay_length`", self.decay_length, above=True, error=UserError)

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


@dataclass(frozen=True)
class Conversion:
    """What a vanilla model is converted to.

    Raises:
        UserError: If a name is unknown, or two settings contradict each other.
    """

    form: str = "slack"
    """Score form: slack (the paper's Eq. 10), strict (Eq. 9) or magnitude (cf. PoPE); with roles,
    that of the local layers. rope keeps rotary attention; without roles it limits distances
    (ReRoPE), which changes nothing in texts of up to near tokens."""
    free_pairs: int = 0
    """The last rotary pairs of every head, which keep their ordinary keys and scores. With all of
    them free the model computes what it did before."""
    roles: Roles | None = None
    """Which layers become local and which global; by default the family's own. Not for families
    with rotary parameters of their own per layer type."""
    near: int | None = None
    """W: in layers that see the whole text, keys farther back than W tokens are scored as if W
    back, and queries beyond the training length L grow with the logarithm of the tokens they see.
    By default L for rope without roles, and no limit for other forms. Less may find more in longer
    texts, and may lose what is found within L: coca extend --check measures it."""
    length: int | None = None
    """L, the training length in tokens, for roles and limits; by default what the model's
    configuration says (`made_for`)."""
    kv_cache: Literal["full", "half"] = "full"
    """What is kept of earlier tokens: whole keys, or coefficients of half their width."""

    def __post_init__(self) -> None:
        # It imports torch, for which the help of a command need not wait.
        from coca_attention.ops import FORMS

        forms = (*FORMS, "rope")
        if self.form not in forms:
            hint = did_you_mean(str(self.form), forms)
            raise UserError(f"`form` must be one of {', '.join(forms)}, got {self.form!r}{hint}")
        if self.roles is not None and not (isinstance(self.roles, Roles) and self.roles.layers):
            raise UserError(f'roles must be a Roles, such as Roles("llg"), got {self.roles!r}')
        if self.free_pairs and self.roles is not None:
            raise UserError("roles determine the free pairs: leave out `free_pairs`")
        if self.free_pairs and self.form == "rope":
            raise UserError("all pairs are free with form rope: leave out `free_pairs`")
        if self.near is not None and self.roles is not None:
            raise UserError("roles limit no distances: leave out `near`")
        for name in ("length", "near"):
            if getattr(self, name) is not None:
                check_whole(f"`{name}`", getattr(self, name), error=UserError)
        if self.length is not None and self.roles is None and not self.limits_distances:
            raise UserError(f"`length` is for roles and limits of distances, got {self.length}")

    @property
    def limits_distances(self) -> bool:
        """Whether distances are limited in layers that see the whole text."""
        return self.roles is None and (self.form == "rope" or self.near is not None)

    @property
    def changes_function(self) -> bool:
        """Whether the model computes something else at once, within the training length."""
        return self.form != "rope" or self.roles is not None
