"""The passkey task: prompts, scoring and evaluation."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from coca_attention.data.passkey import (
    KEY_LINE,
    draw_key,
    encoder,
    leading_special_tokens,
    passkey_text,
)
from coca_attention.errors import UserError
from coca_attention.evaluation.prompts import (
    Prompt,
    PromptSettings,
    check_prompts,
    prompt_costs,
)
from coca_attention.evaluation.task import Cell, Session, Subject, Task, check_at_least
from coca_attention.intervals import wilson_interval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class PasskeySettings(PromptSettings):
    """Which passkey prompts to use (CoCA paper, App. B.1)."""

    depths: int | None = None
    """Number of evenly spaced depths that the keys cycle through; by default depths are random."""


def passkey_prompts(
    tokenizer: "PreTrainedTokenizerBase", settings: PasskeySettings, length: int
) -> list[Prompt]:
    """The prompts of one length; tokenizer, settings and seed determine them.

    Raises:
        UserError: If the length is too short, or the tokenizer cannot write the key's digits.
    """
    encode, before = encoder(tokenizer), leading_special_tokens(tokenizer)
    prompts = []
    for index in range(settings.samples):
        key, depth = draw_key(np.random.default_rng([settings.seed, length, index]))
        if settings.depths is not None:
            depth = index % settings.depths / max(settings.depths - 1, 1)
        line = tokenizer.decode(encode(KEY_LINE.format(key=key)))
        if re.findall(r"\d+", str(line)) != [str(key), str(key)]:
            raise UserError(
                f"the tokenizer turns the key {key} into {str(line)!r}: it does not "
                "reproduce digits, so no answer could be correct"
            )
        text = passkey_text(encode, key, length, depth, before=before)
        facts = {"index": index, "key": key, "depth": text.depth, "distance": text.distance}
        prompts.append(Prompt(text.ids, facts))
    return prompts


def is_hit(answer: str, key: int) -> bool:
    """Whether the first number in an answer is the key: exactly its five digits."""
    found = re.search(r"\d+", answer)
    return found is not None and found.group() == str(key)


def check_settings(settings: PasskeySettings) -> None:
    """Raise UserError unless the numbers are in range."""
    check_prompts(settings)
    check_at_least(settings, 1, "depths")


def evaluate_passkey(subject: Subject, settings: PasskeySettings, session: Session) -> list[Cell]:
    """Share of keys found at every prompt length.

    Args:
        subject: The model.
        settings: Lengths, samples, depths.
        session: Rotary scaling, journal and progress.

    Returns:
        One cell per length with the record of every sample: plain JSON values.

    Raises:
        UserError: If a setting is out of range, a prompt does not fit, or the model does not
            support the scaling or cannot read that many tokens.
    """
    from coca_attention.evaluation.generation import answer_prompts

    check_settings(settings)
    prompts = {
        length: passkey_prompts(subject.tokenizer, settings, length) for length in settings.lengths
    }
    cells = []
    for length in settings.lengths:
        about = {
            "task": "passkey",
            "length": length,
            "seed": settings.seed,
            "depths": settings.depths,
        }
        cell = answer_prompts(
            subject,
            prompts[length],
            lambda answer, prompt: {"hit": is_hit(answer, prompt.facts["key"])},
            settings,
            about,
            session,
        )
        hits, trials = sum(record["hit"] for record in cell["samples"]), settings.samples
        cells.append({**cell, "accuracy": hits / trials, "wilson95": wilson_interval(hits, trials)})
    return cells


def _prepare(subject: Subject, settings: PasskeySettings) -> None:
    for length in settings.lengths:
        passkey_prompts(subject.tokenizer, replace(settings, samples=1), length)


TASK = Task(
    "passkey",
    "Passkey retrieval: does a model find five digits hidden in a long prompt?",
    PasskeySettings,
    evaluate_passkey,
    check_settings,
    prompt_costs,
    _prepare,
)
