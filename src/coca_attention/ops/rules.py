"""Scaling rules: rotary frequencies for texts longer than the training length, one class each.

Legend: D rotary width, P = D/2 rotary pairs, k scaling factor, L_train training length, L target
length; lengths are in tokens.

A rule computes P frequencies from base and width and keeps no state: the same arguments always give
the same frequencies. To add a rule, subclass `Rule` as a frozen dataclass and register it with
`register_rule`: its fields become the parameters that configurations, `set_rotary_scaling` and the
command line accept.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from coca_attention.errors import check_real, check_whole


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
    def from_parameters(cls, parameters: dict[str, Any], training_length: int | None) -> Self:
        """The rule with entries of ``rope_parameters``; those that it does not take are ignored."""
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
        if self.length is not None and not self.training_length:
            raise ValueError(
                f"rotary scaling {self.kind!r} needs training_length, the model's training length "
                "in tokens"
            )

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
