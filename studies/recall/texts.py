"""Texts of associative recall with many queries (MQAR; Zoology, arXiv 2312.04927).

A text is random tokens: it begins with pairs of a key and a value, and asks for every key once
more, at places spread evenly over the rest; the token after a query is its value. Zoology's default
crowds queries behind the pairs (its ``power_a`` 0.01), which flatters attention that decays; here
every place is as likely (1.0).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.tasks import Block, Blocks
from coca_lab.data.text import end_of_text

FEWEST_PAIRS, MOST_PAIRS = 4, 32
"""Pairs of a training text."""


@dataclass(frozen=True)
class RecallText:
    """A text, the places of the values that follow a query, and how far they are from the pairs."""

    ids: np.ndarray  # (length,), int64
    answers: np.ndarray  # (pairs,), in the order of the text
    distances: np.ndarray  # (pairs,)


def recall_text(
    vocabulary: Sequence[int] | np.ndarray, pairs: int, length: int, generator: np.random.Generator
) -> RecallText:
    """A text of exactly ``length`` tokens that asks for every pair once."""
    # Keys are drawn from the first half of the vocabulary, without repetition, values from the
    # second; other tokens from all but the keys of the text.
    half = len(vocabulary) // 2
    if pairs < 1 or length < 4 * pairs or half < pairs:
        raise UserError(
            f"a recall text with {pairs} pairs needs at least {max(4 * pairs, 4)} tokens and a "
            f"vocabulary of {2 * max(pairs, 1)}; got {length} and {len(vocabulary)}"
        )
    vocabulary = np.asarray(vocabulary, dtype=np.int64)
    keys = generator.choice(half, pairs, replace=False)
    values = generator.integers(half, len(vocabulary), pairs)
    others = np.delete(np.arange(len(vocabulary)), keys)
    ids = others[generator.integers(len(others), size=length)]
    ids[0 : 2 * pairs : 2] = keys
    ids[1 : 2 * pairs : 2] = values
    # Where the query of every pair stands, in steps of two tokens from the end of the text.
    places = length - 2 - 2 * generator.choice((length - 2 * pairs) // 2, pairs, replace=False)
    ids[places] = keys
    ids[places + 1] = values
    order = np.argsort(places)
    answers = places[order] + 1
    return RecallText(vocabulary[ids], answers, answers - (2 * order + 1))


def recall_block(
    vocabulary: Sequence[int] | np.ndarray, end: int, length: int, seed: Sequence[int]
) -> Block:
    """Recall texts of random lengths and loads, of which the answers alone are trained."""
    generator = np.random.default_rng(list(seed))
    block = np.full(length, end, dtype=np.int64)
    is_answer = np.zeros(length, dtype=bool)
    start = 0
    shortest = 4 * FEWEST_PAIRS
    if length < shortest:
        raise UserError(
            f"a recall text takes at least {shortest} tokens, and a block has {length}: choose a "
            f"`block_length` of at least {shortest}"
        )
    while length - start >= shortest:
        size = int(generator.integers(shortest, length - start + 1))
        pairs = int(generator.integers(FEWEST_PAIRS, min(MOST_PAIRS, size // 4) + 1))
        text = recall_text(vocabulary, pairs, size, generator)
        block[start : start + size] = text.ids
        is_answer[start + text.answers] = True
        start += size + 1
    return Block(block, is_answer)


def recall_blocks(tokenizer: PreTrainedTokenizerBase) -> Blocks:
    """Blocks to train on."""
    vocabulary = recall_vocabulary(tokenizer)
    end = end_of_text(tokenizer)
    return lambda length, seed: recall_block(vocabulary, end, length, seed)


def recall_vocabulary(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of recall texts: all but the special ones."""
    special = set(tokenizer.all_special_ids)
    return [index for index in range(len(tokenizer)) if index not in special]
