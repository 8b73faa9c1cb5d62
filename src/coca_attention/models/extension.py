"""Reading texts longer than a rotary model was made for, without training."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from transformers import PreTrainedConfig, PreTrainedModel

from coca_attention.errors import UserError, did_you_mean
from coca_attention.models.configuration import (
    GLOBAL,
    check_is_computed,
    rope_parameters,
    rotation,
    training_length,
)
from coca_attention.models.conversion import convert, forget_gguf
from coca_attention.models.scaling import rotary_restored, set_rotary_scaling
from coca_attention.ops import NTK
from coca_attention.ops.checks import check_whole

Method = Literal["limited", "yarn", "dynamic", "ntk", "leaky"]
METHODS: tuple[Method, ...] = get_args(Method)
LIMITING: tuple[Method, ...] = ("limited", "leaky")
"""The methods that limit distances, by this package's attention."""


def extend_context(
    model: PreTrainedModel,
    method: Method = "limited",
    *,
    to: int | None = None,
    length: int | None = None,
    max_distance: int | None = None,
) -> PreTrainedModel:
    """Let a rotary model read longer texts than it was made for, in place and without training.

    Which method is best depends on the model: ``coca extend MODEL TARGET --check TEXT`` measures
    them. With ``yarn``, ``dynamic`` and ``ntk`` the model stays of its Transformers class, and what
    `save_pretrained` writes loads without this package.

    Args:
        model: A loaded model of a supported family, with rotary positions as in training.
        method: ``limited``: keys farther back than ``max_distance`` tokens are scored as if they
            were that far back, which changes nothing in texts of up to as many tokens (ReRoPE with
            log n scaling). ``leaky``: beyond L / 2 distances grow so slowly that none reaches L
            (Leaky ReRoPE, Su 2023; Self-Extend, arXiv 2401.01325, rounds them), in short texts as
            well. ``yarn`` (arXiv 2309.00071) and ``ntk`` (bloc97, 2023: a larger base) stretch slow
            rotations by ``to / length``, in short texts as well. ``dynamic`` (emozilla, 2023) is
            ntk with the base of the current text.
        to: The longest text in tokens that the model is to read; by default 4 L.
        length: L, the length in tokens that the model was made for; by default what its
            configuration says.
        max_distance: W, for ``limited``; by default L.

    Returns:
        The same model. Its ``max_position_embeddings`` is ``to``; with ``dynamic`` it stays L, from
        which Transformers computes the base.

    Raises:
        UserError: If the method is unknown or not for this model, or a length out of range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        ...     max_position_embeddings=128,
        ... )
        >>> model = extend_context(LlamaForCausalLM(config), "yarn", to=512)
        >>> model.config.rope_parameters["factor"], model.config.max_position_embeddings
        (4.0, 512)
    """
    length, to = extended_lengths(model.config, to, length)
    if method not in METHODS:
        hint = did_you_mean(method, METHODS)
        raise UserError(f"method must be one of {', '.join(METHODS)}, got {method!r}{hint}")
    if method != "limited" and max_distance is not None:
        raise UserError(f"max_distance is for method limited: leave it out with {method}")
    if method not in LIMITING:
        forget_gguf(model)
        _set_rule(model, method, length, to)
        return model
    if method == "leaky":
        _check_leak(model.config.get_text_config(), length, to)
        max_distance = _leaky_from(length)
    convert(model, "rope", length=length, max_distance=max_distance)
    config: PreTrainedConfig = model.config.get_text_config()
    limit_distances(config, method, length, to, max_distance)
    # These rules compute from it what they do.
    if rope_parameters(config).get("rope_type") not in ("dynamic", "longrope"):
        config.max_position_embeddings = to
    return model


def limit_distances(
    config: PreTrainedConfig, method: Method, length: int, to: int, max_distance: int | None = None
) -> None:
    """Set the limits of a method of `LIMITING` in a configuration with limited distances."""
    rope = rope_parameters(config)
    for name in ("temperature", "max_distance", "leak"):
        rope.pop(name, None)
    if method == "leaky":
        near = _leaky_from(length)
        rope |= {"max_distance": near, "leak": (length - near) / (to - near)}
    else:
        rope |= {"temperature": length, "max_distance": max_distance or length}


def _leaky_from(length: int) -> int:
    """W of method leaky."""
    return max(1, length // 2)


def _check_leak(config: PreTrainedConfig, length: int, to: int) -> None:
    """Raise UserError if the frequencies of a vanilla model depend on the length of a text."""
    config = copy.deepcopy(config)
    try:
        limit_distances(config, "leaky", length, to)
        rotation(config, GLOBAL)
    except ValueError as error:
        raise UserError(f"method leaky: {error}: choose limited") from error


def extended_lengths(
    config: PreTrainedConfig, to: int | None, length: int | None
) -> tuple[int, int]:
    """L and the longest text to read, in tokens, with their defaults; UserError out of range."""
    check_is_computed(config)
    length = length or training_length(config.get_text_config())
    if length is None:
        raise UserError(f"{config.model_type} does not say how long its training texts were")
    to = 4 * length if to is None else to
    check_whole("to, the tokens to read,", to, length + 1, error=UserError)
    return length, to


@contextmanager
def extended(model: PreTrainedModel, method: Method, *, length: int, to: int) -> Iterator[None]:
    """Within the ``with`` block, the model extended by a method that is not of `LIMITING`."""
    with rotary_restored(model):
        _set_rule(model, method, length, to)
        yield


def _set_rule(model: PreTrainedModel, method: Method, length: int, to: int) -> None:
    """Set a rotary rule that Transformers knows, for texts of up to ``to`` tokens."""
    config: PreTrainedConfig = model.config.get_text_config()
    present = rope_parameters(config).get("rope_type", "default")
    if present != "default":
        raise UserError(
            f"method {method} would replace the {present} scaling that the model was trained with: "
            "choose limited"
        )
    before, longest, factor = config.rope_parameters, config.max_position_embeddings, to / length
    if method == "ntk":
        set_rotary_scaling(model, "none")
        rope, rotary = rope_parameters(config), rotation(config, GLOBAL)
        rope["rope_theta"] = NTK(factor=factor).scaled_base(rotary.width, rotary.base)
    else:
        set_rotary_scaling(model, method, factor=factor)
        if method == "yarn":
            rope_parameters(config)["original_max_position_embeddings"] = length
    config.max_position_embeddings = length if method == "dynamic" else to
    try:
        type(config).from_dict(config.to_dict())
    except Exception as error:  # whatever a family checks (Phi-3 takes only longrope)
        config.rope_parameters, config.max_position_embeddings = before, longest
        raise UserError(f"{config.model_type} cannot be saved with {method}: {error}") from error
