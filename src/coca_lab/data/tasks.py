"""Texts of synthetic tasks: passkeys, needles and associative recall, of an exact length in tokens.

Passkeys (CoCA paper, App. B.1, Listing 1; arXiv 2305.16300): a key of five digits is hidden in a
repeated filler, and the question comes last. Needles are of RULER's kinds (arXiv 2404.06654), in
our words: facts inside the same filler, then the question. Training recipes mix passkeys in and ask
for both in validation; evaluation tasks ask for both.

Recall with many queries (MQAR; Zoology, arXiv 2312.04927) is in random tokens: a text begins with
pairs of a key and a value, and asks for every key once more, at places spread evenly over the rest;
the token after a query is its value. Zoology's default crowds queries behind the pairs (its
``power_a`` 0.01), which flatters attention that decays; here every place is as likely (1.0).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from string import ascii_uppercase
from typing import Any, Literal, get_args

import numpy as np

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
ANSWER = " The passkey is {key}."
NUMBER = r"\d+"
Kind = Literal["single", "multi-key", "multi-value", "variables"]
KINDS: tuple[str, ...] = get_args(Kind)
NAMES = (
    "amber", "anchor", "arrow", "basket", "beacon", "bridge", "candle", "canyon", "castle",
    "cedar", "cloud", "copper", "coral", "crane", "crystal", "desert", "dragon", "eagle", "ember",
    "falcon", "feather", "forest", "garden", "glacier", "hammer", "harbor", "island", "ivory",
    "jungle", "ladder", "lantern", "lemon", "marble", "meadow", "mirror", "mountain", "needle",
    "ocean", "orchid", "pebble", "pepper", "pillow", "planet", "ribbon", "river", "saddle",
    "shadow", "silver", "spider", "summer", "temple", "thunder", "tiger", "tunnel", "valley",
    "velvet", "violin", "walnut", "window", "winter",
)  # fmt: skip
NEEDLE_INTRODUCTION = (
    "Some facts stand in the text below. Keep them in mind: a question comes last.\n"
)
FACT = "The number of the {name} is {value}.\n"
WORD = r"\d+|[^\W\d_]+"
ASSIGN, COPY = "{name} = {value}\n", "{name} = {other}\n"
QUESTIONS = {
    "single": "What is the number of the {name}? The number of the {name} is",
    "multi-key": "What is the number of the {name}? The number of the {name} is",
    "multi-value": "Which numbers does the {name} have? The numbers of the {name} are",
    "variables": "Which variables have the value {value}? The variables are",
}
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
    done, ends = 0, [0] * len(needles)
    for index in sorted(range(len(needles)), key=places.__getitem__):
        ids += [*filler] * (places[index] - done)
        ids += needles[index]
        done, ends[index] = places[index], len(ids)
    ids += [*filler] * (repeats - done) + [*after]
    reached = [place / repeats if repeats else 0.0 for place in places]
    return ids, reached, [length - end for end in ends]


# Passkeys


def draw_key(generator: np.random.Generator) -> tuple[int, float]:
    """A key of five digits and the share of the filler before it."""
    return int(generator.integers(10_000, 100_000)), float(generator.random())


def passkey_text(
    encode: Encode, key: int, length: int, depth: float, *, before: Sequence[int] = ()
) -> Prompt:
    """Listing 1 up to the question, in ``length`` tokens."""
    beginning, line = [*before, *encode(PASSKEY_INTRODUCTION)], encode(KEY_LINE.format(key=key))
    question = encode(PASSKEY_QUESTION)
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
    text = PASSKEY_INTRODUCTION + FILLER + KEY_LINE + PASSKEY_QUESTION + ANSWER + "\n"
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
        answer = [*encode(ANSWER.format(key=key)), end]
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


# Needles


def needle_text(
    encode: Encode,
    kind: Kind,
    length: int,
    seed: Sequence[int],
    *,
    count: int = 4,
    before: Sequence[int] = (),
) -> Prompt:
    """A prompt of one kind and ``length`` tokens, ``before`` included, determined by the seed."""
    # single: one fact. multi-key: `count` facts about different names, one of which is requested.
    # multi-value: `count` facts about one name, all requested. variables: a chain of `count`
    # variables, each assigned from the previous one, all of which are requested, and between its
    # links those of a second chain with another value.
    drawn = np.random.default_rng(list(seed))
    count = 1 if kind == "single" else count
    if kind == "variables":
        value, other = _values(drawn, 2)
        names = _variables(drawn, 2 * count)
        chains = [_chain(names[:count], value), _chain(names[count:], other)]
        needles = [chains[turn].pop(0) for turn in drawn.permutation([0, 1] * count)]
        depths = sorted(drawn.random(2 * count).tolist())
        question = QUESTIONS[kind].format(value=value)
        expected = names[:count]
    else:
        values = _values(drawn, count)
        names = [NAMES[i] for i in drawn.choice(len(NAMES), count, replace=count > len(NAMES))]
        if kind == "multi-value":
            names = [names[0]] * count
        chosen = int(drawn.integers(count))
        needles = [FACT.format(name=n, value=v) for n, v in zip(names, values, strict=True)]
        depths = drawn.random(count).tolist()
        question = QUESTIONS[kind].format(name=names[chosen])
        expected = values if kind == "multi-value" else [values[chosen]]
    ids, reached, distances = fill(
        [*before, *encode(NEEDLE_INTRODUCTION)],
        encode(FILLER),
        [encode(needle) for needle in needles],
        depths,
        encode(question),
        length,
    )
    facts = {"expected": expected, "needles": [needle.strip() for needle in needles]}
    return Prompt(ids, {**facts, "depths": reached, "distances": distances})


def ask_for_needles(
    tokenizer: Any,
    kind: Kind,
    length: int,
    indices: Sequence[int],
    *,
    seed: int = 0,
    count: int = 4,
) -> list[Prompt]:
    """Prompts of one kind and length, which seed, kind, length and index determine."""
    encode, before = encoder(tokenizer), leading_special_tokens(tokenizer)
    prompts = []
    for index in indices:
        drawn = (seed, KINDS.index(kind), length, index)
        text = needle_text(encode, kind, length, drawn, count=count, before=before)
        for needle in text.facts["needles"]:
            check_reproduced(tokenizer, encode, needle, WORD)
        prompts.append(Prompt(text.ids, {"index": index, **text.facts}))
    return prompts


def r_precision(answer: str, expected: list[str]) -> float:
    """Share of the requested numbers or names among the first different ones of an answer."""
    # As many count as were requested, so precision and recall are the same. They are whole words
    # of the form of those requested: as many digits, or capital letters.
    alike = str.isdigit if expected[0].isdigit() else str.isupper
    size, words = len(expected[0]), dict.fromkeys(re.findall(WORD, answer))
    first = [word for word in words if len(word) == size and alike(word)][: len(expected)]
    return sum(item in expected for item in first) / len(expected)


def share_found(answer: str, prompt: Prompt) -> float:
    """How much of what a prompt asks for, passkey or needles, is in an answer, 0 to 1."""
    if "key" in prompt.facts:
        return float(is_hit(answer, prompt.facts["key"]))
    return r_precision(answer, prompt.facts["expected"])


def _values(drawn: np.random.Generator, count: int) -> list[str]:
    """Distinct numbers of five digits."""
    return [str(value) for value in drawn.choice(90_000, count, replace=False) + 10_000]


def _chain(names: list[str], value: str) -> list[str]:
    """Needles that assign a value to the first variable, and each to the next."""
    copies = [COPY.format(name=name, other=other) for other, name in pairwise(names)]
    return [ASSIGN.format(name=names[0], value=value), *copies]


def _variables(drawn: np.random.Generator, count: int) -> list[str]:
    """Distinct names of four capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(drawn.choice([*ascii_uppercase], 4))] = None
    return list(names)


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


def recall_vocabulary(tokenizer: Any) -> list[int]:
    """The tokens of recall texts: all but the special ones."""
    special = set(tokenizer.all_special_ids)
    return [index for index in range(len(tokenizer)) if index not in special]
