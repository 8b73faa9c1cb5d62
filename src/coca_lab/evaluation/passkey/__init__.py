"""Passkey retrieval (CoCA paper, App. B.1). README.md in this folder describes the task."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from coca_lab.data.passkey import Prompt, ask_for_passkeys, is_hit
from coca_lab.evaluation.prompts import PromptSettings, check_prompts, prompt_part
from coca_lab.evaluation.task import Cell, Part, Session, Subject, Task, check_at_least
from coca_lab.intervals import wilson_interval


@dataclass
class PasskeySettings(PromptSettings):
    """Which passkey prompts to use (CoCA paper, App. B.1)."""

    depths: int | None = None
    """Number of evenly spaced depths that the keys cycle through; by default depths are random."""


def passkey_prompts(
    tokenizer: PreTrainedTokenizerBase,
    settings: PasskeySettings,
    length: int,
    indices: Sequence[int] | None = None,
) -> list[Prompt]:
    """The prompts of one length, or some; tokenizer, settings and seed determine them.

    Raises:
        UserError: If the length is too short, or the tokenizer cannot write the key's digits.
    """
    chosen = range(settings.samples) if indices is None else indices
    return ask_for_passkeys(tokenizer, length, chosen, seed=settings.seed, depths=settings.depths)


def check_settings(settings: PasskeySettings) -> None:
    """Raise UserError unless the numbers are in range."""
    check_prompts(settings)
    check_at_least(settings, 1, "depths")


def evaluate_passkey(subject: Subject, settings: PasskeySettings, session: Session) -> list[Cell]:
    """Share of keys found at every prompt length.

    Args:
        subject: The model.
        settings: Lengths, samples, depths.
        session: Rotary scaling and engine.

    Returns:
        One cell per length with the record of every sample: plain JSON values.

    Raises:
        UserError: If a setting is out of range, a prompt does not fit, or the model does not
            support the scaling or cannot read that many tokens.
    """
    check_settings(settings)
    return session.finish(passkey_parts(subject, settings, session))


def passkey_parts(subject: Subject, settings: PasskeySettings, session: Session) -> list[Part]:
    """The work of `evaluate_passkey`, which describes the arguments: a part for each length."""

    def part(length: int) -> Part:
        about = {
            "task": "passkey",
            "length": length,
            "seed": settings.seed,
            "depths": settings.depths,
        }
        return prompt_part(
            subject,
            length,
            lambda indices: passkey_prompts(subject.tokenizer, settings, length, indices),
            lambda answer, prompt: {"hit": is_hit(answer, prompt.facts["key"])},
            _statistics,
            settings,
            about,
            session,
        )

    return [part(length) for length in settings.lengths]


def _statistics(records: list[Cell]) -> Cell:
    hits, trials = sum(record["hit"] for record in records), len(records)
    return {"accuracy": hits / trials, "wilson95": wilson_interval(hits, trials)}


TASK = Task(
    "passkey",
    "Passkey retrieval: does a model find five digits hidden in a long prompt?",
    PasskeySettings,
    check=check_settings,
    parts=passkey_parts,
)
