"""How positions act on scores: rotary pairs and their angles, a factor on queries, a bias.

Legend: B batch, H heads, T positions, D head width, P = D/2 rotary pairs, R rotary width,
m a query's position, n a key's.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coca_attention.errors import check_real, check_whole
from coca_attention.ops.checks import check_width
from coca_attention.ops.rules import UNSCALED, Rule

NO_FLOAT64 = ("mps",)

KeyAngles = Literal["near", "far", "far to near"]
"""Angles that turn coefficients into near keys or far keys, or far keys into near ones."""


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
    cos = cos.unsqueeze(-3)
    sin = sin.unsqueeze(-3)
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
        distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        return -self.exponent * (distance.clamp(min=0).to(dtype) / self.length).log1p()


@dataclass(frozen=True)
class DistanceMap:
    """What a distance d = m - n between a query and a key counts as.

    f(d) = d for the near keys, d < ``near``, and slope * d + start for the far ones. Queries have a
    second position for far keys, slope * m + start, and far keys are at slope * n. Every map of a
    training-free method is of this form: `limited`, `leaky`, `shifted`, and `grouped`, where m and
    n are first divided by the size of a group, rounded down.

    Attributes:
        near: Distance in tokens from which on keys are far; the query's own key is at 0.
        slope: By how much f grows with every token beyond, from 0 to 1. With 1 far keys are at the
            same positions as near ones. A tuple has one for every rotary pair, R/2 (DPE,
            arXiv 2504.18857).
        start: f minus slope * d of far keys, in tokens; a tuple as for the slope.
        group: Tokens that have one far position: slope multiplies m // group and n // group. Scores
            of far keys then depend on both positions, by less than a group. Default: 1, each token
            has its own.
        after: Position of the first query whose far keys count so; earlier ones score all keys at
            their distance. Needs far keys at the positions of near ones. Default: 0, all queries.
    """

    near: int
    slope: float | tuple[float, ...]
    start: float | tuple[float, ...]
    group: int = 1
    after: int = 0

    def __post_init__(self) -> None:
        check_whole("near of a distance map, a number of tokens,", self.near)
        for slope in _each(self.slope):
            check_real("slope of a distance map", slope, highest=1)
        for start in _each(self.start):
            check_real("start of a distance map", start, -math.inf)
        check_whole("group of a distance map, a number of tokens,", self.group)
        check_whole("after of a distance map, a position,", self.after, 0)
        if self.after and not self.shares_keys:
            raise ValueError(
                "queries before a position can only see far keys as near ones where these have the "
                f"same positions, with slope 1 and group 1; got {self!r}"
            )

    def __str__(self) -> str:
        if isinstance(self.slope, tuple) or isinstance(self.start, tuple):
            return repr(self)
        far = f"d // {self.group:,}" if self.group > 1 else "d"
        if self.is_limit:
            counted = f"{self.start:,.10g}"
        else:
            grown = far if self.slope == 1 else f"{self.slope:.4g} {far}"
            sign = "−" if self.start < 0 else "+"
            counted = f"{grown} {sign} {abs(self.start):,.10g}"
        queries = f", for queries from position {self.after:,} on" if self.after else ""
        return f"distances d from {self.near:,} tokens on count as {counted}{queries}"

    @classmethod
    def limited(cls, near: int) -> "DistanceMap":
        """Far keys are all as if ``near`` back (ReRoPE, Su, kexue.fm/archives/9708)."""
        return cls(near, slope=0.0, start=near)

    @classmethod
    def leaky(cls, near: int, slope: float) -> "DistanceMap":
        """From ``near`` on distances grow more slowly (Leaky ReRoPE, Su, ibid.)."""
        return cls(near, slope=slope, start=(1 - slope) * near)

    @classmethod
    def shifted(cls, near: int, first: int, after: int = 0) -> "DistanceMap":
        """Distances from ``near`` on count from ``first`` on (STRING, arXiv 2410.18745)."""
        return cls(near, slope=1.0, start=first - near, after=after)

    @classmethod
    def grouped(cls, near: int, group: int) -> "DistanceMap":
        """From ``near`` on distances count groups of tokens (Self-Extend, arXiv 2401.01325)."""
        return cls(near, slope=1.0, start=near - near // group, group=group)

    @property
    def unchanged(self) -> int:
        """Tokens of the longest text, from position 0 on, whose distances all count as they are."""
        return max(self.near, self.after)

    @property
    def is_limit(self) -> bool:
        """Whether all far keys are at position 0: K' is then their coefficients."""
        return all(slope == 0 for slope in _each(self.slope))

    @property
    def shares_keys(self) -> bool:
        """Whether far keys are the near ones."""
        return self.group == 1 and all(slope == 1 for slope in _each(self.slope))

    @property
    def has_equal_steps(self) -> bool:
        """Whether far keys of consecutive tokens are equally far apart."""
        return self.group == 1 or self.is_limit

    def far_queries(self, positions: Tensor) -> Tensor:
        """Where queries at positions (..., T) are for far keys: (..., T, 1 or R/2)."""
        places = self.far_keys(positions)
        shifted = places + _per_pair(self.start, positions)
        if not self.after:
            return shifted
        return torch.where((positions < self.after).unsqueeze(-1), places, shifted)

    def far_keys(self, positions: Tensor) -> Tensor:
        """Where far keys at positions (..., S) are: (..., S, 1 or R/2)."""
        if self.group > 1:
            # Times 1 / group could end below the whole number: 49 * (1 / 49) is less than 1.
            positions = positions.div(self.group, rounding_mode="floor")
        return positions.unsqueeze(-1) * _per_pair(self.slope, positions)


def _each(given: float | tuple[float, ...]) -> tuple[float, ...]:
    return given if isinstance(given, tuple) else (given,)


def _per_pair(given: float | tuple[float, ...], like: Tensor) -> float | Tensor:
    return like.new_tensor(given) if isinstance(given, tuple) else given


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
            a distance map no query becomes smaller.
        decay: Exponent c of a power law. The weight of a key n tokens back is multiplied by
            (1 + n / decay_length)^-c, so that every doubling of the distance costs the same:
            ``bias`` (KERPLE's logarithmic kernel, arXiv 2205.09921). 0 and the default: no decay.
        decay_length: Distance in tokens at which the decay begins.
        distance_map: What distances count as. Scores must depend on nothing but distances before
            it, and there is no decay. Default: distances as they are.
            If it limits distances, a rule that follows the length of texts (longrope, dynamic)
            stays as it is from ``near`` on, so nothing changes in texts of up to as many tokens.
    """

    width: int
    base: float = 10000.0
    rule: Rule = UNSCALED
    turning: int | None = None
    temperature: int | None = None
    decay: float | None = None
    decay_length: float = 64.0
    distance_map: DistanceMap | None = None

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
        if self.decay is not None:
            check_real("decay", self.decay)
        found = self.distance_map
        if found is None:
            return
        if not isinstance(found, DistanceMap):
            raise ValueError(
                "distance_map must be a DistanceMap, such as DistanceMap.limited(4096), got "
                f"{found!r}"
            )
        pairs = {len(x) for x in (found.slope, found.start) if isinstance(x, tuple)}
        if pairs - {self.width // 2}:
            raise ValueError(
                f"slope and start of a distance map are numbers or have one per rotary pair, here "
                f"{self.width // 2}; got {found}"
            )
        if self.decay:
            raise ValueError(
                "a distance map has no decay beside it: leave out decay. Of a model that was saved "
                "with both, remove decay from rope_parameters in its config.json"
            )
        if not found.is_limit and self.rule != self.rule.for_length(1):
            raise ValueError(
                "a distance map whose slope is not 0 needs frequencies of one length; got "
                f"{self.rule.kind} scaling"
            )

    @property
    def _settles(self) -> int | None:
        """Length of a text, in tokens, from which on the rule stays as it is."""
        found = self.distance_map
        return found.near if found is not None and found.is_limit else None

    @property
    def _settled_rule(self) -> Rule:
        """The rule, in its form for short texts if none is longer to it than in training."""
        trained = getattr(self.rule, "training_length", None) or 0
        return self.rule.for_length(1) if (self._settles or math.inf) <= trained else self.rule

    def frequencies(self) -> Tensor:
        """theta of shape (R/2,), float64, in radians per token."""
        theta = self._settled_rule.frequencies(self.width, self.base)
        if self.turning is not None:
            theta = torch.cat((theta[: self.turning], torch.zeros_like(theta[self.turning :])))
        return theta

    def for_length(self, length: int) -> "Rotation":
        """The rotation for a text of ``length`` tokens, of which a limit counts at most."""
        return replace(self, rule=self.rule.for_length(min(length, self._settles or length)))

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the current text.

        Where they settle at some length, longrope selects its factors by the text, as Transformers
        does.
        """
        rule = self._settled_rule
        return rule.follows_length or (self._settles is not None and rule != rule.for_length(1))

    def angles(self, positions: Tensor, of: KeyAngles = "near") -> Tensor:
        """Angle of every rotated pair at positions (..., T): (..., T, R/2), in radians.

        In float64, or in float32 on devices without it: at position 100,000 the error of a float32
        angle is already 0.004 radians. With a distance map far keys have angles of their own.
        """
        positions = positions.to(_wide(positions.device))
        if of == "near":
            return self._angles(positions.unsqueeze(-1))
        assert self.distance_map is not None
        far = self.distance_map.far_keys(positions)
        return self._angles(far if of == "far" else positions.unsqueeze(-1) - far)

    def _angles(self, places: Tensor) -> Tensor:
        """The angles at places (..., T, 1 or R/2), one for all pairs or one for each."""
        if torch.compiler.is_compiling() or type(places) is not Tensor:
            return places * self.frequencies().to(places.device, places.dtype)
        return places * _frequencies(self, places.device, places.dtype)

    def magnitude(self, of: KeyAngles = "near") -> float:
        """The rule's factor on cos and sin, which far keys have when they are turned."""
        return 1.0 if of == "far to near" else self.rule.magnitude

    def tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, of: KeyAngles = "near"
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of `angles` at positions (..., T), with `magnitude`: (..., T, R/2)."""
        if self.follows_length:
            return self.for_length(int(positions.max().item()) + 1).tables(positions, dtype, of)
        return self._tables(self.angles(positions, of), dtype, self.magnitude(of))

    def _tables(
        self, angles: Tensor, dtype: torch.dtype, magnitude: float
    ) -> tuple[Tensor, Tensor]:
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)

    def far_tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of queries (..., T) for far keys: (..., T, R/2).

        Those keys have the tables of "far". If all of them are at position 0, tables of one query
        (1, R/2) are for all, times the rule's magnitude, which the keys then lack.
        """
        found = self.distance_map
        assert found is not None
        if found.is_limit:
            positions = positions.new_zeros(1)
        places = found.far_queries(positions.to(_wide(positions.device)))
        settled = self.for_length(found.near) if self.follows_length else self
        cos, sin = settled._tables(settled._angles(places), dtype, settled.rule.magnitude)
        if found.is_limit:
            return cos * self.rule.magnitude, sin * self.rule.magnitude
        return cos, sin

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
        return factor if self.distance_map is None else factor.clamp(min=1)

    @property
    def bias(self) -> Decay | None:
        """The decay; None if there is none."""
        return Decay(self.decay, self.decay_length) if self.decay else None


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


def are_consecutive(
    query_positions: Tensor, key_positions: Tensor, segments: Tensor | None = None
) -> bool:
    """Whether a distance is that of the indices, within one segment, for queries of the last keys.

    Args:
        query_positions: (..., T).
        key_positions: (..., S).
        segments: A number for every key, (B, S), as for `attend`; default: all are of one.
    """
    same = (
        query_positions == key_positions[..., key_positions.shape[-1] - query_positions.shape[-1] :]
    )
    step = key_positions.diff(dim=-1) == 1
    if segments is not None:
        step = step | (segments.diff(dim=-1) != 0)
    return bool(same.all() & step.all())


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


@lru_cache(maxsize=64)
def _frequencies(rotation: Rotation, device: torch.device, dtype: torch.dtype) -> Tensor:
    """theta on a device. Kept, because every copy to a GPU makes the processor wait for it."""
    with torch.inference_mode(False):
        return rotation.frequencies().to(device, dtype)
