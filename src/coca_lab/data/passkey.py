"""The passkey text (CoCA paper, App. B.1, Listing 1) as token ids of an exact length.

A key of five digits is hidden in a repeated filler, and the question comes last, as in arXiv
2305.16300. Training recipes mix such texts in and ask for keys in validation, and the passkey task
evaluates on them.
"""

import re
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
NUMBER = r"\d+"

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    """A text that asks for something hidden in it, and the fields of its record (JSON values)."""

    ids: list[int]
    facts: dict[str, Any]


def encoder(tokenizer: Any) -> Encode:
    """A function from text to token ids without special tokens, with a cache."""

    @lru_cache(maxsize=64)
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before every text, such as beginning of sequence."""
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
    """Token ids with needles after shares of repeated filler; their depths, and tokens behind."""
    # Needles are between whole repetitions of the filler. The end of one more repetition, right
    # after the beginning, makes the length exact.
    needed = len(before) + sum(map(len, needles)) + len(after)
    if length < needed:
        raise UserError(
            f"a text of {length} tokens is too short: without any filler it needs {needed} with "
            f"this tokenizer; choose a length of at least {needed}"
        )
    repeats, rest = divmod(length - needed, len(filler))
    places = [round(depth * repeats) for depth in depths]
    ids = [*before, *filler[len(filler) - rest :]]
    ends = [0] * len(needles)
    for place in range(repeats + 1):
        for index, needle in enumerate(needles):
            if places[index] == place:
                ids += needle
                ends[index] = len(ids)
        if place < repeats:
            ids += filler
    ids += after
    reached = [place / repeats if repeats else 0.0 for place in places]
    return ids, reached, [length - end for end in ends]


def draw_key(generator: np.random.Generator) -> tuple[int, float]:
    """A key of five digits and the share of the filler before it."""
    return int(generator.integers(10_000, 100_000)), float(generator.random())


def passkey_text(
    encode: Encode, key: int, length: int | None, depth: float, *, before: Sequence[int] = ()
) -> Prompt:
    """Listing 1 up to the question, in ``length`` tokens, or without filler if it is None."""
    beginning, line = [*before, *encode(INTRODUCTION)], encode(KEY_LINE.format(key=key))
    question = encode(QUESTION)
    if length is None:
        length = len(beginning) + len(line) + len(question)
    ids, depths, distances = fill(beginning, encode(FILLER), [line], [depth], question, length)
    return Prompt(ids, {"depth": depths[0], "distance": distances[0]})


def ask_for_passkeys(
    tokenizer: Any,
    length: int,
    indices: Sequence[int],
    *,
    seed: int = 0,
    depths: int | None = None,
) -> list[Prompt]:
    """Prompts by seed, length and index; at random depths, or in turn at evenly spaced ones."""
    encode, before = encoder(tokenizer), leading_special_tokens(tokenizer)
    prompts = []
    for index in indices:
        key, depth = draw_key(np.random.default_rng([seed, length, index]))
        if depths is not None:
            depth = index % depths / max(depths - 1, 1)
        check_reproduced(tokenizer, encode, KEY_LINE.format(key=key), NUMBER)
        text = passkey_text(encode, key, length, depth, before=before)
        prompts.append(Prompt(text.ids, {"index": index, "key": key, **text.facts}))
    return prompts


def check_reproduced(tokenizer: Any, encode: Encode, needle: str, pattern: str) -> None:
    """Raise UserError if encoding and decoding a needle changes what is asked for."""
    written = str(tokenizer.decode(encode(needle)))
    if re.findall(pattern, written) != re.findall(pattern, needle):
        raise UserError(
            f"the tokenizer turns {needle.strip()!r} into {written.strip()!r}: it does not "
            "reproduce names and digits, so no answer could be correct"
        )


def is_hit(answer: str, key: int) -> bool:
    """Whether the first number in an answer is the key: exactly its five digits."""
    return re.findall(NUMBER, answer)[:1] == [str(key)]


def vocabulary_text() -> str:
    """Text to train a tokenizer on so that passkey texts take few tokens."""
    line = KEY_LINE.format(key=1234567890)
    return (INTRODUCTION + FILLER + line + QUESTION + ANSWER.format(key=1234567890) + "\n") * 1000


def passkey_block(encode: Encode, end: int, length: int, seed: Sequence[int]) -> np.ndarray:
    """A training block (length,), int64: passkey texts with answers, the last one truncated."""
    # Lengths are random, so that the question occurs at any position. Otherwise a model whose
    # attention depends on absolute positions (CoCA's slack form) learns to answer at one position
    # only, and fails one token off.
    generator = np.random.default_rng(list(seed))
    block: list[int] = []
    while len(block) < length:
        key, depth = draw_key(generator)
        answer = [*encode(ANSWER.format(key=key)), end]
        shortest = len(passkey_text(encode, key, None, 0.0).ids) + len(answer)
        left = length - len(block)
        if not block and left < shortest:
            raise UserError(
                f"a passkey text with its answer takes {shortest} tokens with this tokenizer, and "
                f"a block has {length}: choose a block_length of at least {shortest}"
            )
        size = int(generator.integers(shortest, max(left, shortest) + 1))
        text = passkey_text(encode, key, size - len(answer), depth)
        block += [*text.ids, *answer]
    return np.array(block[:length], dtype=np.int64)
