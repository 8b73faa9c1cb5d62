"""Needles of RULER's kinds. README.md in this folder describes the task."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.needles import KINDS, NAMES, Kind, ask_for_needles, r_precision
from coca_lab.data.passkey import Prompt
from coca_lab.evaluation.prompts import PromptSettings, check_prompts, measure_prompts
from coca_lab.evaluation.task import Cell, Measurement, Model, RotaryScaling, Task, check_at_least
from coca_lab.intervals import wilson_interval

METRIC = "R-precision"
"""What ``recall`` is."""


@dataclass
class NeedleSettings(PromptSettings):
    """Which needle prompts to use."""

    kinds: list[Kind] = field(
        default_factory=lambda: ["single", "multi-key", "multi-value", "variables"]
    )
    """single, multi-key, multi-value, variables; the task's README.md describes them."""
    samples: int = 50
    """Prompts per kind and length."""
    count: int = 4
    """Facts in a prompt, or variables of a chain, for every kind except single."""


def needle_prompts(
    tokenizer: PreTrainedTokenizerBase,
    settings: NeedleSettings,
    kind: Kind,
    length: int,
    indices: Sequence[int] | None = None,
) -> list[Prompt]:
    """The prompts of one kind and length, or some; tokenizer, settings and seed determine them."""
    chosen = range(settings.samples) if indices is None else indices
    return ask_for_needles(
        tokenizer, kind, length, chosen, seed=settings.seed, count=settings.count
    )


def check_settings(settings: NeedleSettings) -> None:
    """Raise UserError unless the numbers are in range."""
    check_prompts(settings)
    if not settings.kinds:
        raise UserError("give at least one kind")
    unknown = sorted(set(settings.kinds) - set(KINDS))
    if unknown:
        raise UserError(f"unknown kinds {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    check_at_least(settings, 1, "count")
    if settings.count > len(NAMES):
        raise UserError(f"count must be at most {len(NAMES)}, got {settings.count}")


def measure_needles(
    model: Model, settings: NeedleSettings, scaling: RotaryScaling
) -> list[Measurement]:
    """Mean `r_precision` and share of complete answers: a cell for every kind and length."""

    def measure(kind: Kind, length: int) -> Measurement:
        about = {
            "task": "needles",
            "metric": METRIC,
            "kind": kind,
            "length": length,
            "count": settings.count,
            "seed": settings.seed,
        }
        return measure_prompts(
            model,
            length,
            lambda indices: needle_prompts(model.tokenizer, settings, kind, length, indices),
            lambda answer, prompt: {"recall": r_precision(answer, prompt.facts["expected"])},
            _statistics,
            settings,
            about,
            scaling,
        )

    return [measure(kind, length) for kind, length in product(settings.kinds, settings.lengths)]


def _statistics(records: list[Cell]) -> Cell:
    recalls = [record["recall"] for record in records]
    full, trials = recalls.count(1.0), len(recalls)
    return {
        "recall": fmean(recalls),
        "full": full / trials,
        "wilson95": wilson_interval(full, trials),
    }


TASK = Task(
    "needles",
    "Needles of RULER's kinds: one or several facts in a long prompt, and chains of variables.",
    NeedleSettings,
    check=check_settings,
    measure=measure_needles,
)
