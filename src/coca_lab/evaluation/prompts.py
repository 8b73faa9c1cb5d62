"""What a model finds in its text: passkeys, and what RULER's tasks hide.

docs/evaluation.md describes the tasks.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, product
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import BatchSampler

from coca_lab.data import SourceSettings, documents_of
from coca_lab.data.chat import THINK, chat_frame
from coca_lab.data.ruler import (
    ANSWER_TOKENS,
    NEEDLE_TASKS,
    NOISE,
    RulerTask,
    ask_for_ruler,
    string_match,
)
from coca_lab.data.tasks import Prompt, ask_for_passkeys, is_hit
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.generation import greedy_answers
from coca_lab.intervals import wilson_interval
from coca_lab.settings.evaluations import (
    PASSKEY,
    RULER,
    PasskeySettings,
    PromptSettings,
    RulerSettings,
)

log = logging.getLogger(__name__)


def measure_prompts(
    model: Model,
    settings: PromptSettings,
    method: MethodSettings,
    about: Cell,
    make: Callable[[Sequence[int]], list[Prompt]],
    score: Callable[[str, Prompt], float],
    names: tuple[str, str],
) -> Measurement:
    """The prompts of one kind and length, a batch an item, and their cell with its ``samples``.

    ``names`` are what a sample calls its score, and the cell their mean.
    """
    each, mean = names
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
            {**prompt.facts, "output": answer, each: score(answer, prompt)}
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
        scores = [record[each] for record in records]
        found = {mean: fmean(scores), "wilson95": wilson_interval(sum(scores), len(scores))}
        return [{**about, "rope_parameters": rope, "samples": records, **found}]

    return Measurement(items, cells)


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
            lambda answer, prompt: is_hit(answer, prompt.facts["key"]),
            ("hit", "accuracy"),
        )
        for length in settings.lengths
    ]


PASSKEY_TASK = Task(**vars(PASSKEY), measure=measure_passkeys)


def measure_ruler(
    model: Model, settings: RulerSettings, method: MethodSettings
) -> list[Measurement]:
    """Mean share of what is expected: a cell for every task and length."""
    if settings.chat:
        _, closing = chat_frame(model.tokenizer, settings.thinking)
        if closing.rstrip().endswith(THINK):
            log.warning(
                "%s: the chat template ends in %s, so what is scored is what the model thinks: set "
                "`thinking` to off, if the template takes it",
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
                lambda answer, prompt: string_match(answer, prompt.facts["expected"]),
                ("score", "score"),
            )
        )
    return measurements


def _has_text(task: RulerTask) -> bool:
    return task in NEEDLE_TASKS and NEEDLE_TASKS[task].haystack == "text"


def read_words(model: Model, source: SourceSettings, count: int) -> list[str]:
    """The first words of a source, all of them if it has fewer."""
    name = f"{count} words of {source.source} {source.text_field} {source.bad_lines}"
    if name not in model.texts:
        words = (word for document in documents_of(source) for word in document.text.split())
        model.texts[name] = [*islice(words, count)]
    return model.texts[name]


RULER_TASK = Task(**vars(RULER), measure=measure_ruler)
