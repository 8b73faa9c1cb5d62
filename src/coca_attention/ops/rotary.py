"""Rotary position embedding as pure functions: frequencies, scaling rules, cos/sin, rotation.

Legend: T positions, D rotary width, P = D/2 rotary pairs.

A rotary pair j turns by the angle ``n * theta_j`` at position n, with
``theta_j = base ** (-2 j / D)`` (CoCA paper, Eq. 1). Nothing here keeps state: the same
arguments give the same numbers whatever was computed before.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

ScalingKind = Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
SCALING_KINDS: tuple[str, ...] = get_args(ScalingKind)


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary angles are changed so that a model reads beyond its training length.

    Attributes:
        kind: ``none``; ``linear`` (position interpolation, arXiv 2306.15595: n becomes
            n / factor); ``ntk`` (a larger base, fixed for the whole request); ``dynamic`` (the
            same with the base following the current length); ``yarn`` (arXiv 2309.00071);
            ``llama3`` (the rule of Llama 3.1); ``longrope`` (arXiv 2402.13753, one divisor per
            pair).
        factor: The scaling factor k, at least 1.
        training_length: Length L_train in tokens that the model was trained on before it was
            scaled. Needed by all but ``none``, ``linear`` and ``ntk`` without a target length.
        length: Target length L in tokens. ``ntk`` without it multiplies the base by
            ``k ** (D / (D - 2))`` everywhere. ``dynamic`` without it takes the largest position
            plus one. ``longrope`` takes the short factors up to L_train, and the long ones above
            it or without a target length.
        beta_fast: ``yarn``: pairs that turn more often than this over L_train stay as they are.
        beta_slow: ``yarn``: pairs that turn less often than this are interpolated by k.
        truncate: ``yarn``: whether the ends of its ramp are whole pairs.
        low_freq_factor: ``llama3``: pairs that turn less often than this over L_train are
            interpolated by k.
        high_freq_factor: ``llama3``: pairs that turn more often than this stay as they are.
        short_factor: ``longrope``: P divisors of the frequencies for texts up to L_train.
        long_factor: ``longrope``: P divisors for longer texts.
        attention_factor: ``yarn`` and ``longrope``: multiplies cos and sin; default
            ``0.1 ln k + 1`` and ``sqrt(1 + ln k / ln L_train)``.
    """

    kind: ScalingKind = "none"
    factor: float = 1.0
    training_length: int | None = None
    length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCALING_KINDS:
            raise ValueError(
                f"unknown rotary scaling {self.kind!r}; choose one of {', '.join(SCALING_KINDS)}"
            )
        if not self.factor >= 1.0 or math.isinf(self.factor):
            raise ValueError(
                f"rotary scaling factor must be a number of at least 1, got {self.factor}"
            )
        for name in ("training_length", "length"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ValueError(f"rotary scaling {name} must be at least 1 token, got {tokens}")
        needs_training_length = self.kind in ("dynamic", "yarn", "llama3", "longrope") or (
            self.kind == "ntk" and self.length is not None
        )
        if needs_training_length and self.training_length is None:
            raise ValueError(
                f"rotary scaling {self.kind!r} needs training_length, the number of tokens the "
                "model was trained on"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"yarn needs beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}"
            )
        magnitude = self.attention_factor
        if magnitude is not None and not (
            isinstance(magnitude, (int, float)) and 0 < magnitude < math.inf
        ):
            raise ValueError(f"attention_factor must be a positive number, got {magnitude!r}")
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "llama3 needs high_freq_factor > low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                factors = getattr(self, name)
                if not factors or not all(0 < f < math.inf for f in factors):
                    raise ValueError(
                        f"longrope needs {name}, one positive divisor per rotary pair; got "
                        f"{factors}"
                    )

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: 1 except for ``yarn`` and ``longrope``."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        assert self.training_length is not None  # held by __post_init__
        if self.factor == 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.training_length))


NO_SCALING = RotaryScaling()


def check_width(width: int, what: str = "head width") -> None:
    """Raise ValueError unless ``width`` can be split into rotary pairs."""
    if width < 2 or width % 2:
        raise ValueError(
            f"{what} must be even and at least 2, so that it splits into rotary pairs; got {width}"
        )


def ntk_base(base: float, width: int, scaling: RotaryScaling) -> float:
    """The base after NTK-aware scaling, ``base * s ** (D / (D - 2))``.

    With a target length L the stretch is ``s = k L / L_train - (k - 1)`` (dynamic NTK), and 1 up
    to L_train; without one it is k. At D = 2 the only frequency is 1 whatever the base.

    Args:
        base: Base before scaling.
        width: Rotary width D.
        scaling: Rule of kind ``ntk`` or ``dynamic``.
    """
    if scaling.length is None or scaling.training_length is None:
        stretch = scaling.factor
    else:
        ratio = max(scaling.length / scaling.training_length, 1.0)
        stretch = scaling.factor * ratio - (scaling.factor - 1.0)
    return base * stretch ** (width / (width - 2)) if width > 2 else base


def inverse_frequencies(
    width: int, base: float = 10000.0, scaling: RotaryScaling = NO_SCALING
) -> Tensor:
    """Angle per position of every rotary pair.

    Args:
        width: Rotary width D.
        base: Base of the geometric series.
        scaling: Scaling rule. ``dynamic`` needs its ``length`` here.

    Returns:
        theta of shape (P,), float64, in radians per token.

    Raises:
        ValueError: If the width is odd, the base not positive, ``dynamic`` has no length, or
            ``longrope`` has not one divisor per pair.
    """
    check_width(width, "rotary width")
    if not base > 0:
        raise ValueError(f"rotary base must be positive, got {base}")
    if scaling.kind == "dynamic" and scaling.length is None:
        raise ValueError("dynamic scaling needs the current length: set RotaryScaling.length")
    if scaling.kind in ("ntk", "dynamic"):
        base = ntk_base(base, width, scaling)
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    theta = torch.pow(torch.tensor(base, dtype=torch.float64), -exponents)
    if scaling.kind == "linear":
        return theta / scaling.factor
    if scaling.kind in ("yarn", "llama3"):
        share = _yarn_kept_share if scaling.kind == "yarn" else _llama3_kept_share
        keep = share(width, base, scaling)
        return theta * keep + theta / scaling.factor * (1.0 - keep)
    if scaling.kind == "longrope":
        assert scaling.training_length is not None  # held by RotaryScaling
        long = scaling.length is None or scaling.length > scaling.training_length
        divisors = scaling.long_factor if long else scaling.short_factor
        if len(divisors) != width // 2:
            raise ValueError(
                f"longrope needs one divisor per rotary pair, {width // 2} of them; got "
                f"{len(divisors)}"
            )
        return theta / torch.tensor(divisors, dtype=torch.float64)
    return theta


def _yarn_kept_share(width: int, base: float, scaling: RotaryScaling) -> Tensor:
    """YaRN's ramp: 1 for pairs left alone, 0 for pairs interpolated by the factor. (P,) float64."""
    length = scaling.training_length
    assert length is not None  # held by RotaryScaling

    def pair_with_turns(turns: float) -> float:
        # The pair index j (real-valued) with turns = L_train * base ** (-2 j / D) / (2 pi).
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # Equal ends would divide by zero; a hair's breadth makes the ramp a step.
    span = max(last - first, 1e-3)
    pairs = torch.arange(width // 2, dtype=torch.float64)
    return 1.0 - ((pairs - first) / span).clamp(0.0, 1.0)


def _llama3_kept_share(width: int, base: float, scaling: RotaryScaling) -> Tensor:
    """Llama 3.1's ramp, linear in a pair's turns over L_train: 1 for pairs left alone. (P,)."""
    assert scaling.training_length is not None  # held by RotaryScaling
    theta = inverse_frequencies(width, base)
    turns = scaling.training_length * theta / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def rotary_cos_sin(
    positions: Tensor,
    width: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling = NO_SCALING,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotary pair's angle, half as wide as the head.

    Angles are formed in float64 (float32 on devices without it): at position 100,000 a float32
    angle is already off by 0.004 radians.

    Args:
        positions: Token positions, any shape (..., T), integer or floating.
        width: Rotary width D.
        base: Base of the geometric series.
        scaling: Scaling rule.
        dtype: dtype of the result.

    Returns:
        cos and sin, each (..., T, P).
    """
    if scaling.kind == "dynamic" and scaling.length is None:
        scaling = replace(scaling, length=int(positions.max().item()) + 1)
    angle_dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    theta = inverse_frequencies(width, base, scaling).to(positions.device, angle_dtype)
    angles = positions.to(angle_dtype).unsqueeze(-1) * theta
    return (angles.cos() * scaling.magnitude).to(dtype), (angles.sin() * scaling.magnitude).to(
        dtype
    )


def split_pairs(
    x: Tensor, interleaved: bool = False, rotary_width: int | None = None
) -> tuple[Tensor, Tensor]:
    """First and second members of every rotary pair.

    Args:
        x: (..., D).
        interleaved: False when pair j is (j, j + D/2) as in Llama and GPT-NeoX, True when it is
            (2j, 2j + 1) as in GPT-J, Cohere and the paper's formulas.
        rotary_width: R, where only the first R numbers of a head are rotated (partial rotary):
            pairs are taken inside that span; the numbers behind it, not rotated, form half-split
            pairs of their own. Default D.

    Returns:
        Two tensors (..., P), views where R = D.

    Raises:
        ValueError: If D or R is odd, or R is larger than D.
    """
    check_width(x.shape[-1])
    if rotary_width is not None and rotary_width != x.shape[-1]:
        check_width(rotary_width, "rotary width")
        if rotary_width > x.shape[-1]:
            raise ValueError(
                f"the rotary width must be at most the head width {x.shape[-1]}; got {rotary_width}"
            )
        turned = split_pairs(x[..., :rotary_width], interleaved)
        passed = split_pairs(x[..., rotary_width:])
        first, second = (torch.cat(both, dim=-1) for both in zip(turned, passed, strict=True))
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
        turned = join_pairs(first[..., :pairs], second[..., :pairs], interleaved)
        return torch.cat((turned, first[..., pairs:], second[..., pairs:]), dim=-1)
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every pair of x by its angle: R_n x (CoCA paper, Eq. 1).

    Args:
        x: (B, H, T, D).
        cos: (T, P) or (B, T, P), from `rotary_cos_sin`.
        sin: Like cos.
        interleaved: Pair layout, see `split_pairs`.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    first, second = split_pairs(x, interleaved)
    rotated = join_pairs(first * cos - second * sin, first * sin + second * cos, interleaved)
    return rotated.to(x.dtype)
