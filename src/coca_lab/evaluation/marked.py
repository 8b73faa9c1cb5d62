"""Documents in which numbers are hidden: one reading scores the text, and has them to be found."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_attention.models.attention import CACHE
from coca_lab.data.ruler import NEEDLE, draw_distinct
from coca_lab.data.tasks import (
    Encode,
    check_reproduced,
    encoder,
    is_hit,
    leading_special_tokens,
)
from coca_lab.environment import peak_growth
from coca_lab.evaluation.windows import TokenDocument
from coca_lab.generation import greedy_answers


@dataclass(frozen=True)
class MarkedText:
    """A document in whose text numbers are hidden.

    Attributes:
        id: That of the document.
        ids: (tokens,), int64; the special tokens that begin a text come first.
        hidden: Which of them belong to what is hidden, (tokens,), bool.
        stops: Tokens to read for every length; the rest of it is for a question and its answer.
        questions: Token ids of a question, and the number that answers it, for every length.
        leading: The special tokens.
    """

    id: str
    ids: Tensor
    hidden: Tensor
    stops: dict[int, int]
    questions: dict[int, list[tuple[list[int], int]]]
    leading: list[int]

    def targets(self, length: int, most: int) -> Tensor:
        """The last tokens of the document that are read for a length: their indices."""
        return torch.nonzero(~self.hidden[: self.stops[length]])[-most:, 0]

    def last(self, length: int, tokens: int) -> "MarkedText":
        """The last so many tokens that are read for a length, and nothing to ask for."""
        stop, kept = self.stops[length], len(self.leading)
        parts = slice(kept), slice(stop - tokens + kept, stop)
        ids, hidden = (torch.cat([x[part] for part in parts]) for x in (self.ids, self.hidden))
        return replace(self, ids=ids, hidden=hidden, stops={length: tokens}, questions={length: []})


def hide_numbers(
    documents: Sequence[TokenDocument],
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    count: int,
) -> list[MarkedText]:
    """Hide ``count`` numbers between each length, in tokens, and the one before it.

    At every length as many are asked for, of all that come before.

    Raises:
        UserError: If there is no room for them, or the tokenizer does not reproduce numbers.
    """
    generator, encode = np.random.default_rng(0), encoder(tokenizer)
    drawn = [_draw_lines(generator, tokenizer, count * len(lengths)) for _ in documents]
    # A line is a question and its answer, so the longest one fits wherever one is asked for.
    room = max(len(encode(line)) for lines in drawn for line in lines)
    texts = []
    for document, lines in zip(documents, drawn, strict=True):
        ids = leading_special_tokens(tokenizer)
        hidden, tokens = [False] * len(ids), document.tokens.tolist()
        asked, questions, stops = list[tuple[list[int], int]](), {}, {}
        for number, length in enumerate(lengths):
            new = lines[number * count :][:count]
            own = [encode(line) for line in new]
            free = length - room - len(ids) - sum(map(len, own))
            if free < 3 * sum(map(len, own)):  # else nothing might be left to score
                raise UserError(
                    f"a text of {length} tokens has no room for {(number + 1) * count} numbers and "
                    "a question: hide fewer (--check-numbers), or choose other --check-lengths"
                )
            places = [0, *sorted(generator.integers(0, free + 1, count).tolist()), free]
            for (low, high), line in zip_longest(pairwise(places), own, fillvalue=[]):
                ids += tokens[low:high] + line
                hidden += [False] * (high - low) + [True] * len(line)
            tokens, stops[length] = tokens[free:], length - room
            asked += [_question(encode, line) for line in new]
            some = generator.choice(len(asked), count, replace=False).tolist()
            questions[length] = [asked[index] for index in sorted(some)]
        marked = torch.tensor(ids), torch.tensor(hidden), stops, questions
        texts.append(MarkedText(document.id, *marked, leading_special_tokens(tokenizer)))
    return texts


def _draw_lines(
    generator: np.random.Generator, tokenizer: PreTrainedTokenizerBase, count: int
) -> list[str]:
    keys = draw_distinct(generator, "words", count)
    values = draw_distinct(generator, "numbers", count)
    check_reproduced(tokenizer, values)
    named = zip(keys, values, strict=True)
    return [f"\n{NEEDLE.format(kind='numbers', key=key, value=value)}\n" for key, value in named]


def _question(encode: Encode, line: str) -> tuple[list[int], int]:
    """The tokens of a line up to its number, and the number."""
    question, _, value = line.rpartition(" ")
    return encode(question), int(value.strip(" .\n"))


@torch.no_grad()  # and not inference mode: what a model keeps may be used in training next
def read_marked(
    module: PreTrainedModel, text: MarkedText, lengths: Sequence[int], scored: int
) -> tuple[DynamicCache, list[dict[str, Any]], dict[str, float]]:
    """Read a text up to the largest of some lengths.

    Args:
        module: The model.
        text: The text.
        lengths: Where to score, in tokens.
        scored: Tokens to score at each, but for what is hidden.

    Returns:
        The cache of what is read; nats (None if they overflow) and tokens that are scored by
        length; seconds that reading took, and on a GPU megabytes beside the weights, with the
        logits of all that is scored.

    Raises:
        UserError: If the model returns NaN.
    """
    targets = [text.targets(length, scored) for length in lengths]
    ids, ends = text.ids[: text.stops[max(lengths)]], [len(each) for each in targets]
    places, answers = torch.cat(targets) - 1, text.ids[torch.cat(targets)]
    device, cache, logits = module.device, DynamicCache(), list[Tensor]()
    inputs = {"input_ids": ids[None].to(device), "logits_to_keep": places.to(device), CACHE: cache}
    started = time.perf_counter()
    peak = peak_growth(lambda: logits.append(module(**inputs).logits[0]), str(device))
    seconds = time.perf_counter() - started
    nats = F.cross_entropy(logits[0].float(), answers.to(device), reduction="none").double().cpu()
    if nats.isnan().any():
        raise UserError(f"the model returns NaN for document {text.id!r}: try float32")
    sums = ((each.sum().item(), len(each)) for each in nats.split(ends))
    scores = [{"nats": x if math.isfinite(x) else None, "tokens": count} for x, count in sums]
    # On a CPU it is the growth of the process, which depends on what that did before.
    return (
        cache,
        scores,
        {"seconds": seconds} | ({} if device.type == "cpu" else {"megabytes": peak}),
    )


def ask_for_numbers(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: MarkedText,
    length: int,
    cache: DynamicCache,
) -> list[bool]:
    """Which numbers are found at a length; the cache then has the tokens up to there."""
    found, stop = [], text.stops[length]
    for question, number in text.questions[length]:
        if (more := cache.get_seq_length() - stop) > 0:
            cache.crop(-more)
        prompt = torch.cat((text.ids[:stop], torch.tensor(question)))[None]
        most = len(tokenizer(f" {number}.", add_special_tokens=False)["input_ids"])
        (answer,) = greedy_answers(module, tokenizer, prompt, max_new_tokens=most, cache=cache)
        found.append(is_hit(answer, number))
    return found
