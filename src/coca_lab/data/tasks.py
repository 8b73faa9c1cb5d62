"""Texts of synthetic tasks: passkeys and associative recall, of an exact length in tokens.

Passkeys (CoCA paper, App. B.1, Listing 1; arXiv 2305.16300): a key of five digits is hidden in a
repeated filler, and the question comes last. Training recipes mix passkeys in and ask for them in
validation; evaluation tasks ask for them. RULER's tasks are in `coca_lab.data.ruler`.

Recall with many queries (MQAR; Zoology, arXiv 2312.04927) is in random tokens: a text begins with
pairs of a key and a value, and asks for every key once more, at places spread evenly over the rest;
the token after a query is its value. Zoology's default crowds queries behind the pairs (its
``power_a`` 0.01), which flatters attention that decays; here every place is as likely (1.0).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError

PASSKEY_INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
KEY_LINE = "The passkey is {key}. Remeber it. {key} is the passkey.\n"  # spelt as in the paper
PASSKEY_QUESTION = "What is the passkey?"
PASSKEY_ANSWER = " The passkey is {key}."
NUMBER = r"\d+"
FEWEST_PAIRS, MOST_PAIRS = 4, 32
"""Pairs of a training text."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    """A text that asks for something hidden in it, and the fields of its record (JSON values)."""

    ids: list[int]
    facts: dict[str, Any]
    text: str = ""
    """What the tokenizer turns into the ids, if they come from one text."""


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from text to token ids without special tokens, with a cache."""

    @lru_cache(maxsize=64)
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def leading_special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that the tokenizer puts before every text, such as beginning of sequence."""
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(ids)):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []


def check_reproduced(tokenizer: PreTrainedTokenizerBase, expected: Sequence[str]) -> None:
    """Raise UserError if encoding and decoding changes more of what is expected than its case."""
    text = " ".join(expected)
    written = str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))
    if any(each.lower() not in written.lower() for each in expected):
        raise UserError(
            f"the tokenizer turns {text!r} into {written!r}, so no answer could be correct"
        )


# Passkeys


def draw_key(generator: np.random.Generator) -> tuple[int, float]:
    """A key of five digits and the share of the filler before it."""
    return int(generator.integers(10_000, 100_000)), float(generator.random())


def passkey_text(
    encode: Encode, key: int, length: int, depth: float, *, before: Sequence[int] = ()
) -> Prompt:
    """Listing 1 up to the question, in ``length`` tokens."""
    # The key is between whole repetitions of the filler. The end of one more, right after the
    # introduction, makes the length exact.
    beginning, line = [*before, *encode(PASSKEY_INTRODUCTION)], encode(KEY_LINE.format(key=key))
    filler, question = encode(FILLER), encode(PASSKEY_QUESTION)
    needed = len(beginning) + len(line) + len(question)
    if length < needed:
        raise UserError(
            f"a text of {length} tokens is too short: without any filler it needs at least "
            f"{needed} with this tokenizer"
        )
    repeats, rest = divmod(length - needed, len(filler))
    place = round(depth * repeats)
    behind = [*filler * (repeats - place), *question]
    ids = [*beginning, *filler[len(filler) - rest :], *filler * place, *line, *behind]
    return Prompt(ids, {"depth": place / repeats if repeats else 0.0, "distance": len(behind)})


def ask_for_passkeys(
    tokenizer: PreTrainedTokenizerBase,
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
        check_reproduced(tokenizer, [str(key)])
        text = passkey_text(encode, key, length, depth, before=before)
        prompts.append(Prompt(text.ids, {"index": index, "key": key, **text.facts}))
    return prompts


def is_hit(answer: str, key: int) -> bool:
    """Whether the first number in an answer is the key: exactly its five digits."""
    return re.findall(NUMBER, answer)[:1] == [str(key)]


def vocabulary_text() -> str:
    """Text to train a tokenizer on so that passkey texts take few tokens."""
    text = PASSKEY_INTRODUCTION + FILLER + KEY_LINE + PASSKEY_QUESTION + PASSKEY_ANSWER + "\n"
    return text.format(key=1234567890) * 1000


def passkey_block(encode: Encode, end: int, length: int, seed: Sequence[int]) -> np.ndarray:
    """A training block (length,), int64: passkey texts with answers, the last one truncated."""
    # Lengths are random, so that the question occurs at any position. Otherwise a model whose
    # attention depends on absolute positions (CoCA's slack form) learns to answer at one position
    # only, and fails one token off.
    generator = np.random.default_rng(list(seed))
    block: list[int] = []
    while len(block) < length:
        key, depth = draw_key(generator)
        answer = [*encode(PASSKEY_ANSWER.format(key=key)), end]
        parts = PASSKEY_INTRODUCTION, KEY_LINE.format(key=key), PASSKEY_QUESTION
        shortest, left = sum(len(encode(p)) for p in parts) + len(answer), length - len(block)
        if not block and left < shortest:
            raise UserError(
                f"a passkey text with its answer takes {shortest} tokens with this tokenizer, and "
                f"a block has {length}: choose a block_length of at least {shortest}"
            )
        size = int(generator.integers(shortest, max(left, shortest) + 1))
        text = passkey_text(encode, key, size - len(answer), depth)
        block += [*text.ids, *answer]
    return np.array(block[:length], dtype=np.int64)


# Associative recall


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
    ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2] = keys, values
    # Where the query of every pair stands, in steps of two tokens from the end of the text.
    places = length - 2 - 2 * generator.choice((length - 2 * pairs) // 2, pairs, replace=False)
    ids[places], ids[places + 1] = keys, values
    order = np.argsort(places)
    answers = places[order] + 1
    return RecallText(vocabulary[ids], answers, answers - (2 * order + 1))


def recall_block(
    vocabulary: Sequence[int] | np.ndarray, end: int, length: int, seed: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Recall texts of random lengths and loads, (length,) int64, and whether each is an answer."""
    generator = np.random.default_rng(list(seed))
    block, is_answer = np.full(length, end, dtype=np.int64), np.zeros(length, dtype=bool)
    start, shortest = 0, 4 * FEWEST_PAIRS
    if length < shortest:
        raise UserError(
            f"a recall text takes at least {shortest} tokens, and a block has {length}: choose a "
            f"block_length of at least {shortest}"
        )
    while length - start >= shortest:
        size = int(generator.integers(shortest, length - start + 1))
        pairs = int(generator.integers(FEWEST_PAIRS, min(MOST_PAIRS, size // 4) + 1))
        text = recall_text(vocabulary, pairs, size, generator)
        block[start : start + size] = text.ids
        is_answer[start + text.answers] = True
        start += size + 1
    return block, is_answer


def recall_vocabulary(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of recall texts: all but the special ones."""
    special = set(tokenizer.all_special_ids)
    return [index for index in range(len(tokenizer)) if index not in special]
