"""Needle prompts of RULER's kinds (arXiv 2404.06654), of an exact length in tokens.

The wording is ours: facts ("needles") inside a repeated filler, then the question.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from coca_lab.data.passkey import (
    FILLER,
    Encode,
    Prompt,
    check_reproduced,
    encoder,
    fill,
    leading_special_tokens,
)

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
INTRODUCTION = "Some facts stand in the text below. Keep them in mind: a question comes last.\n"
FACT = "The number of the {name} is {value}.\n"
WORD = r"\d+|[^\W\d_]+"
ASSIGN, COPY = "{name} = {value}\n", "{name} = {other}\n"
QUESTIONS = {
    "single": "What is the number of the {name}? The number of the {name} is",
    "multi-key": "What is the number of the {name}? The number of the {name} is",
    "multi-value": "Which numbers does the {name} have? The numbers of the {name} are",
    "variables": "Which variables have the value {value}? The variables are",
}


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
        [*before, *encode(INTRODUCTION)],
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
    words = [
        word for word in re.findall(WORD, answer) if len(word) == len(expected[0]) and alike(word)
    ]
    first = list(dict.fromkeys(words))[: len(expected)]
    return sum(item in expected for item in first) / len(expected)


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
    letters = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    while len(names) < count:
        names["".join(drawn.choice(letters, 4))] = None
    return list(names)
