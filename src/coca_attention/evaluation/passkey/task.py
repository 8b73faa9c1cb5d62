"""The passkey task: a model, a tokenizer, and lengths in; plain JSON values out."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.data.passkey import (
    KEY_LINE,
    encoder,
    leading_special_tokens,
    passkey_text,
)
from coca_attention.errors import UserError
from coca_attention.evaluation.generation import (
    GenerationSettings,
    Prompt,
    answered_cell,
    wilson_interval,
)
from coca_attention.evaluation.journal import Journal


@dataclass
class PasskeySettings(GenerationSettings):
    """Which passkey texts a model is asked (CoCA paper, App. B.1)."""

    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    """Lengths of the prompts in tokens."""
    samples: int = 100
    """Prompts of every length."""
    depths: int | None = None
    """Put the keys at so many evenly spaced depths in turn; by default at random depths."""
    seed: int = 0
    """Seed of keys and depths."""


def passkey_prompts(
    tokenizer: PreTrainedTokenizerBase, settings: PasskeySettings, length: int
) -> list[Prompt]:
    """The prompts of one length: the same ones for the same tokenizer, settings and seed.

    Raises:
        UserError: If the length is too short, or the tokenizer cannot write the key's digits.
    """
    encode, before = encoder(tokenizer), leading_special_tokens(tokenizer)
    prompts = []
    for index in range(settings.samples):
        drawn = np.random.default_rng([settings.seed, length, index])
        key, depth = int(drawn.integers(10_000, 100_000)), float(drawn.random())
        if settings.depths is not None:
            depth = index % settings.depths / max(settings.depths - 1, 1)
        line = tokenizer.decode(encode(KEY_LINE.format(key=key)))
        if re.findall(r"\d+", str(line)) != [str(key), str(key)]:
            raise UserError(
                f"the tokenizer turns the key {key} into {str(line)!r}: it cannot write digits as "
                "they are, so no answer could be right"
            )
        text = passkey_text(encode, key, length, depth, before=before)
        facts = {"index": index, "key": key, "depth": text.depth, "distance": text.distance}
        prompts.append(Prompt(text.ids, facts))
    return prompts


def is_hit(answer: str, key: int) -> bool:
    """Whether the first number of an answer is the key: all five digits and no more."""
    found = re.search(r"\d+", answer)
    return found is not None and found.group() == str(key)


def check_settings(settings: PasskeySettings) -> None:
    """Raise UserError unless the numbers are in range."""
    if not settings.lengths:
        raise UserError("give at least one prompt length")
    for name in ("samples", "max_new_tokens", "batch_tokens"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if settings.depths is not None and settings.depths < 1:
        raise UserError(f"depths must be at least 1, got {settings.depths}")


def evaluate_passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: PasskeySettings,
    *,
    scaling: str = "none",
    factor: float = 1.0,
    name: str = "model",
    identity: str = "",
    journal: Journal | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Share of keys found at every prompt length.

    Args:
        model: A causal language model of Transformers.
        tokenizer: Its tokenizer.
        settings: Lengths, samples, depths.
        scaling: Rotary scaling; ``ntk`` fixes the base from prompt and answer, ``none`` leaves
            the model as it was loaded.
        factor: The scaling's factor.
        name: What the results call the model.
        identity: What tells the model from others in the journal (`fingerprint`).
        journal: Where finished samples are kept, and found again.
        progress: Called with a label, the samples done and the samples to do.

    Returns:
        One cell per length, every sample's record in it: plain JSON values.

    Raises:
        UserError: If a setting is out of range, a prompt does not fit, or the model cannot be
            scaled so or read so many tokens.
    """
    check_settings(settings)
    every = {length: passkey_prompts(tokenizer, settings, length) for length in settings.lengths}
    cells = []
    for length, prompts in every.items():
        cell = answered_cell(
            model,
            tokenizer,
            prompts,
            lambda answer, prompt: {"hit": is_hit(answer, prompt.facts["key"])},
            settings,
            {
                "task": "passkey",
                "length": length,
                "seed": settings.seed,
                "depths": settings.depths,
            },
            scaling=scaling,
            factor=factor,
            name=name,
            identity=identity,
            journal=journal,
            progress=progress,
        )
        hits, trials = sum(record["hit"] for record in cell["samples"]), len(prompts)
        cells.append({**cell, "accuracy": hits / trials, "wilson95": wilson_interval(hits, trials)})
    return cells
