"""Needle prompts of RULER's kinds (arXiv 2404.06654), of an exact length in tokens: pure.

The sentences are our own. Facts ("needles") stand in a repeated filler, the question comes last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from coca_attention.data.passkey import FILLER, Encode, fill

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
ASSIGN, COPY = "{name} = {value}\n", "{name} = {other}\n"
QUESTIONS = {
    "single": "What is the number of the {name}? The number of the {name} is",
    "multi-key": "What is the number of the {name}? The number of the {name} is",
    "multi-value": "Which numbers does the {name} have? The numbers of the {name} are",
    "variables": "Which variables have the value {value}? The variables are",
}


@dataclass(frozen=True)
class NeedleText:
    """A prompt of exactly the length asked for.

    Attributes:
        ids: Token ids.
        expected: What a full answer holds: numbers, or names of variables.
        needles: Text of every needle, in the order of their places.
        depths: Share of the filler before each, 0 to 1.
        distances: Tokens behind each.
    """

    ids: list[int]
    expected: list[str]
    needles: list[str]
    depths: list[float]
    distances: list[int]


def needle_text(
    encode: Encode,
    kind: Kind,
    length: int,
    seed: Sequence[int],
    *,
    count: int = 4,
    before: Sequence[int] = (),
) -> NeedleText:
    """A prompt of a kind; the same for the same seed.

    ``single``: one fact. ``multi-key``: ``count`` facts about as many names, one of them asked
    for. ``multi-value``: ``count`` facts about one name, all asked for. ``variables``: a chain of
    ``count`` variables, each but the first assigned the one before; all that hold the value are
    asked for.

    Args:
        encode: Text to token ids.
        kind: One of `KINDS`.
        length: Tokens in all.
        seed: Numbers that decide names, values and places.
        count: Facts, at least 1.
        before: Special tokens at the very beginning; they count.

    Raises:
        UserError: If the length is too short; the message has the shortest that works.
    """
    drawn = np.random.default_rng(list(seed))
    count = 1 if kind == "single" else count
    values = [str(v) for v in drawn.choice(90_000, count, replace=False) + 10_000]
    if kind == "variables":
        names = _variables(drawn, count)
        needles = [ASSIGN.format(name=names[0], value=values[0])]
        needles += [COPY.format(name=name, other=other) for other, name in pairwise(names)]
        depths = sorted(drawn.random(count).tolist())
        question = QUESTIONS[kind].format(value=values[0])
        expected = names
    else:
        names = [NAMES[i] for i in drawn.choice(len(NAMES), count, replace=count > len(NAMES))]
        if kind == "multi-value":
            names = [names[0]] * count
        asked = int(drawn.integers(count))
        needles = [
            FACT.format(name=name, value=value) for name, value in zip(names, values, strict=True)
        ]
        depths = drawn.random(count).tolist()
        question = QUESTIONS[kind].format(name=names[asked])
        expected = values if kind == "multi-value" else [values[asked]]
    ids, reached, distances = fill(
        [*before, *encode(INTRODUCTION)],
        encode(FILLER),
        [encode(needle) for needle in needles],
        depths,
        encode(question),
        length,
    )
    return NeedleText(ids, expected, [n.strip() for n in needles], reached, distances)


def _variables(drawn: np.random.Generator, count: int) -> list[str]:
    """Different names of four capital letters."""
    names: dict[str, None] = {}
    letters = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    while len(names) < count:
        names["".join(drawn.choice(letters, 4))] = None
    return list(names)
