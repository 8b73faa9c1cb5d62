"""Passkey retrieval (CoCA paper, App. B.1). README.md in this folder describes the task."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from coca_lab.data.passkey import Prompt, ask_for_passkeys, is_hit
from coca_lab.evaluation.prompts import PromptSettings, check_prompts, measure_prompts
from coca_lab.evaluation.task import Cell, Measurement, Model, RotaryScaling, Task, check_at_least
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
    """The prompts of one length, or some; tokenizer, settings and seed determine them."""
    chosen = range(settings.samples) if indices is None else indices
    return ask_for_passkeys(tokenizer, length, chosen, seed=settings.seed, depths=settings.depths)


def check_settings(settings: PasskeySettings) -> None:
    """Raise UserError unless the numbers are in range."""
    check_prompts(settings)
    check_at_least(settings, 1, "depths")


def measure_passkeys(
    model: Model, settings: PasskeySettings, scaling: RotaryScaling
) -> list[Measurement]:
    """Share of keys found at every prompt length: a cell each, with the record of every sample."""

    def measure(length: int) -> Measurement:
        about = {
            "task": "passkey",
            "length": length,
            "seed": settings.seed,
            "depths": settings.depths,
        }
        return measure_prompts(
            model,
            length,
            lambda indices: passkey_prompts(model.tokenizer, settings, length, indices),
            lambda answer, prompt: {"hit": is_hit(answer, prompt.facts["key"])},
            _statistics,
            settings,
            about,
            scaling,
        )

    return [measure(length) for length in settings.lengths]


def _statistics(records: list[Cell]) -> Cell:
    hits, trials = sum(record["hit"] for record in records), len(records)
    return {"accuracy": hits / trials, "wilson95": wilson_interval(hits, trials)}


TASK = Task(
    "passkey",
    "Passkey retrieval: does a model find five digits hidden in a long prompt?",
    PasskeySettings,
    check=check_settings,
    measure=measure_passkeys,
)
