"""A temperature for a longer context, folded into the queries of layers that see the whole text."""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.configuration import GLOBAL, layer_types, rope_parameters


def global_queries(model: PreTrainedModel) -> list[nn.Module]:
    """The query projections of the layers that see the whole text.

    Raises:
        UserError: If there is no such layer beside local ones, if its queries are not a module of
            their own or are normalised afterwards, or if the model has a temperature already.
    """
    config: PreTrainedConfig = model.config.get_text_config()
    layers: nn.ModuleList = model.base_model.layers  # pyright: ignore[reportAssignmentType]
    queries = []
    for layer, kind in zip(layers, layer_types(config), strict=True):
        if kind == GLOBAL:
            modules = dict(layer.named_modules())
            found = [each for name, each in modules.items() if name.endswith(".q_proj")]
            if len(found) != 1 or any(name.endswith(".q_norm") for name in modules):
                raise UserError(
                    f"{type(model).__name__} has no query projection whose scale is that of the "
                    "scores, so no temperature can be folded into it"
                )
            queries += found
    if not 0 < len(queries) < len(layers):
        raise UserError(
            "a temperature is folded into global layers beside local ones (model.layers: llg)"
        )
    if rope_parameters(config).get("temperature") is not None:
        raise UserError("the model has a temperature, which grows with the text: fold none")
    return queries


@torch.no_grad()
def fold_temperature(model: PreTrainedModel, context: int) -> float:
    """Multiply the scores of global layers by ln(N + 1) / ln(L + 1), in the weights.

    A softmax over N keys instead of the L of training is flatter; log n scaling (Su, 2021; Chiang
    and Cholak, 2022) undoes that. For one context N it is a change of weights, which every engine
    computes.

    Args:
        model: A model with global layers beside local ones, changed in place.
        context: N in tokens, at least the model's ``max_position_embeddings`` L.

    Returns:
        The factor.

    Raises:
        UserError: If the context is shorter, or as `global_queries`.
    """
    length: int = model.config.get_text_config().max_position_embeddings
    if context < length:
        raise UserError(f"context must be at least the training length, {length}; got {context}")
    factor = math.log(context + 1) / math.log(length + 1)
    for query in global_queries(model):
        for weight in query.parameters():
            weight.mul_(factor)
    return factor
