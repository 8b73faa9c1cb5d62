"""What the scripts share: a model with its texts, and the queries and keys of its layers.

Legend: H query heads, G key/value heads, T length, N pairs of tokens, P rotary pairs, F free pairs,
D head width, m a query's position, n a key's, θ_j the angle of pair j per token.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models.attention import CollinearAttention
from coca_attention.models.configuration import (
    attention_of,
    head_width,
    made_for,
    rotation,
    window_of,
)
from coca_attention.models.families import family_of
from coca_attention.ops import Rotation, get_form, key_map, query_map
from coca_attention.ops.positions import split_pairs
from coca_lab.data import load_tokenizer
from coca_lab.evaluation.perplexity import TextSettings, load_text
from coca_lab.loading import load_model

DEFAULT_TOKENS = 2048
TURN = 2 * math.pi
SNAP = 1e-9
"""Angles this near to a full turn, in radians, count as 0: they are round-off."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """The arguments that every script takes; ``about`` is its docstring."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("model", metavar="MODEL", help="folder or name of a model on the Hub")
    made.add_argument("--source", required=True, help="text, with the values of data.source")
    made.add_argument("--documents", type=int, default=8, help="how many to read (8)")
    made.add_argument("--tokens", type=int, help="of a document; the training length, up to 2,048")
    made.add_argument("--lengths", type=int, nargs="+", help="of texts to count for, in tokens")
    made.add_argument("--pairs", type=int, default=1024, help="of tokens a document (1,024)")
    made.add_argument("--seed", type=int, default=0, help="random seed of what is sampled (0)")
    return made


def read(options: argparse.Namespace) -> tuple[PreTrainedModel, list[Tensor], list[int]]:
    """The model, its texts as token ids (T,), and the lengths to count for.

    By default the lengths are 1, 4 and 16 times the training length.

    Raises:
        UserError: If the model or a text cannot be read.
    """
    model = rotary_as_free_pairs(load_model(options.model))
    trained = made_for(model.config.get_text_config())[0] or DEFAULT_TOKENS
    text = TextSettings(source=options.source, skip_short=True)
    text.max_documents = options.documents
    text.max_tokens = options.tokens or min(trained, DEFAULT_TOKENS)
    documents = load_text(text, load_tokenizer(options.model), at_least=2)
    lengths = options.lengths or [trained, 4 * trained, 16 * trained]
    return model, [document.tokens for document in documents], sorted(lengths)


def rotary_as_free_pairs(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a vanilla one as a CoCA model all of whose pairs are free.

    Such a model computes the same, and its layers project queries and keys like those of all
    others here.
    """
    collinear = isinstance(model, family_of(model).causal_lm)
    if collinear:
        return model
    return convert(model, "strict", free_pairs=head_width(model.config.get_text_config()) // 2)


@dataclass(frozen=True)
class Layer:
    """Queries and keys of an attention layer for one text, before rotation, on the CPU."""

    index: int
    form: str
    """Name of the score form; ``rope`` where all pairs are free."""
    query: Tensor
    """q, (1, H, T, D), float64."""
    key: Tensor
    """Coefficients of the collinear pairs and keys of the free ones, (1, G, T, P + F), float64."""
    rotation: Rotation
    parameters: dict[str, Tensor] | None
    """Learned parameters of the score form."""
    interleaved: bool
    """Pair layout of q, see `split_pairs`."""
    window: int | None
    """Sliding window in tokens, including the query's own; None for all."""
    scale: float
    """Scale of the scores before the softmax."""

    @property
    def free_pairs(self) -> int:
        """F."""
        return self.key.shape[-1] - self.query.shape[-1] // 2

    @property
    def theta(self) -> Tensor:
        """θ of the pairs that are looked at, (P,): the collinear ones, or all of rotary layers."""
        frequencies = self.rotation.frequencies()
        if self.form == "rope":
            return frequencies
        return frequencies[: self.query.shape[-1] // 2 - self.free_pairs]

    def farthest(self, length: int) -> int:
        """Largest distance in a text of ``length`` tokens."""
        return min(length, self.window or length) - 1


def read_layers(model: PreTrainedModel, document: Tensor) -> tuple[list[Layer], Tensor]:
    """The layers whose pairs turn, for a text (T,), and the model's logits (T, vocabulary).

    Args:
        model: A model of `rotary_as_free_pairs`, in evaluation mode.
        document: Token ids.

    Raises:
        UserError: If queries or keys are not finite, or distances in the text count as others.
    """
    found: list[Layer] = []

    def hook(index: int, attention: CollinearAttention, args: Any, kwargs: Any) -> None:
        layer = _layer_of(index, attention, args[0] if args else kwargs["hidden_states"])
        if layer.theta.any():
            found.append(layer)

    body: Any = model.base_model
    handles = [
        attention.register_forward_pre_hook(partial(hook, index), with_kwargs=True)
        for index, attention in enumerate(family_of(model).layout.modules(body))
    ]
    try:
        with torch.no_grad():
            logits = model(input_ids=document[None].to(model.device), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise UserError("no layer has pairs that turn, so there are no angles")
    return found, logits.cpu().double()


def _layer_of(index: int, attention: Any, hidden: Tensor) -> Layer:
    """The queries and keys of one attention module, from the hidden states that enter it."""
    query, key, _ = attention.project(hidden)
    query = query.cpu().double()
    key = key.cpu().double()
    if not (query.isfinite().all() and key.isfinite().all()):
        raise UserError(
            f"layer {index}: queries or keys are not finite; the model's weights are damaged, or "
            "its dtype overflows (try float32)"
        )
    length = query.shape[-2]
    config = attention.config
    turns = rotation(config, getattr(attention, "layer_type", None))
    if turns.follows_length:
        turns = turns.for_length(length)
    if turns.distance_map is not None and length > turns.distance_map.near:
        raise UserError(
            f"distances of {turns.distance_map.near:,} tokens and more count as others in this "
            "model (distance_map), which figures by distance do not follow: read shorter texts "
            "(--tokens)"
        )
    learned = getattr(attention, "form_parameters", None)
    rotary = attention_of(config) == "rope" or key.shape[-1] == query.shape[-1]
    return Layer(
        index=index,
        form="rope" if rotary else config.coca_form,
        query=query,
        key=key,
        rotation=turns,
        parameters=learned and {name: x.detach().cpu() for name, x in learned.items()},
        interleaved=attention.layout.interleaved,
        window=getattr(attention, "sliding_window", window_of(config)),
        scale=float(attention.scaling),
    )


# Pairs of a query and a key that it sees


def sampled(
    model: PreTrainedModel, documents: list[Tensor], options: argparse.Namespace
) -> Iterator[tuple[Layer, Tensor]]:
    """Every layer of every document with the coefficients h_j of ``--pairs`` pairs of tokens."""
    for number, document in enumerate(documents):
        for layer in read_layers(model, document)[0]:
            generator = np.random.default_rng([options.seed, number, layer.index])
            queries, keys = pairs_of_text(layer, options.pairs, generator)
            yield layer, score_coefficients(layer, queries, keys)[0]


def pairs_of_text(
    layer: Layer, count: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Places of queries and keys, (count,) each: drawn uniformly from all m > n in the window."""
    length = layer.query.shape[-2]
    distances = np.arange(1, layer.farthest(length) + 1)
    if len(distances):  # in a window of one token, a token sees only itself
        weights = length - distances
        distances = generator.choice(distances, size=count, p=weights / weights.sum())
    return pairs_at(distances, length, generator)


def pairs_at(
    distances: np.ndarray, length: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Places of queries and keys at these distances, at random places of a text."""
    keys = generator.integers(length - distances)
    return torch.from_numpy(keys + distances), torch.from_numpy(keys)


def relative_parts(layer: Layer, query: Tensor) -> tuple[Tensor, Tensor]:
    """U and V, (H, N, P), of the score Re Σ_j t_j (U_j e^{-i(m-n)θ_j} + V_j e^{-i(m+n)θ_j}).

    ``query`` is complex, (H, N, P). Only V depends on more than the distance.
    """
    # In every form Q' = A cos mθ + B sin mθ and K' = t (cos nθ, sin nθ); A and B are (H, N, 2, P).
    one = torch.ones_like(query.real)
    zero = torch.zeros_like(query.real)
    learned = {n: x.double().unsqueeze(1) for n, x in (layer.parameters or {}).items()}
    form_query = get_form(layer.form).query
    a0, a1 = form_query(query.real, query.imag, one, zero, **learned).unbind(-2)
    b0, b1 = form_query(query.real, query.imag, zero, one, **learned).unbind(-2)
    return torch.complex(a0 + b1, b0 - a1) / 2, torch.complex(a0 - b1, a1 + b0) / 2


def seen(layer: Layer, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Queries at places (N,) and the keys or coefficients at others, each (H, N, P).

    Queries are complex; so are the keys of rotary layers. Coefficients are real.
    """
    width = layer.rotation.width
    query = torch.complex(*split_pairs(layer.query[0][:, queries, :width], layer.interleaved))
    key = layer.key[0][:, keys].repeat_interleave(len(query) // layer.key.shape[1], dim=0)
    pairs = len(layer.theta)
    if layer.form == "rope":
        first, second = key.chunk(2, dim=-1)
        return query, torch.complex(first[..., :pairs], second[..., :pairs])
    return query[..., :pairs], key[..., :pairs]


def score_coefficients(layer: Layer, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """h_j of the score Re Σ_j h_j e^{i(m-n)θ_j} (Eq. 2) and l_j of Eq. 20, (H, N, P).

    h_j is q_j k_j^*. In a CoCA model, k_j is the key at position 0 that, rotated to n, gives the
    model's score: q_j t_j (Eq. 7), and another one in the slack form, whose key at n is
    q_m * R_n [t_n, t_n] (Eq. 10) and not R_n (q_m * t_n). l_j is |q_j k_j| for n = 0.
    """
    query, key = seen(layer, queries, keys)
    if layer.form == "rope":
        product = query * key.conj()
        return product, product.abs()
    relative, absolute = relative_parts(layer, query)
    turned = torch.polar(torch.ones_like(key), -2 * keys.double()[:, None] * layer.theta)
    return key * (relative + absolute * turned).conj(), (key * (relative + absolute).real).abs()


def initial_angles(coefficients: Tensor) -> Tensor:
    """Θ_j of section 2.2: from k_j to q_j in [0, 2π); meaningless where h_j is 0."""
    angles = torch.remainder(coefficients.angle(), TURN)
    return angles.masked_fill((angles < SNAP) | (angles > TURN - SNAP), 0.0)


def score_rows(layer: Layer, queries: Tensor, shift: int = 0) -> Tensor:
    """Scaled scores (H, N, T) of queries (N,) against every key, with all positions shifted."""
    positions = torch.arange(layer.key.shape[-2]) + shift
    cos, sin = layer.rotation.tables(positions, torch.float64)
    query = query_map(
        layer.query[:, :, queries],
        cos[queries],
        sin[queries],
        form="strict" if layer.form == "rope" else layer.form,  # of no pair if all are free
        factor=layer.rotation.query_factor(positions[queries], torch.float64, layer.window),
        interleaved=layer.interleaved,
        free_pairs=layer.free_pairs,
        parameters=layer.parameters,
    )
    key = key_map(layer.key, cos, sin, free_pairs=layer.free_pairs)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ key.transpose(-2, -1) * layer.scale)[0]
    if layer.rotation.bias is not None:
        scores = scores + layer.rotation.bias(positions[queries], positions, torch.float64)
    return scores
