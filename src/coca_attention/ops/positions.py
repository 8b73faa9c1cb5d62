"""How positions act on scores: rotary pairs and their angles, a factor on queries, a bias.

Legend: B batch, H heads, T positions, D head width, P = D/2 rotary pairs, R rotary width,
m a query's position, n a key's.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from coca_attention.ops.checks import check_real, check_whole, check_width
from coca_attention.ops.rules import UNSCALED, Rule

NO_FLOAT64 = ("mps",)


def split_pairs(
    x: Tensor, interleaved: bool = False, rotary_width: int | None = None
) -> tuple[Tensor, Tensor]:
    """First and second members of every rotary pair: (..., D) to two tensors (..., P).

    Pair j is (j, j + D/2) as in Llama and GPT-NeoX, or interleaved, (2j, 2j + 1), as in GPT-J,
    Cohere and the paper's formulas. If only the first R elements of a head are rotated (partial
    rotary), pairs are formed within them; the others form half-split pairs of their own.
    """
    check_width(x.shape[-1])
    if rotary_width is not None and rotary_width != x.shape[-1]:
        check_width(rotary_width, "rotary width")
        if rotary_width > x.shape[-1]:
            raise ValueError(
                f"the rotary width must be at most the head width {x.shape[-1]}; got {rotary_width}"
            )
        rotated = split_pairs(x[..., :rotary_width], interleaved)
        unrotated = split_pairs(x[..., rotary_width:])
        first, second = (torch.cat(both, dim=-1) for both in zip(rotated, unrotated, strict=True))
        return first, second
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def join_pairs(
    first: Tensor, second: Tensor, interleaved: bool = False, rotary_width: int | None = None
) -> Tensor:
    """Inverse of `split_pairs`: (..., P) and (..., P) to (..., D)."""
    if rotary_width is not None and rotary_width != 2 * first.shape[-1]:
        pairs = rotary_width // 2
        rotated = join_pairs(first[..., :pairs], second[..., :pairs], interleaved)
        return torch.cat((rotated, first[..., pairs:], second[..., pairs:]), dim=-1)
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every pair of x by its angle: R_n x (CoCA paper, Eq. 1).

    Args:
        x: (B, H, T, D).
        cos: (T, R/2) or (B, T, R/2), see `Rotation.tables`. Pairs beyond R/2 are unchanged.
        sin: Like cos.
        interleaved: Pair layout, see `split_pairs`.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    span = 2 * cos.shape[-1]
    if span < x.shape[-1]:
        rotated = apply_rotary(x[..., :span], cos, sin, interleaved)
        return torch.cat((rotated, x[..., span:]), dim=-1)
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    first, second = split_pairs(x, interleaved)
    rotated = join_pairs(first * cos - second * sin, first * sin + second * cos, interleaved)
    return rotated.to(x.dtype)


class Decay(NamedTuple):
    """The decay of a `Rotation` as an addend of scaled scores: -c ln(1 + (m - n) / length)."""

    exponent: float  # c
    length: float  # distance in tokens at which the decay begins

    def __call__(
        self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The addends (..., T, S) for m (..., T) and n (..., S); 0 for keys after the query."""
        return self.of(query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2), dtype)

    def of(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The addends for distances m - n."""
        return -self.exponent * (distance.clamp(min=0).to(dtype) / self.length).log1p()


@dataclass(frozen=True)
class Rotation:
    """How positions act on scores.

    Pair j rotates by the angle ``n theta_j`` at position n. What else a position does is a factor
    on the query or a bias on the score: cached keys depend on neither.

    Attributes:
        width: Rotary width R, the number of elements of a head that are rotated; even.
        base: Base of the geometric series of frequencies.
        rule: Scaling rule for texts longer than the training length.
        turning: Number of pairs that rotate; the slower ones after them have angle 0 (p-RoPE,
            arXiv 2410.06205). Default: all.
        temperature: Length in tokens at which queries keep their size: a query that sees n keys is
            multiplied by ln(n + 1) / ln(temperature + 1), so that attention does not spread out as
            texts grow (Su, kexue.fm/archives/8823; arXiv 2202.12172). Default: no such factor. With
            `max_distance` no query becomes smaller.
        decay: Exponent c of a power law. The weight of a key n tokens back is multiplied by
            (1 + n / decay_length)^-c, so that every doubling of the distance costs the same:
            ``bias`` (KERPLE's logarithmic kernel, arXiv 2205.09921). 0 and the default: no decay.
        decay_length: Distance in tokens at which the decay begins.
        max_distance: W; keys farther back than W tokens are scored as if W back (ReRoPE, Su,
            kexue.fm/archives/9708), so that no angle is larger than W theta_j: up to a distance of
            W nothing changes, in texts of up to ``temperature`` tokens. Scores must depend
            only on distances, and there is no decay. Default: no limit.
        leak: By how much a distance grows with every token beyond W, from 0 to 1: a key n > W
            tokens back is scored as if W + leak (n - W) back (Leaky ReRoPE, Su, ibid.). Default: 0.
    """

    width: int
    base: float = 10000.0
    rule: Rule = UNSCALED
    turning: int | None = None
    temperature: int | None = None
    decay: float | None = None
    decay_length: float = 64.0
    max_distance: int | None = None
    leak: float | None = None

    def __post_init__(self) -> None:
        check_width(self.width, "rotary width")
        check_real("rotary base", self.base, above=True)
        if not isinstance(self.rule, Rule):
            raise ValueError(f"rule must be a Rule, such as NTK(factor=2.0), got {self.rule!r}")
        check_real("decay_length", self.decay_length, above=True)
        if self.turning is not None:
            check_whole("turning", self.turning, 0, self.width // 2)
        if self.temperature is not None:
            check_whole("temperature, a number of tokens,", self.temperature)
        if self.max_distance is not None:
            check_whole("max_distance, a number of tokens,", self.max_distance)
        if self.leak is not None:
            check_real("leak", self.leak, highest=1)
            object.__setattr__(self, "leak", self.leak or None)
        if self.decay is not None:
            check_real("decay", self.decay)
            object.__setattr__(self, "decay", self.decay or None)
        if self.decay is not None and self.max_distance is not None:
            raise ValueError(
                "max_distance has no decay beyond it: leave out decay. Of a model that was saved "
                "with both, remove decay from rope_parameters in its config.json"
            )
        if (self.max_distance or math.inf) <= (getattr(self.rule, "training_length", None) or 0):
            # No distance is longer than in training, however long the text.
            object.__setattr__(self, "rule", self.rule.for_length(1))
        if self.leak and (self.max_distance is None or self.follows_length):
            raise ValueError(
                "leak needs a max_distance, beyond which distances grow by it, and frequencies of "
                f"one length; got {self.max_distance} and {self.rule.kind} scaling"
            )

    def frequencies(self) -> Tensor:
        """theta of shape (R/2,), float64, in radians per token."""
        theta = self.rule.frequencies(self.width, self.base)
        if self.turning is not None:
            theta = torch.cat((theta[: self.turning], torch.zeros_like(theta[self.turning :])))
        return theta

    def for_length(self, length: int) -> "Rotation":
        """The rotation for a text of ``length`` tokens, of which `max_distance` count at most."""
        return replace(self, rule=self.rule.for_length(min(length, self.max_distance or length)))

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the current text.

        Limited distances are to change nothing up to ``max_distance``, so that longrope then
        selects its factors by the text, as Transformers does.
        """
        limited = self.max_distance is not None
        return self.rule.follows_length or (limited and self.rule != self.rule.for_length(1))

    def angles(self, positions: Tensor) -> Tensor:
        """Angle of every rotated pair at positions (..., T): (..., T, R/2), in radians.

        In float64, or in float32 on devices without it: at position 100,000 the error of a float32
        angle is already 0.004 radians.
        """
        dtype = _wide(positions.device)
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if tracing or type(positions) is not Tensor:
            theta = self.frequencies().to(positions.device, dtype)
        else:
            theta = _frequencies(self, positions.device, dtype)
        return positions.to(dtype).unsqueeze(-1) * theta

    def tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angle of every rotated pair at positions (..., T): (..., T, R/2)."""
        if self.follows_length:
            return self.for_length(int(positions.max().item()) + 1).tables(positions, dtype)
        angles, magnitude = self.angles(positions), self.rule.magnitude
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)

    def far_tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of queries (..., T) for keys farther back than max_distance: (..., T, R/2).

        Those keys have `leaking_tables`. Without a leak they are at position 0, and tables of one
        query (1, R/2) are for all, times the rule's magnitude, which those keys lack.
        """
        assert self.max_distance is not None
        if self.leak:
            near = (1 - self.leak) * self.max_distance
            return self.tables(self.leak * positions.to(_wide(positions.device)) + near, dtype)
        cos, sin = self.tables(torch.tensor([self.max_distance], device=positions.device), dtype)
        return cos * self.rule.magnitude, sin * self.rule.magnitude

    def leaking_tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of keys (..., S) for queries of `far_tables`, if there is a leak."""
        assert self.leak is not None
        return self.tables(self.leak * positions.to(_wide(positions.device)), dtype)

    def query_factor(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, window: int | None = None
    ) -> Tensor | None:
        """Factor on the query at every position (..., T), or None if there is no temperature.

        A window is the number of keys that a query sees at most, its own included.
        """
        if self.temperature is None:
            return None
        # The query at position m sees n = m + 1 keys, or as many as the window holds.
        seen = (positions.to(dtype) + 1).clamp(max=window or math.inf)
        factor = (seen + 1).log() / math.log(self.temperature + 1)
        return factor if self.max_distance is None else factor.clamp(min=1)

    @property
    def bias(self) -> Decay | None:
        """The decay; None if there is none."""
        return None if self.decay is None else Decay(self.decay, self.decay_length)


def rotation_of(given: Rotation | None, width: int) -> Rotation:
    """The rotation of heads, by default of their whole width; ValueError if it does not fit."""
    if given is None:
        return Rotation(width, rule=UNSCALED)  # torch.compile cannot make the default rule
    if not isinstance(given, Rotation):
        raise ValueError(f"rotation must be a Rotation, such as Rotation({width}), got {given!r}")
    if given.width > width:
        raise ValueError(
            f"the rotary width must be at most the head width {width}; got {given.width}"
        )
    return given


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


@lru_cache(maxsize=64)
def _frequencies(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> Tensor:
    """theta on a device. Kept, because every copy to a GPU makes the processor wait for it."""
    with torch.inference_mode(False):
        return rotation.frequencies().to(device, dtype)
