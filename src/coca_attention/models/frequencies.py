"""Rules for rotary frequencies that Transformers has: its functions, in float64."""

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention.errors import check_real, check_whole
from coca_attention.ops import Rule

PARAMETERS = {
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", "length"),
}
"""Rules of Transformers beside those of `coca_attention.ops`, and what they read; ``length``, of
ours, fixes the text for which longrope chooses its factors."""
RULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 1.0},
    "yarn": {"factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    "llama3": {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {},
}
"""Values of parameters that are not given, which Transformers requires to save some rules."""
FOLLOWING = ("dynamic", "longrope")
"""Rules whose frequencies depend on the length of a text."""


@dataclass(frozen=True)
class StockRule(Rule):
    """A rule of Transformers, by its name and parameters.

    Attributes:
        kind: Its name.
        parameters: Names and values of what it reads of ``rope_parameters``.
        training_length: The length in tokens that it scales from.
        length: Tokens of the text, in rules that depend on it. Without one, ``longrope`` has its
            long factors, and ``dynamic`` needs one.
    """

    kind: str = "yarn"  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance here)
    parameters: tuple[tuple[str, Any], ...] = ()
    training_length: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        given = dict(self.parameters)
        check_whole("rotary scaling training_length, a number of tokens,", self.training_length)
        if self.length is not None:
            check_whole("rotary scaling length, a number of tokens,", self.length)
        check_real("rotary scaling factor", given.get("factor", 1.0), 1)
        if given.get("attention_factor") is not None:
            check_real("attention_factor", given["attention_factor"], above=True)
        if not isinstance(given.get("truncate", True), bool):  # the text "no" would count as true
            raise ValueError(f"truncate must be true or false, got {given['truncate']!r}")
        for high, low in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            for name in (high, low) if high in given else ():
                check_real(name, given[name], above=True)
            if high in given and not given[high] > given[low] > 0:
                raise ValueError(
                    f"{self.kind} needs {high} > {low} > 0, got {given[high]} and {given[low]}"
                )
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            factors = given.get(name) or ()
            if not isinstance(factors, tuple) or not factors:
                raise ValueError(
                    f"longrope needs {name}, one positive divisor per rotary pair; got {factors!r}"
                )
            for factor in factors:
                check_real(f"each divisor of {name}", factor, above=True)

    @property
    def factor(self) -> float:
        """k, at least 1."""
        return dict(self.parameters)["factor"]

    def frequencies(self, width: int, base: float) -> Tensor:
        """theta of shape (P,), float64, in radians per token, for a rotary width and a base."""
        if self.follows_length:
            raise ValueError("dynamic scaling needs the current length: use for_length(...)")
        for name in ("short_factor", "long_factor"):
            found = dict(self.parameters).get(name)
            if found is not None and len(found) != width // 2:
                raise ValueError(
                    f"longrope needs one divisor per rotary pair, {width // 2} of them; got "
                    f"{len(found)}"
                )
        found = _computed(
            self.kind, self.parameters, self.training_length, self.length, width, float(base)
        )
        return found[0]

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin."""
        return _magnitude(self.kind, self.parameters, self.training_length)

    def for_length(self, length: int) -> Self:
        """The rule for a text of ``length`` tokens; most rules do not depend on it."""
        if self.length is not None or self.kind not in FOLLOWING:
            return self
        return replace(self, length=length)

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the current text."""
        return self.kind == "dynamic" and self.length is None

    @classmethod
    def of(
        cls,
        kind: str,
        rope: dict[str, Any],
        training_length: int | None,
        longest: int | None = None,
    ) -> Self:
        """The rule of Transformers' ``rope_parameters``; what it does not read is ignored.

        From ``longest``, a model's ``max_position_embeddings``, ``longrope`` derives its factor.
        """
        given = {name: rope[name] for name in PARAMETERS[kind] if rope.get(name) is not None}
        given = RULE_DEFAULTS[kind] | given
        length = given.pop("length", None)
        if "factor" not in given and training_length and longest:
            given["factor"] = max(longest / training_length, 1.0)
        given.setdefault("factor", 1.0)
        given["factor"] = float(given["factor"])
        values = {n: tuple(x) if isinstance(x, list) else x for n, x in given.items()}
        return cls(kind, tuple(sorted(values.items())), training_length or 0, length)


Parameters = tuple[tuple[str, Any], ...]


@torch.compiler.assume_constant_result
def _computed(
    kind: str,
    parameters: Parameters,
    training_length: int,
    length: int | None,
    width: int,
    base: float,
) -> tuple[Tensor, float]:
    """What Transformers' function returns for a model with one head of a width, in float64.

    A constant for torch.compile, which traces no such mode.
    """
    config = SimpleNamespace(
        head_dim=width,
        max_position_embeddings=training_length,
        rope_parameters={
            **dict(parameters),
            "rope_theta": base,
            "original_max_position_embeddings": training_length,
        },
        standardize_rope_params=lambda: None,
        hidden_size=width,
        num_attention_heads=1,
    )
    seen = training_length + 1 if length is None else length
    with _Wide():
        return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seen)


class _Wide(TorchFunctionMode):
    """Float64 for float32, which Transformers' functions ask for by name.

    Angles at position 100,000 are off by 0.001 to 0.004 radians with float32 frequencies, and by
    1e-11 with these.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@torch.compiler.assume_constant_result
def _magnitude(kind: str, parameters: Parameters, training_length: int) -> float:
    return _kept_magnitude(kind, parameters, training_length)


@lru_cache(maxsize=64)
def _kept_magnitude(kind: str, parameters: Parameters, training_length: int) -> float:
    """The factor on cos and sin, which depends on no width, and every pass asks for."""
    pairs = len(dict(parameters).get("long_factor", (1.0, 1.0)))
    return _computed(kind, parameters, training_length, 1, 2 * pairs, 10000.0)[1]
