"""What a model finds in its text: passkeys, needles, and pairs of associative recall.

docs/evaluation.md describes the tasks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from coca_lab.data.tasks import (
    NAMES,
    Kind,
    Prompt,
    ask_for_needles,
    ask_for_passkeys,
    is_hit,
    r_precision,
    recall_text,
)
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, Model, RotaryScaling, Task
from coca_lab.generation import greedy_answers
from coca_lab.intervals import wilson_interval

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
    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens in an answer."""
    batch_tokens: PositiveInt = 16384
    """Prompt tokens per batch; a batch has at least one prompt."""
    use_cache: bool = True
    """Whether to decode with a key/value cache; the result is the same."""


def measure_prompts(
    model: Model,
    settings: PromptSettings,
    scaling: RotaryScaling,
    about: dict[str, Any],
    make: Callable[[Sequence[int]], list[Prompt]],
    score: Callable[[str, Prompt], Cell],
    statistics: Callable[[list[Cell]], Cell],
) -> Measurement:
    """The prompts of one kind and length, a batch an item, and their cell with its ``samples``."""
    make([0])  # UserError if it does not fit
    about, length = {**about, "max_new_tokens": settings.max_new_tokens}, about["length"]
    read = length + settings.max_new_tokens
    key = {**about, "model": model.identity, **scaling.facts}
    label = f"{model.name} {scaling.kind} {about.get('kind', about['task'])} {length}"
    size = max(1, settings.batch_tokens // length)

    def answer(indices: list[int]) -> list[Cell]:
        prompts, module = make(indices), model.loaded()
        with scaling.applied(module, read):
            answers = greedy_answers(
                module,
                model.tokenizer,
                torch.tensor([prompt.ids for prompt in prompts]),
                max_new_tokens=settings.max_new_tokens,
                use_cache=settings.use_cache,
            )
        return [
            {**prompt.facts, "output": answer, **score(answer, prompt)}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    items = []
    for start in range(0, settings.samples, size):
        indices = range(start, min(start + size, settings.samples))
        # A generated token takes about as long as four that are read.
        cost = len(indices) * (length + 4 * settings.max_new_tokens)
        keys = [[key, index] for index in indices]
        items.append(Item(keys, answer, indices, cost, label=label))

    def cells(records: list[Cell], seconds: float) -> list[Cell]:
        cell = {
            **about,
            **model.facts,
            **scaling.facts,
            "rope_parameters": scaling.parameters(model.module, read),
            "seconds": seconds,
            "samples": records,
        }
        return [cell | statistics(records)]

    return Measurement(items, cells)


@dataclass
class PasskeySettings(PromptSettings):
    """Which passkey prompts to use (CoCA paper, App. B.1)."""

    depths: PositiveInt | None = None
    """Number of evenly spaced depths that the keys cycle through; by default depths are random."""


def measure_passkeys(
    model: Model, settings: PasskeySettings, scaling: RotaryScaling
) -> list[Measurement]:
    """Share of keys found at every prompt length: a cell each, with the record of every sample."""
    same: Any = {"seed": settings.seed, "depths": settings.depths}
    return [
        measure_prompts(
            model,
            settings,
            scaling,
            {"task": "passkey", "length": length, **same},
            partial(ask_for_passkeys, model.tokenizer, length, **same),
            lambda answer, prompt: {"hit": is_hit(answer, prompt.facts["key"])},
            _share_found,
        )
        for length in settings.lengths
    ]


def _share_found(records: list[Cell]) -> Cell:
    hits, trials = sum(record["hit"] for record in records), len(records)
    return {"accuracy": hits / trials, "wilson95": wilson_interval(hits, trials)}


PASSKEYS = Task(
    "passkey",
    "Passkey retrieval: does a model find five digits hidden in a long prompt?",
    PasskeySettings,
    measure=measure_passkeys,
)


@dataclass
class NeedleSettings(PromptSettings):
    """Which needle prompts to use."""

    kinds: Annotated[list[Kind], Field(min_length=1)] = field(
        default_factory=lambda: ["single", "multi-key", "multi-value", "variables"]
    )
    """single, multi-key, multi-value, variables; docs/evaluation.md describes them."""
    samples: PositiveInt = 50
    """Prompts per kind and length."""
    count: Annotated[int, Field(ge=1, le=len(NAMES))] = 4
    """Facts in a prompt, or variables of a chain, for every kind except single."""


def measure_needles(
    model: Model, settings: NeedleSettings, scaling: RotaryScaling
) -> list[Measurement]:
    """Mean `r_precision` and share of complete answers: a cell for every kind and length."""
    same: Any = {"count": settings.count, "seed": settings.seed}
    return [
        measure_prompts(
            model,
            settings,
            scaling,
            {"task": "needles", "metric": "R-precision", "kind": kind, "length": length, **same},
            partial(ask_for_needles, model.tokenizer, kind, length, **same),
            lambda answer, prompt: {"recall": r_precision(answer, prompt.facts["expected"])},
            _mean_recall,
        )
        for kind, length in product(settings.kinds, settings.lengths)
    ]


def _mean_recall(records: list[Cell]) -> Cell:
    recalls = [record["recall"] for record in records]
    full, trials = recalls.count(1.0), len(recalls)
    shares = {"recall": fmean(recalls), "full": full / trials}
    return {**shares, "wilson95": wilson_interval(full, trials)}


NEEDLES = Task(
    "needles",
    "Needles of RULER's kinds: one or several facts in a long prompt, and chains of variables.",
    NeedleSettings,
    measure=measure_needles,
)


@torch.inference_mode()
def measure_recall(
    model: Any,
    vocabulary: list[int],
    *,
    length: int,
    pairs: int,
    texts: int,
    seed: int,
    batch_tokens: int = 8192,
) -> dict[str, Any]:
    """How often the likeliest token is the answer, by octave of the distance from its pair."""
    # A text is read in one pass: what the model says at one answer does not depend on the others.
    every = [
        recall_text(vocabulary, pairs, length, np.random.default_rng([seed, length, pairs, index]))
        for index in range(texts)
    ]
    asked, right = np.zeros((2, 64), dtype=int)
    size = max(1, batch_tokens // length)
    for start in range(0, texts, size):
        batch = every[start : start + size]
        ids = torch.from_numpy(np.stack([text.ids for text in batch])).to(model.device)
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1).cpu().numpy()
        for text, said in zip(batch, best, strict=True):
            octaves = np.log2(text.distances).astype(int)
            asked += np.bincount(octaves, minlength=64)
            hits = said[text.answers - 1] == text.ids[text.answers]
            right += np.bincount(octaves[hits], minlength=64)
    counts = {str(1 << i): [int(asked[i]), int(right[i])] for i in np.flatnonzero(asked).tolist()}
    sums = {"asked": int(asked.sum()), "right": int(right.sum())}
    return {"length": length, "pairs": pairs, **sums, "octaves": counts}
