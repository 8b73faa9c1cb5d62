"""What a model finds in its text: passkeys, and what RULER's tasks hide.

docs/evaluation.md describes the tasks.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch.utils.data import BatchSampler

from coca_attention.errors import UserError
from coca_lab.data import SourceSettings
from coca_lab.data.chat import THINK, Thinking, chat_frame
from coca_lab.data.ruler import (
    ANSWER_TOKENS,
    NEEDLE_TASKS,
    NOISE,
    RULER_TASKS,
    RulerTask,
    ask_for_ruler,
    string_match,
)
from coca_lab.data.tasks import Prompt, ask_for_passkeys, is_hit
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.generation import greedy_answers
from coca_lab.intervals import wilson_interval

log = logging.getLogger(__name__)

# Making a prompt takes some 70 bytes a token.
Lengths = Annotated[list[Annotated[int, Field(ge=1, le=10**7)]], Field(min_length=1)]


@dataclass
class PromptSettings:
    """Which prompts a model answers, and how."""

    lengths: Lengths = field(default_factory=lambda: [512, 1024])
    """Prompt lengths in tokens."""
    samples: PositiveInt = 100
    """Prompts per length."""
    seed: NonNegativeInt = 0
    """Random seed of the prompts."""
    batch_tokens: PositiveInt = 16384
    """Prompt tokens per batch; a batch has at least one prompt."""
    use_cache: bool = True
    """Whether to decode with a key/value cache; the result is the same."""


def measure_prompts(
    model: Model,
    settings: PromptSettings,
    method: MethodSettings,
    about: Cell,
    make: Callable[[Sequence[int]], list[Prompt]],
    score: Callable[[str, Prompt], Cell],
    statistics: Callable[[list[Cell]], Cell],
) -> Measurement:
    """The prompts of one kind and length, a batch an item, and their cell with its ``samples``."""
    length = len(make([0])[0].ids)  # UserError if it does not fit
    most = about["max_new_tokens"]

    def answer(indices: list[int]) -> list[Cell]:
        prompts = make(indices)
        if model.endpoint:
            answers = model.endpoint.answers(model.tokenizer, prompts, most)
        else:
            module = model.loaded()
            with method.applied(module, length + most):
                answers = greedy_answers(
                    module,
                    model.tokenizer,
                    torch.tensor([prompt.ids for prompt in prompts]),
                    max_new_tokens=most,
                    use_cache=settings.use_cache,
                )
        return [
            {**prompt.facts, "output": answer, **score(answer, prompt)}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    label = " ".join((model.name, *method.words, about.get("kind", ""), f"{about['length']:,}"))
    size = model.endpoint.requests if model.endpoint else settings.batch_tokens // length
    items = []
    for indices in BatchSampler(range(settings.samples), max(1, size), drop_last=False):
        # A generated token takes about as long as four that are read.
        cost = len(indices) * (length + 4 * most)
        keys = [[about, method.facts, index] for index in indices]
        items.append(Item(keys, answer, indices, cost, label=label))

    def cells(records: list[Cell]) -> list[Cell]:
        rope = model.module and method.parameters(model.module, length + most)
        return [{**about, "rope_parameters": rope, "samples": records, **statistics(records)}]

    return Measurement(items, cells)


@dataclass
class PasskeySettings(PromptSettings):
    """Which passkey prompts to use (CoCA paper, App. B.1)."""

    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens in an answer."""
    depths: PositiveInt | None = None
    """Number of evenly spaced depths that the keys cycle through; by default depths are random."""


def measure_passkeys(
    model: Model, settings: PasskeySettings, method: MethodSettings
) -> list[Measurement]:
    """Share of keys found at every prompt length: a cell each, with the record of every sample."""
    same: Any = {"seed": settings.seed, "depths": settings.depths}
    about = {**same, "max_new_tokens": settings.max_new_tokens}
    return [
        measure_prompts(
            model,
            settings,
            method,
            {**about, "length": length},
            partial(ask_for_passkeys, model.tokenizer, length, **same),
            lambda answer, prompt: {"hit": is_hit(answer, prompt.facts["key"])},
            _share_found,
        )
        for length in settings.lengths
    ]


def _share_found(records: list[Cell]) -> Cell:
    hits, trials = sum(record["hit"] for record in records), len(records)
    return {"accuracy": hits / trials, "wilson95": wilson_interval(hits, trials)}


PASSKEY_TASK = Task(
    "passkey",
    "Passkey retrieval: does a model find five digits hidden in a long prompt?",
    PasskeySettings,
    measure=measure_passkeys,
    prompts=True,
)


@dataclass
class RulerSettings(SourceSettings, PromptSettings):
    """Which prompts of RULER's tasks to use.

    The source is the text that needles are hidden in where RULER has essays.
    """

    lengths: Lengths = field(default_factory=lambda: [4096, 8192])
    """Tokens of prompt and answer together."""
    kinds: Annotated[list[RulerTask], Field(min_length=1)] = field(
        default_factory=lambda: [*RULER_TASKS]
    )
    """RULER's names of tasks; docs/evaluation.md describes them."""
    samples: PositiveInt = 50
    """Prompts per task and length."""
    chat: bool = False
    """Whether prompts are in the tokenizer's chat template; by default they are plain text."""
    thinking: Thinking = "default"
    """Whether a model with a chat thinks first, where its chat template has enable_thinking; by
    default as the template says. What it thinks counts as the answer, and towards its length."""

    def __post_init__(self) -> None:
        if self.thinking != "default" and not self.chat:
            raise UserError("thinking is said in the chat template: set --chat")


def measure_ruler(
    model: Model, settings: RulerSettings, method: MethodSettings
) -> list[Measurement]:
    """Mean share of what is expected: a cell for every task and length."""
    if settings.chat:
        _, closing = chat_frame(model.tokenizer, settings.thinking)
        if closing.rstrip().endswith(THINK):
            log.warning(
                "%s: the chat template ends in %s, so what is scored is what the model thinks: set "
                "--thinking off, if the template takes it",
                model.name,
                THINK,
            )
    words: list[str] = []
    if any(_has_text(task) for task in settings.kinds):
        words = read_words(model, settings, max(settings.lengths))
    measurements = []
    for task, length in product(settings.kinds, settings.lengths):
        # Not more words than tokens, so that a prompt does not depend on the other lengths.
        filler = " ".join(words[:length]) if _has_text(task) else NOISE
        about: Cell = {"kind": task, "length": length, "chat": settings.chat}
        about |= {"seed": settings.seed, "max_new_tokens": ANSWER_TOKENS[task]}
        about["filler"] = hashlib.sha256(filler.encode()).hexdigest()[:16]
        same: Any = {"seed": settings.seed, "filler": filler, "chat": settings.chat}
        if settings.chat:
            about["thinking"] = same["thinking"] = settings.thinking
        measurements.append(
            measure_prompts(
                model,
                settings,
                method,
                about,
                partial(ask_for_ruler, model.tokenizer, task, length, **same),
                lambda answer, prompt: {"score": string_match(answer, prompt.facts["expected"])},
                _mean_score,
            )
        )
    return measurements


def _has_text(task: RulerTask) -> bool:
    return task in NEEDLE_TASKS and NEEDLE_TASKS[task].haystack == "text"


def read_words(model: Model, source: SourceSettings, count: int) -> list[str]:
    """The first words of a source, all of them if it has fewer."""
    name = f"{count} words of {source.source} {source.text_field} {source.bad_lines}"
    if name not in model.texts:
        words = (word for document in source.documents() for word in document.text.split())
        model.texts[name] = [*islice(words, count)]
    return model.texts[name]


def _mean_score(records: list[Cell]) -> Cell:
    scores = [record["score"] for record in records]
    return {"score": fmean(scores), "wilson95": wilson_interval(sum(scores), len(scores))}


RULER_TASK = Task(
    "ruler",
    "RULER's tasks: needles, chains of variables, frequent words.",
    RulerSettings,
    measure=measure_ruler,
    prompts=True,
)
