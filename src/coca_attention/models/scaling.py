"""Rotary scaling of a loaded model, CoCA or vanilla, without state and without reloading."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.attention import CoCARotary
from coca_attention.models.configuration import ROPE_TYPES, training_length
from coca_attention.ops.rotary import ScalingKind


class VanillaRotary(CoCARotary):
    """Stateless stand-in for a Transformers rotary module: cos and sin at the full rotary width.

    Transformers' own ``dynamic`` remembers the longest input seen; this one does not.
    """

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B, T, rotary width), in the dtype of the hidden states."""
        cos, sin = super().forward(hidden_states, position_ids)
        dtype = hidden_states.dtype
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


def set_rotary_scaling(
    model: PreTrainedModel,
    kind: ScalingKind,
    *,
    factor: float = 1.0,
    length: int | None = None,
) -> None:
    """Change how a model's rotary angles are scaled, in place and for good until the next call.

    Works on CoCA models and on Transformers' rotary models with half-split pairs, so that both
    are compared by the same code. The configuration says what was set.

    Args:
        model: A loaded model.
        kind: ``none``, ``linear`` (position interpolation), ``ntk`` (base fixed from the target
            length), ``dynamic`` (base follows the length of each forward pass; exact for a full
            pass, inexact while decoding with a cache) or ``yarn``.
        factor: Scaling factor, at least 1.
        length: ``ntk``: target length in tokens; without it the base is multiplied by
            ``factor ** (D / (D - 2))``.

    Raises:
        UserError: If the model has no rotary embedding, one of an unknown kind, or a value is
            out of range.
    """
    config = model.config.get_text_config()
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CoCARotary) or hasattr(module, "original_inv_freq")
    }
    if not modules:
        raise UserError(
            f"a model of type {config.model_type!r} has no rotary embedding to scale; evaluate it "
            "with scaling none"
        )
    rope = dict(config.rope_parameters or {})
    current = rope.get("rope_type", "default")
    if current not in ROPE_TYPES:
        raise UserError(
            f"this model's rotary embedding is already scaled or of another kind ({current!r} in "
            f"its configuration); supported are {', '.join(ROPE_TYPES)}"
        )
    native = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
    if kind not in native:
        raise UserError(f"unknown rotary scaling {kind!r}; choose one of {', '.join(native)}")
    trained = training_length(config)
    if length is not None and trained is not None and length < trained:
        raise UserError(
            f"the target length ({length} tokens) is shorter than the training length ({trained})"
        )
    kept = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    changed: dict[str, Any] = {name: value for name, value in rope.items() if name in kept}
    changed["rope_type"] = native[kind]
    if kind != "none":
        changed["factor"] = float(factor)
    if kind == "ntk" and length is not None:
        changed["length"] = length
    replacements = {
        name: _stateless(module, config)
        for name, module in modules.items()
        if not isinstance(module, CoCARotary)
    }
    config.rope_parameters = changed
    try:
        # The rule is built, and so checked, before the model sees it.
        CoCARotary(config)(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))
    except ValueError as error:
        config.rope_parameters = rope
        raise UserError(str(error)) from error
    for name, replacement in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)


def _stateless(module: Any, config: Any) -> VanillaRotary:
    """Our rotary in place of a Transformers one, after checking that they agree unscaled."""
    replacement = VanillaRotary(config)
    device = module.inv_freq.device
    positions = torch.arange(8, device=device).unsqueeze(0)
    probe = torch.zeros(1, device=device, dtype=torch.float32)
    try:
        theirs = module(probe, positions)
        ours = replacement(probe, positions)
        agree = all(
            a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
            for a, b in zip(theirs, ours, strict=True)
        )
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        agree = False
    if not agree:
        raise UserError(
            f"the rotary embedding {type(module).__name__} is of a kind whose scaling is not "
            "supported (supported: one set of frequencies, pairs j and j + D/2)"
        )
    return replacement
