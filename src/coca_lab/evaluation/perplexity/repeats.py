"""Targets that can be copied, but only from text that a short context does not hold."""

import torch
from torch import Tensor


def distant_repeats(tokens: Tensor, n: int, beyond: int) -> Tensor:
    """Which tokens end an n-gram that stands earlier in the document, but only far back.

    Args:
        tokens: (length,), int64.
        n: Length of the n-gram, the token itself included.
        beyond: The latest earlier n-gram ends more than this many tokens before the token.

    Returns:
        (length,), bool.
    """
    ids, last = tokens.tolist(), {}
    found = torch.zeros(len(ids), dtype=torch.bool)
    for index in range(n - 1, len(ids)):
        gram = tuple(ids[index - n + 1 : index + 1])
        found[index] = index - last.get(gram, index) > beyond
        last[gram] = index
    return found
