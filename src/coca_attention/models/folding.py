"""A temperature for longer texts, folded into the queries of layers that have no positions."""

import copy

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.configuration import (
    GLOBAL,
    layer_types,
    rope_parameters,
    without_positions,
)


def position_free_queries(model: PreTrainedModel) -> list[nn.Module]:
    """The modules whose weights scale the queries of layers that see the whole text, unrotated.

    That is the query projection, or a norm of queries after it.

    Raises:
        UserError: If there is no such layer, if its queries are not a module of their own or are
            normalised without a weight, or if the model has a temperature already.
    """
    config: PreTrainedConfig = model.config.get_text_config()
    free = without_positions(config)
    kinds = layer_types(config)
    if not any(free):
        raise UserError(
            f"a temperature is for layers without positions that see the whole text, and a "
            f"model of type {config.model_type!r} has none"
        )
    if rope_parameters(config).get("temperature") is not None or getattr(
        config, "attn_temperature_tuning", None
    ):
        raise UserError("the model has a temperature, which grows with the text: fold none")
    layers: nn.ModuleList = model.base_model.layers  # pyright: ignore[reportAssignmentType]
    queries = []
    for layer, kind, is_free in zip(layers, kinds, free, strict=True):
        if not is_free or kind != GLOBAL:  # a window holds no more keys in longer texts
            continue
        modules = dict(layer.named_modules())
        found = [each for path, each in modules.items() if path.endswith(".q_proj")]
        norms = [each for path, each in modules.items() if path.endswith((".q_norm", ".qk_norm"))]
        scales = len(found) == 1 and len(norms) <= 1
        if not scales or not all(map(_is_linear_in_weights, norms)):
            raise UserError(
                f"{type(model).__name__} has no query projection, or norm of queries, whose "
                "weights scale the scores, so no temperature can be folded into it"
            )
        queries += norms or found
    if not queries:
        raise UserError("all layers without positions see a window: a temperature changes nothing")
    return queries


def _is_linear_in_weights(norm: nn.Module) -> bool:
    """Whether doubling the weights of a norm doubles what it returns (not so in Gemma: 1 + w)."""
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    weights = [*probe.parameters()]
    if not weights:
        return False
    x = torch.linspace(-1.0, 2.0, weights[0].shape[-1]).expand_as(weights[0])
    outputs = []
    with torch.no_grad():
        for value in (0.5, 1.0):
            for weight in weights:
                weight.fill_(value)
            outputs.append(probe(x))
    return torch.equal(2 * outputs[0], outputs[1])


@torch.no_grad()
def fold_temperature(queries: list[nn.Module], factor: float) -> None:
    """Multiply the scores of layers by a factor, ln(T + 1) / ln(L + 1), in the weights.

    A softmax over T keys instead of the L of training is flatter; log n scaling (Su, 2021; Chiang
    and Cholak, 2022) undoes that. For one context T it is a change of weights, which every engine
    computes. The weights are replaced, and not written into.

    Args:
        queries: As `position_free_queries` finds them.
        factor: The factor.
    """
    for module in queries:
        for name, weight in list(module.named_parameters(recurse=False)):
            scaled = nn.Parameter(weight * factor, requires_grad=weight.requires_grad)
            setattr(module, name, scaled)
