"""What a CoCA model's configuration says: the form, the rotary scaling, the training length."""

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
}


def training_length(config: Any) -> int | None:
    """Tokens that the model was trained on: ``max_position_embeddings``, or the original one.

    None where a configuration says neither.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    given = rope.get("original_max_position_embeddings")
    return given or getattr(config, "max_position_embeddings", None)


def rotary_width(config: Any) -> int:
    """Numbers of a head that are rotated: the head width, times ``partial_rotary_factor``."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return int(head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


def rotary_scaling(config: Any) -> tuple[float, RotaryScaling]:
    """Base and scaling rule in a configuration's ``rope_parameters``.

    Args:
        config: A Transformers configuration with flat ``rope_parameters``: ``rope_type`` one of
            default, linear, ntk, dynamic, yarn; ``rope_theta``; ``factor``; for ntk an optional
            target ``length`` in tokens.

    Returns:
        The rotary base and the `RotaryScaling`.

    Raises:
        ValueError: If the type is unknown or a parameter is out of range.
    """
    rope = config.rope_parameters or {}
    base = float(rope.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported by CoCA models; choose one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    if rope_type == "default":
        return base, NO_SCALING
    optional = {
        name: rope[name]
        for name in ("beta_fast", "beta_slow", "attention_factor")
        if rope.get(name) is not None
    }
    return base, RotaryScaling(
        kind=ROPE_TYPES[rope_type],  # pyright: ignore[reportArgumentType]
        factor=float(rope.get("factor", 1.0)),
        training_length=training_length(config),
        length=rope.get("length"),
        **optional,
    )


def ntk_frequencies(
    config: Any, device: Any = None, seq_len: Any = None, layer_type: Any = None
) -> tuple[torch.Tensor, float]:
    """The rule ``ntk`` in the form that Transformers' table of rope types wants.

    Without an entry there, a model whose configuration says ``ntk`` could not be built at all.

    Returns:
        Frequencies (P,), float32, and the magnitude of cos and sin.
    """
    base, scaling = rotary_scaling(config)
    theta = inverse_frequencies(rotary_width(config), base, scaling)
    return theta.to(device, torch.float32), scaling.magnitude


class CoCAConfigMixin:
    """Checks of the fields that CoCA adds to a family's configuration.

    ``coca_form`` is ``slack`` or ``strict``; ``max_position_embeddings`` is the training length;
    ``rope_parameters`` holds the rotary base and scaling, with the additional type ``ntk``
    (``factor``, and optionally the target ``length`` in tokens).
    """

    def validate_architecture(self: Any) -> None:
        """Called by Transformers whenever a configuration is made or loaded."""
        super().validate_architecture()  # pyright: ignore[reportAttributeAccessIssue]
        if self.coca_form not in FORMS:
            raise ValueError(f"coca_form must be one of {', '.join(FORMS)}; got {self.coca_form!r}")
        heads = self.num_attention_heads
        groups = getattr(self, "num_key_value_heads", None) or heads
        width = getattr(self, "head_dim", None) or self.hidden_size // heads
        if width % 2:
            raise ValueError(f"the head width must be even, for rotary pairs; got {width}")
        if heads % groups:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads; got {groups} and {heads}"
            )
        partial = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise ValueError(
                f"CoCA models rotate the whole head: partial_rotary_factor must be 1.0, got "
                f"{partial}"
            )
        rotary_scaling(self)

    def _validate_ntk_rope_parameters(
        self, rope_parameters: dict[str, Any], ignore_keys: set[str] | None = None
    ) -> None:
        # Transformers looks for a method of this name for every rope_type and warns without one.
        # `rotary_scaling` has the checks.
        pass
