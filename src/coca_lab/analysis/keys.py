"""The key that a query sees before rotation, for individual (query, key) pairs of tokens.

Legend: H query heads, G key/value heads, T length, N pairs of tokens, P rotated pairs, D head
width, m a query's position, n a key's.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coca_attention.ops import get_form
from coca_lab.analysis.angles import complex_pairs
from coca_lab.analysis.capture import VANILLA, LayerHeads


class TokenPairs(NamedTuple):
    """Indices of queries and keys in a text, each (N,), int64, with m > n."""

    queries: Tensor
    keys: Tensor

    @property
    def distances(self) -> Tensor:
        """m - n, (N,)."""
        return self.queries - self.keys


class SeenKeys(NamedTuple):
    """Queries and the keys that they see, before rotation; each (H, N, C), complex128.

    C is the number of rotated pairs that are not free.

    Attributes:
        query: q_m.
        built: k_n; in a CoCA model the key collinear with q_m that gives its score at m = n = 0,
            q_m * t_n in the paper's forms (Eq. 7).
        effective: The key at position 0 that, rotated to n, gives the model's score. Equal to
            ``built`` in shift-invariant forms, but not in the slack form, whose key at n is
            q_m * R_n [t_n, t_n] (Eq. 10) and not R_n (q_m * t_n).
    """

    query: Tensor
    built: Tensor
    effective: Tensor


def draw_pairs(length: int, count: int, window: int | None, rng: np.random.Generator) -> TokenPairs:
    """Draw pairs with replacement, uniformly from the causal pairs of a text inside the window.

    Args:
        length: Tokens of the text, T, at least 2.
        count: Number of pairs.
        window: Sliding window of the layer in tokens, including the query's own; None for all.
        rng: Random number generator.
    """
    distances = np.arange(1, min(length, window or length))
    if not len(distances):  # in a window of one token, a token sees only itself
        return TokenPairs(*torch.zeros(2, 0, dtype=torch.long))
    probabilities = (length - distances) / (length - distances).sum()
    distance = rng.choice(distances, size=count, p=probabilities)
    keys = rng.integers(length - distance)
    return TokenPairs(torch.from_numpy(keys + distance), torch.from_numpy(keys))


def pairs_by_distance(
    length: int, count: int, window: int | None, rng: np.random.Generator
) -> TokenPairs:
    """Draw ``count`` pairs at each of the distances 1, 2, 4, … in a text and a window."""
    distances = []
    distance = 1
    while distance < min(length, window or length):
        distances.append(distance)
        distance *= 2
    repeated = np.repeat(np.array(distances, dtype=np.int64), count)
    keys = rng.integers(length - repeated) if len(repeated) else repeated
    return TokenPairs(torch.from_numpy(keys + repeated), torch.from_numpy(keys))


def query_parts(heads: LayerHeads, query: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of the effective query Q' = A cos mθ + B sin mθ, each (H, N, 2, C), float64.

    Args:
        heads: A layer of a CoCA model.
        query: Collinear pairs of queries before rotation, (H, N, C), complex128.
    """
    one, zero = torch.ones_like(query.real), torch.zeros_like(query.real)
    learned = {n: x.double().unsqueeze(1) for n, x in (heads.parameters or {}).items()}
    cosine, sine = (
        get_form(heads.form).query(query.real, query.imag, cos, sin, **learned)
        for cos, sin in ((one, zero), (zero, one))
    )
    return cosine, sine


def seen_keys(heads: LayerHeads, pairs: TokenPairs) -> SeenKeys:
    """Queries of a layer and the keys they see, in float64.

    Args:
        heads: A layer's queries and keys of one text (B = 1).
        pairs: Pairs of tokens; their positions are their indices.
    """
    query = complex_pairs(heads.query[0, :, pairs.queries], heads.rotary_width, heads.interleaved)
    key = heads.key[0, :, pairs.keys]
    key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    if heads.form == VANILLA:
        key = complex_pairs(key, heads.rotary_width, heads.interleaved)
        return SeenKeys(query, key, key)
    collinear = len(heads.theta)
    query, coefficients = query[..., :collinear], key[..., :collinear].double()
    size = query.abs().square()

    def over_size(x: Tensor) -> Tensor:
        return torch.where(size == 0, 0, x / size)

    # Q' = A cos mθ + B sin mθ in every form, and K' = t (cos nθ, sin nθ): the score as a function
    # of m is the real part of z e^{imθ} with z = A · K' - i B · K'.
    a, b = query_parts(heads, query)
    built = query * over_size(coefficients * a.select(-2, 0))
    if get_form(heads.form).shift_invariant:
        return SeenKeys(query, built, built)
    angles = pairs.keys.double().unsqueeze(-1) * heads.theta
    key = coefficients.unsqueeze(-2) * torch.stack((angles.cos(), angles.sin()), dim=-2)
    z = torch.complex((a * key).sum(-2), -(b * key).sum(-2))
    rotated_back = z * torch.polar(torch.ones_like(angles), angles)
    return SeenKeys(query, built, query * over_size(rotated_back.conj()))
