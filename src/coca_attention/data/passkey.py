"""The passkey text (CoCA paper, App. B.1, Listing 1) as token ids of an exact length: pure.

A key of five digits stands somewhere in a repeated filler; the question comes last. Training and
evaluation share this: recipes mix such texts in, the passkey task asks them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from coca_attention.errors import UserError

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
KEY_LINE = "The passkey is {key}. Remeber it. {key} is the passkey.\n"  # spelt as in the paper
QUESTION = "What is the passkey?"
ANSWER = " The passkey is {key}."

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class HaystackText:
    """Token ids of exactly the length asked for, and where in it the needle stands.

    Attributes:
        ids: Token ids.
        depth: Share of the filler that stands before the needle, 0 to 1.
        distance: Tokens from the end of the needle to the end of the text.
    """

    ids: list[int]
    depth: float
    distance: int


def encoder(tokenizer: Any) -> Encode:
    """Text to token ids without special tokens; what repeats is encoded once."""

    @lru_cache(maxsize=64)
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text, such as a beginning-of-sequence token."""
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(ids)):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []


def fill(
    before: Sequence[int],
    filler: Sequence[int],
    needles: Sequence[Sequence[int]],
    depths: Sequence[float],
    after: Sequence[int],
    length: int,
) -> tuple[list[int], list[float], list[int]]:
    """Exactly ``length`` tokens: a beginning, needles spread in repeated filler, an end.

    Needles stand between whole repetitions of the filler. What is left over is filled with the end
    of one more repetition, right after the beginning.

    Args:
        before: Tokens at the beginning.
        filler: One repetition.
        needles: Tokens of every needle.
        depths: Of every needle, the share of repetitions that stand before it.
        after: Tokens at the end.
        length: Tokens in all.

    Returns:
        The tokens; and of every needle its depth as reached, and the tokens behind it.

    Raises:
        UserError: If the length is less than needed without any filler.
    """
    needed = len(before) + sum(map(len, needles)) + len(after)
    if length < needed:
        raise UserError(
            f"a text of {length} tokens is too short: without any filler it needs {needed} with "
            f"this tokenizer; choose a length of at least {needed}"
        )
    repeats, rest = divmod(length - needed, len(filler))
    places = [round(depth * repeats) for depth in depths]
    ids = [*before, *(filler[len(filler) - rest :] if rest else [])]
    ends = [0] * len(needles)
    for place in range(repeats + 1):
        for index in range(len(needles)):
            if places[index] == place:
                ids += needles[index]
                ends[index] = len(ids)
        if place < repeats:
            ids += filler
    ids += after
    assert len(ids) == length
    reached = [place / repeats if repeats else 0.0 for place in places]
    return ids, reached, [length - end for end in ends]


def passkey_text(
    encode: Encode, key: int, length: int | None, depth: float, *, before: Sequence[int] = ()
) -> HaystackText:
    """Listing 1 up to the question, as exactly ``length`` tokens.

    Args:
        encode: Text to token ids.
        key: Five digits.
        length: Tokens in all; None for no filler at all.
        depth: Share of the filler before the key, 0 to 1.
        before: Special tokens at the very beginning; they count.

    Raises:
        UserError: If the length is too short; the message has the shortest that works.
    """
    beginning, line = [*before, *encode(INTRODUCTION)], encode(KEY_LINE.format(key=key))
    question = encode(QUESTION)
    if length is None:
        length = len(beginning) + len(line) + len(question)
    ids, depths, distances = fill(beginning, encode(FILLER), [line], [depth], question, length)
    return HaystackText(ids, depths[0], distances[0])


def vocabulary_text() -> str:
    """What a tokenizer has to see so that these texts cost it few tokens."""
    line = KEY_LINE.format(key=1234567890)
    return (INTRODUCTION + FILLER + line + QUESTION + ANSWER.format(key=1234567890) + "\n") * 1000


def passkey_block(encode: Encode, end: int, length: int, seed: Sequence[int]) -> np.ndarray:
    """A block to train on: passkey texts with their answers, one after the other.

    Lengths, keys and depths are drawn, so that question and answer stand at any position: a model
    whose attention answers to absolute positions (CoCA's slack form) learns the one place at which
    it is always asked, and fails one token beside it. The last text is cut by the block's end.

    Args:
        encode: Text to token ids.
        end: Token id of the end of text.
        length: Tokens in all.
        seed: Numbers that decide lengths, keys and depths.

    Returns:
        (length,), int64.

    Raises:
        UserError: If not one whole text fits.
    """
    drawn = np.random.default_rng(list(seed))
    block: list[int] = []
    while len(block) < length:
        key, depth = int(drawn.integers(10_000, 100_000)), float(drawn.random())
        answer = [*encode(ANSWER.format(key=key)), end]
        shortest = len(passkey_text(encode, key, None, 0.0).ids) + len(answer)
        left = length - len(block)
        if not block and left < shortest:
            raise UserError(
                f"a passkey text with its answer takes {shortest} tokens with this tokenizer, and "
                f"a block has {length}: choose a block_length of at least {shortest}"
            )
        size = int(drawn.integers(shortest, max(left, shortest) + 1))
        text = passkey_text(encode, key, size - len(answer), depth)
        block += [*text.ids, *answer]
    return np.array(block[:length], dtype=np.int64)
