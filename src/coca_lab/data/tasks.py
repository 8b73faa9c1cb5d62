"""Texts of passkeys, of an exact length in tokens, and the table of tasks that are trained on.

Passkeys (CoCA paper, App. B.1, Listing 1; arXiv 2305.16300): a key of five digits is hidden in a
repeated filler, and the question comes last. Training recipes mix passkeys in and ask for them in
validation; evaluation tasks ask for them. RULER's tasks are in `coca_lab.data.ruler`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.text import end_of_text

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
    beginning = [*before, *encode(PASSKEY_INTRODUCTION)]
    line = encode(KEY_LINE.format(key=key))
    filler = encode(FILLER)
    question = encode(PASSKEY_QUESTION)
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
    encode = encoder(tokenizer)
    before = leading_special_tokens(tokenizer)
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


@dataclass(frozen=True)
class Block:
    """Tokens to train on."""

    ids: np.ndarray  # (length,), int64
    trained: np.ndarray | None = None  # (length,), bool: the tokens that are targets; None: all


Blocks = Callable[[int, Sequence[int]], Block]
"""From a length in tokens and a seed to a block, always the same one."""


def passkey_blocks(tokenizer: PreTrainedTokenizerBase) -> Blocks:
    """Blocks of passkey texts with answers, the last one truncated."""
    encode = encoder(tokenizer)
    end = end_of_text(tokenizer)
    return lambda length, seed: Block(passkey_block(encode, end, length, seed))


def passkey_block(encode: Encode, end: int, length: int, seed: Sequence[int]) -> np.ndarray:
    """A training block (length,), int64; UserError if no text fits into it."""
    # Lengths are random, so that the question occurs at any position. Otherwise a model whose
    # attention depends on absolute positions (CoCA's slack form) learns to answer at one position
    # only, and fails one token off.
    generator = np.random.default_rng(list(seed))
    block: list[int] = []
    while len(block) < length:
        key, depth = draw_key(generator)
        answer = [*encode(PASSKEY_ANSWER.format(key=key)), end]
        parts = PASSKEY_INTRODUCTION, KEY_LINE.format(key=key), PASSKEY_QUESTION
        shortest = sum(len(encode(p)) for p in parts) + len(answer)
        left = length - len(block)
        if not block and left < shortest:
            raise UserError(
                f"a passkey text with its answer takes {shortest} tokens with this tokenizer, and "
                f"a block has {length}: choose a `block_length` of at least {shortest}"
            )
        size = int(generator.integers(shortest, max(left, shortest) + 1))
        text = passkey_text(encode, key, size - len(answer), depth)
        block += [*text.ids, *answer]
    return np.array(block[:length], dtype=np.int64)


# Tasks that are trained on

TRAINED_TASKS: dict[str, Callable[[PreTrainedTokenizerBase], Blocks]] = {"passkey": passkey_blocks}
"""By name; `data.tasks` of a recipe mixes them in, and `data.passkey_share` the passkeys."""


def register_blocks(name: str, blocks: Callable[[PreTrainedTokenizerBase], Blocks]) -> None:
    """Add a task to train on, ``data.tasks: {NAME: share}``; UserError if its name is taken.

    Args:
        name: Its name in recipes.
        blocks: From the tokenizer of a run to `Blocks`, which raise UserError for a length into
            which no text fits.
    """
    if name in TRAINED_TASKS:
        raise UserError(f"there is already a task to train on named {name!r}")
    TRAINED_TASKS[name] = blocks
