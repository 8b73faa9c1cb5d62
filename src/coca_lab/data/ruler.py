"""RULER's synthetic tasks (Hsieh et al., 2024, arXiv 2404.06654) at an exact length in tokens.

Wording, sizes and scoring are those of NVIDIA's code (github.com/NVIDIA/RULER, scripts/data and
scripts/eval); docs/evaluation.md says what differs. A length counts the prompt in the tokens of the
model, special tokens and chat template included, and the answer. A prompt is a text that the
tokenizer turns into exactly so many tokens, so it can be sent to a server as it is.

    prompts = ask_for_ruler(tokenizer, "niah_multikey_1", 4096, range(20), filler=text)
    answer = ...  # at most ANSWER_TOKENS["niah_multikey_1"] tokens, greedy
    string_match(answer, prompts[0].facts["expected"])  # 0 to 1
"""

import math
import re
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise, product
from string import ascii_lowercase, ascii_uppercase
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError, error_prefix
from coca_lab.data.chat import Thinking, chat_frame
from coca_lab.data.tasks import (
    FILLER,
    Encode,
    Prompt,
    check_reproduced,
    leading_special_tokens,
)
from coca_lab.settings.evaluations import RULER_TASKS, RulerTask

ANSWER_TOKENS: dict[str, int] = {
    **dict.fromkeys(RULER_TASKS[:8], 128), "vt": 30, "cwe": 120, "fwe": 50
}  # fmt: skip
"""Tokens of an answer."""
NOISE = FILLER.strip()
NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {value} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables"
    " are assigned the value {value}, they are: ",
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. ",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
DEPTHS = np.linspace(0, 100, 40).round() / 100
"""Depths of needles in running text."""
LARGEST_REST = 24
"""Tokens that a prompt may lack of its length before its haystack is filled up."""
VARIABLES, EXAMPLE_TOKENS = 5, 500
"""Variables of a chain, with four hops; and tokens of the example before it, at most."""
COMMON_WORDS = 10
FEWEST_CODED = 100
"""With fewer coded words the third and the fourth may be as frequent."""


class Needles(NamedTuple):
    """A task of needles in a haystack, as in RULER's synthetic.yaml."""

    haystack: Literal["noise", "text", "needles"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"


NEEDLE_TASKS: dict[str, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuids"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, queries=4),
}


@dataclass(frozen=True)
class Draft:
    """A prompt with as much haystack as it takes, and what it asks for."""

    before: str
    haystack: Callable[[int], str]
    """From a number of units (sentences, words or needles) to the text that they make."""
    after: str
    prefix: str  # the beginning of the answer, behind a chat template
    expected: list[str]
    rest: str = NOISE + "\n"
    """The end of this before the haystack makes the length exact."""
    fewest: int = 1  # units


def ask_for_ruler(
    tokenizer: PreTrainedTokenizerBase,
    task: RulerTask,
    length: int,
    indices: Sequence[int],
    *,
    seed: int = 0,
    filler: str = NOISE,
    chat: bool = False,
    thinking: Thinking = "default",
) -> list[Prompt]:
    """Prompts that seed, task, length, index and filler determine, of the tasks of RULER.

    Args:
        tokenizer: Tokenizer of the model.
        task: Name of the task, one of `RULER_TASKS`.
        length: Tokens of the prompt and of the answer (`ANSWER_TOKENS`) together.
        indices: Numbers of the prompts.
        seed: Random seed.
        filler: The text that needles are hidden in where RULER has essays: its first words,
            repeated if it is short.
        chat: Whether the prompt is what a user says, in the tokenizer's chat template, and its end
            the beginning of the answer. The default is a plain text.
        thinking: Whether the model is to think, for chat templates with ``enable_thinking``.

    Returns:
        For every index the token ids and text of a prompt; its facts have the strings that are
        ``expected`` in the answer.

    Raises:
        UserError: If the length is too short, the tokenizer has no chat template of use, or does
            not reproduce what is expected.
    """
    leading, (opening, closing) = leading_special_tokens(tokenizer), ("", "")
    if chat:
        opening, closing = chat_frame(tokenizer, thinking)
        if leading:  # the tokenizer adds the beginning of sequence itself
            opening = opening.removeprefix(str(tokenizer.bos_token or ""))

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [*leading, *ids]

    prompts = []
    for index in indices:
        drawn = [seed, RULER_TASKS.index(task), length, index]
        generator = np.random.default_rng(drawn)
        with error_prefix(f"{task} of {length:,} tokens: "):
            if task in NEEDLE_TASKS:
                draft = needles(NEEDLE_TASKS[task], generator, filler)
            elif task == "vt":
                draft = variable_tracking(generator, encode)
            elif task == "cwe":
                draft = common_words(generator, length, encode)
            else:
                draft = frequent_words(generator, length)
            check_reproduced(tokenizer, draft.expected)
            before = opening + draft.before
            after = draft.after + closing + draft.prefix
            text, ids = fit_haystack(encode, draft, before, after, length - ANSWER_TOKENS[task])
        prompts.append(Prompt(ids, {"index": index, "expected": draft.expected}, text))
    return prompts


def string_match(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that an answer contains in any case: string_match_all."""
    return sum(each.lower() in answer.lower() for each in expected) / len(expected)


def fit_haystack(
    encode: Encode, draft: Draft, before: str, after: str, tokens: int
) -> tuple[str, list[int]]:
    """The text with as much haystack as makes exactly so many tokens, and its ids."""

    def text(units: int, rest: str = "") -> str:
        return before + rest + draft.haystack(units) + after

    def count(units: int) -> int:
        return len(encode(text(units)))

    # Secant steps to a number of units that leaves less than two of them, or few tokens.
    low = draft.fewest
    used = count(draft.fewest)
    if used > tokens:
        answer = "the answer and a prompt with the least haystack take"
        raise UserError(f"too short: {answer} {used - tokens} tokens more with this tokenizer")
    high = 0
    each = max((count(low + 16) - used) / 16, 0.01)
    while (left := tokens - used) > max(2 * each, LARGEST_REST):
        units = low + max(1, int(left / each))
        if high and units >= high:
            units = (low + high) // 2
        if units == low:
            break
        now = count(units)
        if now > tokens:
            high = units
        else:
            each = max((now - used) / (units - low), 0.01)
            low = units
            used = now
    # Some numbers of tokens are no end of the one text with a tokenizer, but of another.
    for end, units in product(
        dict.fromkeys((draft.rest, NOISE + " ", NOISE + "\n")),
        range(low, max(draft.fewest, low - 20) - 1, -1),
    ):
        left = tokens - (used if units == low else count(units))
        for rest in _rests(encode, end, before, draft.haystack(units), left):
            whole = text(units, rest)
            ids = encode(whole)
            if len(ids) == tokens:
                return whole, ids
    raise UserError(f"no text of exactly {tokens} tokens was found; choose another length")


def _rests(encode: Encode, end: str, before: str, haystack: str, tokens: int) -> list[str]:
    """Ends of a text, repeated, that seem to take so many tokens between two others."""
    if tokens <= 0:
        return [""] if tokens == 0 else []
    around = before[-100:], haystack[:100]  # what is farther away changes little
    alone = len(encode("".join(around)))
    repeated = end * (2 + 10 * tokens // len(end))

    def count(size: int) -> int:
        return len(encode(repeated[-size:].join(around))) - alone

    # Of about so many tokens, since a character more can also take a token less.
    size = bisect_left(range(1, len(repeated)), tokens, key=count) + 1
    sizes = range(max(1, size - 8), size + 16)
    return [repeated[-size:] for size in sizes if count(size) == tokens]


# Needles in a haystack


def needles(kind: Needles, generator: np.random.Generator, filler: str) -> Draft:
    """Facts about keys, and the question for the values of some of them."""
    keys = draw_distinct(generator, kind.key, kind.keys)
    values = [draw_distinct(generator, kind.value, kind.values) for _ in keys]
    facts = [
        NEEDLE.format(kind=kind.value, key=key, value=value)
        for key, some in zip(keys, values, strict=True)
        for value in some
    ]
    asked = generator.choice(kind.keys, kind.queries, replace=False).tolist()
    expected = [value for index in asked for value in values[index]]
    depths = generator.choice(DEPTHS, len(facts), replace=False)
    drawn = int(generator.integers(2**32))

    def haystack(units: int) -> str:
        if kind.haystack == "text":
            some = sentences(filler, units)
            return " ".join(_inserted(some, facts, (depths * len(some)).astype(int)))
        again = np.random.default_rng(drawn)
        places = again.choice(units, len(facts), replace=False)
        if kind.haystack == "noise":
            return "\n".join(_inserted([NOISE] * units, facts, places))
        lines: list[str] = []  # needles about other keys
        while len(lines) < units:
            (key,) = draw_distinct(again, kind.key, 1)
            (value,) = draw_distinct(again, kind.value, 1)
            if key not in keys:
                lines.append(NEEDLE.format(kind=kind.value, key=key, value=value))
        return "\n".join(_inserted(lines, facts, places))

    templates = NIAH
    what = kind.value
    if len(expected) == 1:
        templates = [
            text.replace("Some", "A").replace("are all", "is").replace("are", "is") for text in NIAH
        ]
        what = what.removesuffix("s")
    queries = [keys[index] for index in asked]
    last = queries.pop()
    query = f"{', '.join(queries)}, and {last}" if queries else last
    before, after, prefix = (each.format(kind=what, query=query) for each in templates)
    rest = NOISE + (" " if kind.haystack == "text" else "\n")
    return Draft(before, haystack, after, prefix, expected, rest)


def sentences(text: str, words: int) -> list[str]:
    """The first words of a text, repeated if it is short, as sentences."""
    every = _words_of(text)
    some = (every * -(-words // len(every)))[:words]
    return re.split(r"(?<=[.!?]) ", " ".join(some))


@lru_cache(maxsize=2)
def _words_of(text: str) -> list[str]:
    words = text.split()
    if not words:
        raise UserError("the filler has no words")
    return words


def _inserted(units: Sequence[str], added: Sequence[str], places: np.ndarray) -> list[str]:
    """Units with others before the units at places."""
    result = [*units]
    for place, each in sorted(zip(places.tolist(), added, strict=True), reverse=True):
        result.insert(place, each)
    return result


def draw_distinct(generator: np.random.Generator, kind: str, count: int) -> list[str]:
    """Different numbers of seven digits, UUIDs, or pairs of an adjective and a noun."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        if kind == "numbers":
            new = str(generator.integers(10**6, 10**7))
        elif kind == "uuids":
            new = str(uuid.UUID(bytes=generator.bytes(16), version=4))
        else:
            adjectives, nouns, _ = word_lists()
            new = f"{adjectives[generator.integers(len(adjectives))]}-"
            new += nouns[generator.integers(len(nouns))]
        drawn[new] = None
    return [*drawn]


@lru_cache(maxsize=1)
def word_lists() -> tuple[list[str], list[str], list[str]]:
    """English adjectives, nouns and verbs, none of which is in another one."""
    text = files("coca_lab.data").joinpath("words.txt").read_text(encoding="utf-8")
    adjectives, nouns, verbs = (part.split() for part in text.split("\n\n"))
    return adjectives, nouns, verbs


# Variable tracking


def variable_tracking(generator: np.random.Generator, encode: Encode) -> Draft:
    """A chain of assignments, after an example with its answer."""
    example = _chain(generator, 3)
    line = len(encode("\n" + NOISE))
    least = len(encode(_written(example, VARIABLES)))
    lines = VARIABLES + max(0, (EXAMPLE_TOKENS - least) // line)
    draft = _chain(generator, 5)
    shown = f"{_written(example, lines)} {' '.join(example.expected)}\n\n"
    return replace(draft, before=shown + draft.before)


def _written(draft: Draft, units: int) -> str:
    return draft.before + draft.haystack(units) + draft.after + draft.prefix


def _chain(generator: np.random.Generator, letters: int) -> Draft:
    names = _coined(generator, VARIABLES, ascii_uppercase, letters)
    value = str(generator.integers(10_000, 99_999))
    drawn = int(generator.integers(2**32))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]

    def haystack(units: int) -> str:
        places = np.random.default_rng(drawn).choice(units, VARIABLES, replace=False)
        return "\n".join(_inserted([NOISE] * units, lines, np.sort(places)))

    before, after, prefix = (each.format(value=value, count=VARIABLES) for each in TRACKING)
    return Draft(before, haystack, after, prefix, names, fewest=VARIABLES)


def _coined(generator: np.random.Generator, count: int, alphabet: str, letters: int) -> list[str]:
    """Different random words."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(generator.choice([*alphabet], letters))] = None
    return [*words]


# Common and frequent words


def common_words(generator: np.random.Generator, length: int, encode: Encode) -> Draft:
    """A list of words, ten of which are common, after an example with its answer."""
    # 30 and 3 times each, in the example 10 and 3 times; fewer in short prompts.
    often, seldom = (30, 3) if length >= 4096 else (6, 1)
    shown, shown_often, shown_seldom = (40, 10, 3) if length >= 4096 else (20, 3, 1)
    every = [word for words in word_lists() for word in words]
    words = generator.choice(every, shown, replace=False).tolist()
    numbered = _numbered(generator, words, shown_often, shown_seldom)
    example = COMMON[0] + numbered + COMMON[1] + COMMON[2]
    answer = " ".join(f"{place}. {word}" for place, word in enumerate(words[:COMMON_WORDS], 1))
    most = length * len(every) // (seldom * len(encode(_numbered(generator, every, 1, 1))))
    if most > len(every):  # as RULER, which takes all words from a longer list then
        every = draw_distinct(generator, "words", most)
    words = generator.permutation(every).tolist()
    order = int(generator.integers(2**32))

    def haystack(units: int) -> str:
        return _numbered(np.random.default_rng(order), words[: COMMON_WORDS + units], often, seldom)

    before = f"{example} {answer}\n{COMMON[0]}"
    return Draft(before, haystack, COMMON[1], COMMON[2], words[:COMMON_WORDS])


def _numbered(generator: np.random.Generator, words: Sequence[str], often: int, seldom: int) -> str:
    """A shuffled, numbered list of words, of which the first ten are common."""
    entries = [*words[:COMMON_WORDS]] * often + [*words[COMMON_WORDS:]] * seldom
    shuffled = generator.permutation(entries).tolist()
    return " ".join(f"{place}. {word}" for place, word in enumerate(shuffled, 1))


def frequent_words(generator: np.random.Generator, length: int) -> Draft:
    """Coded words whose frequencies follow Zipf's law with exponent 2; the first one is dots."""
    size = max((length - ANSWER_TOKENS["fwe"]) // 50, 5)
    words = ["...", *_coined(generator, size - 1, ascii_lowercase, 6)]
    order = int(generator.integers(2**32))

    def haystack(units: int) -> str:
        ranks = np.arange(1, size + 1)
        counts = (units / ranks**2 / (math.pi**2 / 6)).astype(int)
        every = np.repeat(words, counts)
        return " ".join(np.random.default_rng(order).permutation(every).tolist())

    return Draft(FREQUENT[0], haystack, FREQUENT[1], FREQUENT[2], words[1:4], "... ", FEWEST_CODED)
