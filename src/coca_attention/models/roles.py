"""Roles for layers: what reads far beyond the training length (docs/long-context.md)."""

from dataclasses import dataclass
from typing import Any

from coca_attention.errors import UserError
from coca_attention.models.fields import GLOBAL, LOCAL
from coca_attention.ops.positions import check_real, check_whole

LETTERS = {"l": LOCAL, "g": GLOBAL}


@dataclass(frozen=True)
class Roles:
    """Local layers, which see a window, and global ones, which see the whole text.

    Without the decay this is HWFA (Su, 2023, kexue.fm/archives/9603) or RNoPE-SWA (arXiv
    2501.18795) with queries times log n; the decay is KERPLE's (arXiv 2205.09921). A query at
    distance d from a key in a global layer scores
    ``q · k * ln(n + 1) / ln(L + 1) / sqrt(D) - decay * ln(1 + d / decay_length)``, where it sees n
    keys and L is the training length. The defaults are what this project recommends.

    Raises:
        UserError: If a letter is unknown or a value out of range.
    """

    layers: str = "llg"
    """A letter per layer, l (local) or g (global), repeated over all layers."""
    window: int | None = None
    """Tokens that a local layer sees, the query's own included; by default an eighth of L."""
    turning_pairs: int | None = 0
    """Rotary pairs that turn in global layers; None for all."""
    temperature: bool = True
    """Whether queries of global layers grow with the logarithm of n."""
    decay: float = 1.0
    """Exponent of the power law by which attention of global layers decays; 0 is none."""
    decay_length: float | None = None
    """Distance in tokens at which it begins; by default an eighth of L."""
    max_distance: int | None = None
    """W: in global layers, keys farther back than W tokens are scored as if W back, the decay
    begins there, and no query becomes smaller. By default no limit."""

    def __post_init__(self) -> None:
        if not self.layers or set(self.layers) - set("lg"):
            raise UserError(f"layers must consist of the letters l and g, got {self.layers!r}")
        for name, smallest in (("window", 1), ("turning_pairs", 0), ("max_distance", 1)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, smallest, error=UserError)
        check_real("decay", self.decay, error=UserError)
        if self.decay_length is not None:
            check_real("decay_length", self.decay_length, above=True, error=UserError)

    def fields(
        self,
        form: str,
        *,
        num_layers: int,
        head_width: int,
        length: int,
        rope_parameters: dict[str, Any],
    ) -> dict[str, Any]:
        """The fields of a CoCA configuration that give a model these roles.

        Args:
            form: Score form of the local layers, or ``rope`` for rotary attention.
            num_layers: Number of layers.
            head_width: D.
            length: L, the training length in tokens.
            rope_parameters: Those of the model, one set for all layers.

        Raises:
            UserError: If the model has fewer layers than the pattern.
        """
        if num_layers < len(self.layers):
            raise UserError(
                f"layers {self.layers} needs a model of at least {len(self.layers)} layers, got "
                f"{num_layers}: use a shorter pattern"
            )
        pairs, rotary = head_width // 2, form == "rope"
        return {
            # The form of a model whose pairs are all free does not matter.
            "coca_form": "strict" if rotary else form,
            "coca_free_pairs": {LOCAL: pairs if rotary else 0, GLOBAL: pairs},
            "layer_types": [LETTERS[x] for x in (self.layers * num_layers)[:num_layers]],
            # Some families apply a window in all layers if there is one.
            "sliding_window": (self.window or max(1, length // 8)) if "l" in self.layers else None,
            "rope_parameters": rope_parameters
            | rotation_fields(
                length,
                turning_pairs=self.turning_pairs,
                temperature=self.temperature,
                decay=self.decay,
                decay_length=self.decay_length,
                max_distance=self.max_distance,
            ),
        }


def rotation_fields(
    length: int,
    *,
    turning_pairs: int | None = None,
    temperature: bool | None = None,
    decay: float | None = None,
    decay_length: float | None = None,
    max_distance: int | None = None,
) -> dict[str, Any]:
    """Additions to the rotary parameters, as for `Roles`, for a training length in tokens."""
    given: dict[str, Any] = {"turning_pairs": turning_pairs, "max_distance": max_distance}
    if temperature:
        given["temperature"] = length
    if decay:
        given |= {"decay": decay, "decay_length": decay_length or length / 8}
    return {name: value for name, value in given.items() if value is not None}
