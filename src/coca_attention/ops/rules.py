"""Scaling rules: rotary frequencies for texts longer than the training length, one class each.

Legend: D rotary width, P = D/2 rotary pairs, k scaling factor, L_train training length, L target
length; lengths are in tokens.

A rule computes P frequencies from base and width and keeps no state: the same arguments always give
the same frequencies. To add a rule, subclass `Rule` as a frozen dataclass and register it with
`register_rule`: its fields become the parameters that configurations, `set_rotary_scaling` and the
command line accept.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from coca_attention.ops.checks import check_real, check_whole


def unscaled_frequencies(width: int, base: float) -> Tensor:
    """theta_j = base ** (-2 j / D) (CoCA paper, Eq. 1): (P,), float64, in radians per token."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return torch.pow(torch.tensor(base, dtype=torch.float64), -exponents)


@dataclass(frozen=True)
class Rule:
    """Unscaled frequencies, and the base class of all scaling rules.

    Attributes:
        factor: k, at least 1, in rules that have it.
        training_length: L_train.
        length: L, in rules for a text of some length.
        attention_factor: Multiplies cos and sin; the default depends on the rule.
    """

    kind: ClassVar[str] = "none"
    """Name of the rule, also as ``rope_type`` of Transformers' ``rope_parameters``, which call this
    one ``default``."""

    def __post_init__(self) -> None:
        factor = getattr(self, "factor", 1.0)
        check_real("rotary scaling factor", factor, 1)
        for name in ("training_length", "length"):
            tokens = getattr(self, name, None)
            if tokens is not None:
                check_whole(f"rotary scaling {name}, a number of tokens,", tokens)

    def frequencies(self, width: int, base: float) -> Tensor:
        """theta of shape (P,), float64, in radians per token, for a rotary width and a base."""
        return unscaled_frequencies(width, base)

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin."""
        return 1.0

    def for_length(self, length: int) -> Self:
        """The rule for a text of ``length`` tokens; most rules do not depend on it."""
        return self

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the current text."""
        return False

    @classmethod
    def from_parameters(
        cls, parameters: dict[str, Any], training_length: int | None, longest: int | None = None
    ) -> Self:
        """The rule with Transformers' ``rope_parameters``; those that it does not take are ignored.

        From ``longest``, a model's ``max_position_embeddings``, ``longrope`` derives its factor.
        """
        given: dict[str, Any] = {"training_length": training_length}
        given |= {name: value for name, value in parameters.items() if value is not None}
        known = [name for name in cls.field_names() if given.get(name) is not None]
        given = {n: tuple(given[n]) if isinstance(given[n], list) else given[n] for n in known}
        if "factor" in given:
            given["factor"] = float(given["factor"])
        return cls(**given)

    @classmethod
    def field_names(cls) -> list[str]:
        """Names of the rule's parameters."""
        return list(cls.__match_args__)  # torch.compile does not trace dataclasses.fields

    def _check_training_length(self) -> None:
        if not getattr(self, "training_length", None):
            raise ValueError(
                f"rotary scaling {self.kind!r} needs training_length, the model's training length "
                "in tokens"
            )


UNSCALED = Rule()
"""Frequencies as in training."""
RULES: dict[str, type[Rule]] = {Rule.kind: Rule}
"""Registered rules by the name that `set_rotary_scaling` takes."""
RuleType = TypeVar("RuleType", bound=type[Rule])


def register_rule(rule: RuleType) -> RuleType:
    """Register a rule under its ``kind``; usable as a class decorator.

    Raises:
        ValueError: If the name belongs to another rule.
    """
    if RULES.setdefault(rule.kind, rule) is not rule:
        raise ValueError(f"a rotary scaling named {rule.kind!r} is already registered")
    return rule


@register_rule
@dataclass(frozen=True)
class Linear(Rule):
    """Position interpolation (arXiv 2306.15595): position n becomes n / k."""

    kind = "linear"
    factor: float = 1.0

    def frequencies(self, width: int, base: float) -> Tensor:
        return unscaled_frequencies(width, base) / self.factor


@register_rule
@dataclass(frozen=True)
class NTK(Rule):
    """NTK-aware scaling (bloc97, 2023): a larger base, which does not change during a request.

    Without a ``length`` the base is multiplied by ``k ** (D / (D - 2))`` at every length; with one,
    ``training_length`` is required.
    """

    kind = "ntk"
    factor: float = 1.0
    training_length: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None:
            self._check_training_length()

    def scaled_base(self, width: int, base: float) -> float:
        """``base * s ** (D / (D - 2))``.

        With a target length the stretch is ``s = k L / L_train - (k - 1)`` (dynamic NTK), and 1 up
        to L_train; without one it is k. At D = 2 the only frequency is 1 whatever the base.
        """
        stretch = self.factor
        if self.length is not None and self.training_length is not None:
            ratio = max(self.length / self.training_length, 1.0)
            stretch = self.factor * ratio - (self.factor - 1.0)
        return base * stretch ** (width / (width - 2)) if width > 2 else base

    def frequencies(self, width: int, base: float) -> Tensor:
        return unscaled_frequencies(width, self.scaled_base(width, base))


@register_rule
@dataclass(frozen=True)
class DynamicNTK(NTK):
    """Dynamic NTK (emozilla, 2023): a base for the current length, inexact with a cache.

    Without a ``length`` it is the largest position plus one.
    """

    kind = "dynamic"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_training_length()

    def frequencies(self, width: int, base: float) -> Tensor:
        if self.length is None:
            raise ValueError("dynamic scaling needs the current length: use for_length(...)")
        return super().frequencies(width, base)

    def for_length(self, length: int) -> Self:
        return self if self.length is not None else replace(self, length=length)

    @property
    def follows_length(self) -> bool:
        return self.length is None


@dataclass(frozen=True)
class _Trained(Rule):
    """A rule that cannot do without the training length."""

    factor: float = 1.0
    training_length: int = 0

    def __post_init__(self) -> None:
        self._check_training_length()
        super().__post_init__()
        magnitude = getattr(self, "attention_factor", None)
        if magnitude is not None:
            check_real("attention_factor", magnitude, above=True)

    def _interpolated(self, theta: Tensor, kept: Tensor) -> Tensor:
        """``theta`` where ``kept`` is 1 and theta / k where it is 0; all (P,)."""
        return theta * kept + theta / self.factor * (1.0 - kept)


@register_rule
@dataclass(frozen=True)
class YaRN(_Trained):
    """YaRN (arXiv 2309.00071): interpolates slow pairs, keeps fast ones, with a ramp in between.

    Attributes:
        attention_factor: Multiplies cos and sin; default ``0.1 ln k + 1``.
        beta_fast: Pairs with more full turns than this over L_train are unchanged.
        beta_slow: Pairs with fewer full turns than this are interpolated by k.
        truncate: Whether the ends of the ramp are rounded to whole pair indices.
    """

    kind = "yarn"
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"yarn needs beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}"
            )

    @property
    def magnitude(self) -> float:
        given = self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if given is None else given

    def frequencies(self, width: int, base: float) -> Tensor:
        def pair_with_turns(turns: float) -> float:
            # Solves turns = L_train * base ** (-2 j / D) / (2 pi) for a real-valued pair index j.
            rate = self.training_length / (turns * 2 * math.pi)
            return width * math.log(rate) / (2 * math.log(base))

        first, last = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        # Equal ends would divide by zero; with a small difference the ramp becomes a step.
        span = max(last - first, 1e-3)
        pairs = torch.arange(width // 2, dtype=torch.float64)
        kept = 1.0 - ((pairs - first) / span).clamp(0.0, 1.0)
        return self._interpolated(unscaled_frequencies(width, base), kept)


@register_rule
@dataclass(frozen=True)
class Llama3(_Trained):
    """The rule of Llama 3.1: a ramp that is linear in the number of full turns over L_train.

    Attributes:
        low_freq_factor: Pairs with fewer full turns than this over L_train are interpolated by k.
        high_freq_factor: Pairs with more full turns than this are unchanged.
    """

    kind = "llama3"
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "llama3 needs high_freq_factor > low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

    def frequencies(self, width: int, base: float) -> Tensor:
        theta = unscaled_frequencies(width, base)
        turns = self.training_length * theta / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        return self._interpolated(theta, ((turns - low) / (high - low)).clamp(0.0, 1.0))


@register_rule
@dataclass(frozen=True)
class LongRoPE(_Trained):
    """LongRoPE (arXiv 2402.13753): one divisor per pair, different for short and long texts.

    Attributes:
        factor: k, at least 1; used only for the default of ``attention_factor``.
        attention_factor: Multiplies cos and sin; default ``sqrt(1 + ln k / ln L_train)``.
        length: L. The short factors apply up to L_train, the long ones above it and without L.
        short_factor: P divisors of the frequencies for texts of up to L_train tokens.
        long_factor: P divisors of the frequencies for longer texts.
    """

    kind = "longrope"
    attention_factor: float | None = None
    length: int | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not factors or not all(0 < f < math.inf for f in factors):
                raise ValueError(
                    f"longrope needs {name}, one positive divisor per rotary pair; got {factors}"
                )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor == 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.training_length))

    def frequencies(self, width: int, base: float) -> Tensor:
        long = self.length is None or self.length > self.training_length
        divisors = self.long_factor if long else self.short_factor
        if len(divisors) != width // 2:
            raise ValueError(
                f"longrope needs one divisor per rotary pair, {width // 2} of them; got "
                f"{len(divisors)}"
            )
        theta = unscaled_frequencies(width, base)
        return theta / torch.tensor(divisors, dtype=torch.float64)

    def for_length(self, length: int) -> Self:
        return self if self.length is not None else replace(self, length=length)

    @classmethod
    def from_parameters(
        cls, parameters: dict[str, Any], training_length: int | None, longest: int | None = None
    ) -> Self:
        if parameters.get("factor") is None and training_length and longest:
            factor = max(longest / training_length, 1.0)
            parameters = {**parameters, "factor": factor}
        return super().from_parameters(parameters, training_length, longest)
