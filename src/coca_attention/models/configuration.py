"""What a CoCA model's configuration says: the form, the cache, the rotary scaling."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention.ops import RULES, Rotation, Rule, get_form

CACHES = ("full", "half")


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters of a configuration, of one kind of layer where there are several.

    Args:
        config: A Transformers configuration.
        layer_type: Such as ``full_attention``, for families whose kinds of layers differ in their
            rotary embedding (Gemma 3).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(value is None or isinstance(value, dict) for value in rope.values()):
        rope = rope.get(layer_type or "full_attention") or {}
    return rope


def training_length(config: Any) -> int | None:
    """Tokens that the model was trained on: ``max_position_embeddings``, or the original one.

    None where a configuration says neither.
    """
    given = rope_parameters(config).get("original_max_position_embeddings")
    return given or getattr(config, "max_position_embeddings", None)


def head_width(config: Any) -> int:
    """Numbers of a head, D."""
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def rule_of(rope_type: str) -> type[Rule]:
    """The rule that a ``rope_type`` names.

    Raises:
        ValueError: If there is none.
    """
    known = {rule.rope_type: rule for rule in RULES.values()}
    if rope_type not in known:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported by CoCA models; choose one of "
            f"{', '.join(known)}"
        )
    return known[rope_type]


def rotation(config: Any, layer_type: str | None = None) -> Rotation:
    """The rotation in a configuration's ``rope_parameters``.

    Args:
        config: A Transformers configuration. Its rotary parameters hold ``rope_type``,
            ``rope_theta``, ``partial_rotary_factor``, what the rule takes (the fields of a `Rule`;
            ``ntk`` and ``longrope`` have an optional target ``length`` in tokens), and
            ``turning_pairs`` and ``temperature`` of a `Rotation`.
        layer_type: See `rope_parameters`.

    Raises:
        ValueError: If the type is unknown or a parameter is out of range.
    """
    rope = rope_parameters(config, layer_type)
    rope_type = rope.get("rope_type", "default")
    rule = rule_of(rope_type)
    unknown = sorted(name for name in ("mscale", "mscale_all_dim") if rope.get(name) is not None)
    if unknown and rope_type != "default":
        raise ValueError(
            f"rope_type {rope_type!r} with {' and '.join(unknown)} is not supported; give "
            "attention_factor, what cos and sin are multiplied by"
        )
    trained = rope.get("original_max_position_embeddings") or training_length(config)
    longest = getattr(config, "max_position_embeddings", None)
    return Rotation(
        width=int(head_width(config) * rope.get("partial_rotary_factor", 1.0)),
        base=float(rope.get("rope_theta", 10000.0)),
        rule=rule.from_parameters(rope, trained, longest),
        turning=rope.get("turning_pairs"),
        temperature=rope.get("temperature"),
    )


def transformers_frequencies(
    config: Any, device: Any = None, seq_len: Any = None, layer_type: Any = None
) -> tuple[torch.Tensor, float]:
    """Frequencies in the form that Transformers' table of rope types expects.

    Without an entry there, a model whose configuration names one of our rules could not be built.

    Returns:
        Frequencies (P,), float32, and the magnitude of cos and sin.
    """
    found = rotation(config, layer_type)
    if found.rule.follows_length:
        found = found.for_length(seq_len or training_length(config) or 1)
    return found.frequencies().to(device, torch.float32), found.rule.magnitude


def add_rope_types() -> None:
    """Make Transformers know the rope types of all rules, those registered by users included."""
    for rule in RULES.values():
        check = f"_validate_{rule.rope_type}_rope_parameters"
        if not hasattr(PreTrainedConfig, check):
            # Transformers warns about rope types without a check; `rotation` has ours.
            setattr(CoCAConfig, check, lambda *_, **__: None)
            ROPE_INIT_FUNCTIONS.setdefault(rule.rope_type, transformers_frequencies)


def check_cache_kind(kind: str) -> None:
    """Raise ValueError unless it is one of `CACHES`."""
    if kind not in CACHES:
        raise ValueError(f"kv_cache must be one of {', '.join(CACHES)}; got {kind!r}")


@dataclass(kw_only=True, repr=False)
class CoCAConfig:
    """The fields that CoCA adds to a family's configuration, mixed in before it.

    ``max_position_embeddings`` is the training length in tokens; ``rope_parameters`` holds the
    rotary base and scaling, with the additional type ``ntk`` (``factor``, and optionally the
    target ``length`` in tokens).

    Args:
        coca_form: Name of the score form: ``slack`` (the paper's Eq. 10), ``strict`` (Eq. 9),
            ``magnitude``, or one that was registered.
        coca_free_pairs: The last pairs of every head that are scored by ordinary rotary attention.
        kv_cache: What is cached of earlier tokens besides their values. ``full``: the effective
            key, as wide as a head; works with everything. ``half``: the coefficients before
            rotation, half as wide (without free pairs); keys are formed when they are read, at
            positions counted back from the current one: in a text that is read in several passes,
            the positions of its real tokens have to be consecutive.
    """

    coca_form: str = "slack"
    coca_free_pairs: int = 0
    kv_cache: str = "full"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = getattr(cls, "ignore_keys_at_rope_validation", None) or set()
        cls.ignore_keys_at_rope_validation = {*known, "length", "turning_pairs", "temperature"}
        # Families with separate projections are sharded as they were, T in place of the key.
        if "base_model_tp_plan" not in cls.__dict__:
            plan = getattr(cls, "base_model_tp_plan", None) or {}
            renamed = {
                name.replace(".k_proj", ".t_proj").replace(".k_norm", ".t_norm"): how
                for name, how in plan.items()
            }
            cls.base_model_tp_plan = renamed  # pyright: ignore[reportAttributeAccessIssue]

    def validate_architecture(self: Any) -> None:
        """Called by Transformers whenever a configuration is made or loaded."""
        parents = super()
        if hasattr(parents, "validate_architecture"):
            parents.validate_architecture()  # pyright: ignore[reportAttributeAccessIssue]
        get_form(self.coca_form)
        check_cache_kind(self.kv_cache)
        heads = self.num_attention_heads
        kv_heads = getattr(self, "num_key_value_heads", None) or heads
        width = head_width(self)
        if width % 2:
            raise ValueError(f"the head width must be even, for rotary pairs; got {width}")
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads; got {kv_heads} and {heads}"
            )
        if not 0 <= self.coca_free_pairs <= width // 2:
            raise ValueError(
                f"coca_free_pairs must lie between 0 and {width // 2}, the pairs of a head; got "
                f"{self.coca_free_pairs}"
            )
        for layer_type in sorted(set(getattr(self, "layer_types", None) or {"full_attention"})):
            share = rope_parameters(self, layer_type).get("partial_rotary_factor", 1.0)
            span = int(width * share)
            if span < 2 or span % 2 or span > width:
                raise ValueError(
                    f"partial_rotary_factor must leave an even number of at least 2 and at most "
                    f"{width} rotated numbers of a head; got {span}"
                )
            rotation(self, layer_type)

    def validate_rope(self: Any) -> None:
        """Transformers' checks of ``rope_parameters``; `rotation` checks the rules of our own."""
        add_rope_types()
        super().validate_rope()  # pyright: ignore[reportAttributeAccessIssue]
