"""The needles task: a model, a tokenizer, kinds and lengths in; plain JSON values out."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.data.passkey import encoder, leading_special_tokens
from coca_attention.errors import UserError
from coca_attention.evaluation.generation import (
    GenerationSettings,
    Prompt,
    answered_cell,
    wilson_interval,
)
from coca_attention.evaluation.journal import Journal
from coca_attention.evaluation.needles.samples import KINDS, NAMES, Kind, needle_text


@dataclass
class NeedleSettings(GenerationSettings):
    """Which needle prompts a model is asked."""

    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    """Lengths of the prompts in tokens."""
    kinds: list[Kind] = field(
        default_factory=lambda: ["single", "multi-key", "multi-value", "variables"]
    )
    """single, multi-key, multi-value, variables: README.md of this task says what they are."""
    samples: int = 50
    """Prompts of every kind and length."""
    count: int = 4
    """Facts in a prompt, for all kinds but single."""
    seed: int = 0
    """Seed of names, values and places."""


def needle_prompts(
    tokenizer: PreTrainedTokenizerBase, settings: NeedleSettings, kind: Kind, length: int
) -> list[Prompt]:
    """The prompts of one kind and length: the same for the same tokenizer, settings and seed.

    Raises:
        UserError: If the length is too short, or the tokenizer cannot write the needles.
    """
    encode, before = encoder(tokenizer), leading_special_tokens(tokenizer)
    prompts = []
    for index in range(settings.samples):
        text = needle_text(
            encode,
            kind,
            length,
            (settings.seed, KINDS.index(kind), length, index),
            count=settings.count,
            before=before,
        )
        for needle in text.needles:
            written = str(tokenizer.decode(encode(needle))).strip()
            if words(written) != words(needle):
                raise UserError(
                    f"the tokenizer turns {needle!r} into {written!r}: it cannot write names and "
                    "digits as they are, so no answer could be right"
                )
        facts = {
            "index": index,
            "expected": text.expected,
            "needles": text.needles,
            "depths": text.depths,
            "distances": text.distances,
        }
        prompts.append(Prompt(text.ids, facts))
    return prompts


def words(text: str) -> list[str]:
    """Numbers and words of a text, each whole."""
    return re.findall(r"\d+|[^\W\d_]+", text)


def recall(answer: str, expected: list[str]) -> float:
    """Share of the expected numbers or names that an answer holds, each whole."""
    found = set(words(answer))
    return sum(item in found for item in expected) / len(expected)


def check_settings(settings: NeedleSettings) -> None:
    """Raise UserError unless the numbers are in range."""
    if not settings.lengths or not settings.kinds:
        raise UserError("give at least one prompt length and one kind")
    unknown = sorted(set(settings.kinds) - set(KINDS))
    if unknown:
        raise UserError(f"unknown kinds {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    for name in ("samples", "count", "max_new_tokens", "batch_tokens"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if settings.count > len(NAMES):
        raise UserError(f"count must be at most {len(NAMES)}, got {settings.count}")


def evaluate_needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: NeedleSettings,
    *,
    scaling: str = "none",
    factor: float = 1.0,
    name: str = "model",
    identity: str = "",
    journal: Journal | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Share of facts found, for every kind and prompt length.

    Arguments and errors as of `evaluate_passkey`.

    Returns:
        One cell per kind and length: the mean recall, the share of full answers with its Wilson
        interval, and every sample's record.
    """
    check_settings(settings)
    every = {
        (kind, length): needle_prompts(tokenizer, settings, kind, length)
        for kind in settings.kinds
        for length in settings.lengths
    }
    cells = []
    for (kind, length), prompts in every.items():
        cell = answered_cell(
            model,
            tokenizer,
            prompts,
            lambda answer, prompt: {"recall": recall(answer, prompt.facts["expected"])},
            settings,
            {
                "task": "needles",
                "kind": kind,
                "length": length,
                "count": settings.count,
                "seed": settings.seed,
            },
            scaling=scaling,
            factor=factor,
            name=name,
            identity=identity,
            journal=journal,
            progress=progress,
        )
        recalls = [record["recall"] for record in cell["samples"]]
        full = recalls.count(1.0)
        cells.append(
            {
                **cell,
                "recall": fmean(recalls),
                "full": full / len(recalls),
                "wilson95": wilson_interval(full, len(recalls)),
            }
        )
    return cells
