"""Documents with needles: facts hidden in a text, and at its end questions with their answers.

A needle is one of RULER's lines (arXiv 2404.06654) with a number of seven digits. The answers stand
behind the questions, so one reading of the text says how probable a model finds each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.ruler import NEEDLE, draw_distinct
from coca_lab.data.tasks import check_reproduced, encoder, leading_special_tokens

DIGITS = 7
"""Of every number."""


@dataclass(frozen=True)
class Needle:
    """A number that is hidden in a text and asked for at its end.

    Attributes:
        first: Index of the first token of its answer.
        stop: Index behind the last one.
        distance: Tokens from the number where it is hidden to the answer.
    """

    first: int
    stop: int
    distance: int


@dataclass(frozen=True)
class NeedleText:
    """A text and its needles, in the order of the answers.

    Attributes:
        ids: Token ids; the special tokens that begin a text come first.
        needles: Where the answers are.
    """

    ids: list[int]
    needles: list[Needle]

    @property
    def first_answer(self) -> int:
        """Index of the first token that is scored."""
        return self.needles[0].first

    def last(self, tokens: int) -> "NeedleText":
        """What so many tokens at the end have of it; UserError if they do not have all answers."""
        left_out = max(0, len(self.ids) - tokens)
        if self.first_answer <= left_out:
            answers = len(self.ids) - self.first_answer
            raise UserError(f"the answers take {answers} tokens, the last {tokens} are too few")
        needles = [
            replace(needle, first=needle.first - left_out, stop=needle.stop - left_out)
            for needle in self.needles
        ]
        return NeedleText(self.ids[left_out:], needles)


def hide_needles(
    tokenizer: PreTrainedTokenizerBase,
    document: Sequence[int],
    length: int,
    count: int,
    seed: Sequence[int],
) -> NeedleText:
    """Hide numbers in the beginning of a document, and ask for all of them at the end.

    The places are one in each of ``count`` equal parts of the text, at random; the questions are in
    random order.

    Args:
        tokenizer: A fast tokenizer.
        document: Token ids without special ones, at least ``length``.
        length: Tokens of the text, with all that is hidden, the questions and the answers.
        count: How many numbers.
        seed: What decides about numbers, names, places and the order of questions.

    Raises:
        UserError: If there is no room, the tokenizer is a slow one, or it does not reproduce
            numbers.
    """
    generator = np.random.default_rng(list(seed))
    keys = draw_distinct(generator, "words", count)
    values = draw_distinct(generator, "numbers", count)
    check_reproduced(tokenizer, values)
    lines = [
        f"\n{NEEDLE.format(kind='numbers', key=key, value=value)}\n"
        for key, value in zip(keys, values, strict=True)
    ]
    encode = encoder(tokenizer)
    facts = [encode(line) for line in lines]
    leading = leading_special_tokens(tokenizer)
    # Every line stands twice: where it is hidden, and as a question with its answer.
    free = length - len(leading) - 2 * sum(len(fact) for fact in facts)
    if free < 1:
        raise UserError(
            f"a text of {length} tokens has no room for {count} needles and their questions, which "
            f"take {length - free} tokens: hide fewer (`count`, in a check `check_numbers`), or "
            "read longer texts"
        )
    edges = np.linspace(0, free, count + 1)
    places = [int(generator.uniform(low, high)) for low, high in pairwise(edges)]

    ids = list(leading)
    hidden_at = list[int]()
    before = 0
    for place, fact in zip(places, facts, strict=True):
        ids += document[before:place]
        before = place
        hidden_at.append(len(ids))
        ids += fact
    ids += document[before:free]

    needles = list[Needle]()
    for index in generator.permutation(count).tolist():
        within = _number_tokens(tokenizer, lines[index], values[index])
        distance = len(ids) - hidden_at[index]
        needles.append(Needle(len(ids) + within.start, len(ids) + within.stop, distance))
        ids += facts[index]
    return NeedleText(ids, needles)


def _number_tokens(tokenizer: PreTrainedTokenizerBase, line: str, number: str) -> range:
    """Which tokens of a line have digits of its number."""
    if not tokenizer.is_fast:
        raise UserError(
            f"needles need a fast tokenizer, which says what text its tokens are; got "
            f"{type(tokenizer).__name__}"
        )
    start = line.rindex(number)
    stop = start + len(number)
    encoded = tokenizer(line, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    inside = [
        index
        for index, (first, last) in enumerate(encoded["offset_mapping"])
        if first < stop and last > start
    ]
    return range(inside[0], inside[-1] + 1)
