"""Prompts of tasks that a model answers, and their settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coca_attention.errors import UserError
from coca_lab.data.passkey import Prompt
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, Model, RotaryScaling, check_at_least
from coca_lab.generation import greedy_answers

LONGEST = 10**7
"""Tokens of a prompt at most; making one takes some 70 bytes a token."""


@dataclass
class PromptSettings:
    """Which prompts a model answers, and how."""

    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    """Prompt lengths in tokens."""
    samples: int = 100
    """Prompts per length."""
    seed: int = 0
    """Random seed of the prompts."""
    max_new_tokens: int = 64
    """Maximum number of tokens in an answer."""
    batch_tokens: int = 16384
    """Prompt tokens per batch; a batch has at least one prompt."""
    use_cache: bool = True
    """Whether to decode with a key/value cache; the result is the same."""


def check_prompts(settings: PromptSettings) -> None:
    """Raise UserError unless the numbers are in range."""
    if not settings.lengths:
        raise UserError("give at least one prompt length")
    for length in settings.lengths:
        if not 1 <= length <= LONGEST:
            raise UserError(f"lengths must be between 1 and {LONGEST} tokens, got {length}")
    check_at_least(settings, 1, "samples", "max_new_tokens", "batch_tokens")
    check_at_least(settings, 0, "seed")


def measure_prompts(
    model: Model,
    length: int,
    make: Callable[[Sequence[int]], list[Prompt]],
    score: Callable[[str, Prompt], dict[str, Any]],
    statistics: Callable[[list[Cell]], Cell],
    settings: PromptSettings,
    about: dict[str, Any],
    scaling: RotaryScaling,
) -> Measurement:
    """All prompts of one kind and length, a batch an item, and their cell with its ``samples``.

    ``make`` makes the prompts of some indices; ``score`` and ``statistics`` add fields to the
    record of an answer and, from all records, to the cell, which ``about`` identifies.
    """
    make([0])  # UserError if it does not fit
    about = {**about, "max_new_tokens": settings.max_new_tokens}
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
        with scaling.applied(model.module, read) as rope:
            pass
        cell = {
            **about,
            **model.facts,
            **scaling.facts,
            "rope_parameters": rope,
            "seconds": seconds,
            "samples": records,
        }
        return [cell | statistics(records)]

    return Measurement(items, cells)
