"""What a CoCA model's configuration says: the form, the cache, the rotary scaling."""

from dataclasses import dataclass
from typing import Any

import torch

from coca_attention.ops import FORMS, NO_SCALING, RotaryScaling, inverse_frequencies

# Transformers' names for the rotary scalings, and ours.
ROPE_TYPES = {
    "default": "none",
    "linear": "linear",
    "ntk": "ntk",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}
# What a rule's parameters are besides factor and length, in Transformers' names, which are ours.
PARAMETERS = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
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


def rotary_width(config: Any, layer_type: str | None = None) -> int:
    """Numbers of a head that are rotated: the head width, times ``partial_rotary_factor``."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return int(head_dim * rope_parameters(config, layer_type).get("partial_rotary_factor", 1.0))


def rotary_scaling(config: Any, layer_type: str | None = None) -> tuple[float, RotaryScaling]:
    """Base and scaling rule in a configuration's ``rope_parameters``.

    Args:
        config: A Transformers configuration. Its rotary parameters hold ``rope_type`` (default,
            linear, ntk, dynamic, yarn, llama3 or longrope), ``rope_theta``, ``factor``, what the
            rule needs besides (`PARAMETERS`), and for ntk and longrope an optional target
            ``length`` in tokens.
        layer_type: See `rope_parameters`.

    Returns:
        The rotary base and the `RotaryScaling`.

    Raises:
        ValueError: If the type is unknown or a parameter is out of range.
    """
    rope = rope_parameters(config, layer_type)
    base = float(rope.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported by CoCA models; choose one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    if rope_type == "default":
        return base, NO_SCALING
    unknown = sorted(name for name in ("mscale", "mscale_all_dim") if rope.get(name) is not None)
    if unknown:
        raise ValueError(
            f"rope_type {rope_type!r} with {' and '.join(unknown)} is not supported; give "
            "attention_factor, what cos and sin are multiplied by"
        )
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in PARAMETERS.get(rope_type, ())
        if (value := rope.get(name)) is not None
    }
    trained = rope.get("original_max_position_embeddings") or training_length(config)
    factor = rope.get("factor")
    if factor is None and rope_type == "longrope" and trained:
        factor = max(config.max_position_embeddings / trained, 1.0)
    return base, RotaryScaling(
        kind=ROPE_TYPES[rope_type],  # pyright: ignore[reportArgumentType]
        factor=float(factor if factor is not None else 1.0),
        training_length=trained,
        length=rope.get("length"),
        **given,
    )


def ntk_frequencies(
    config: Any, device: Any = None, seq_len: Any = None, layer_type: Any = None
) -> tuple[torch.Tensor, float]:
    """The rule ``ntk`` in the form that Transformers' table of rope types wants.

    Without an entry there, a model whose configuration says ``ntk`` could not be built at all.

    Returns:
        Frequencies (P,), float32, and the magnitude of cos and sin.
    """
    base, scaling = rotary_scaling(config, layer_type)
    theta = inverse_frequencies(rotary_width(config, layer_type), base, scaling)
    return theta.to(device, torch.float32), scaling.magnitude


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
        coca_form: ``slack`` (the paper's Eq. 10), ``strict`` (Eq. 9) or ``linear``.
        kv_cache: What is kept of earlier tokens besides their values. ``full``: the effective key,
            as wide as a head; works with everything. ``half``: the coefficients before rotation,
            half as wide; the key is formed when it is read, at the position that follows from the
            tokens behind it: within a text that is read in several passes, positions have to be
            consecutive over its real tokens.
    """

    coca_form: str = "slack"
    kv_cache: str = "full"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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
        if self.coca_form not in FORMS:
            raise ValueError(f"coca_form must be one of {', '.join(FORMS)}; got {self.coca_form!r}")
        check_cache_kind(self.kv_cache)
        heads = self.num_attention_heads
        groups = getattr(self, "num_key_value_heads", None) or heads
        width = getattr(self, "head_dim", None) or self.hidden_size // heads
        if width % 2:
            raise ValueError(f"the head width must be even, for rotary pairs; got {width}")
        if heads % groups:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads; got {groups} and {heads}"
            )
        for layer_type in sorted(set(getattr(self, "layer_types", None) or {"full_attention"})):
            span = rotary_width(self, layer_type)
            if span < 2 or span % 2 or span > width:
                raise ValueError(
                    f"partial_rotary_factor must leave an even number of at least 2 and at most "
                    f"{width} rotated numbers of a head; got {span}"
                )
            rotary_scaling(self, layer_type)

    def _validate_ntk_rope_parameters(
        self, rope_parameters: dict[str, Any], ignore_keys: set[str] | None = None
    ) -> None:
        # Transformers looks for a method of this name for every rope_type and warns without one.
        # `rotary_scaling` has the checks.
        pass
