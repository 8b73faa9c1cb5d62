"""What ``coca extend --check`` measures: every method by perplexity and needles on one text.

The tasks, the engine and the store are those of any study; `coca_lab.evaluation.choice` decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import PositiveInt

from coca_attention.errors import UserError
from coca_attention.models import METHODS
from coca_lab.data.documents import BadLines, PathText
from coca_lab.engine import Engine
from coca_lab.evaluation.choice import RULE, Choice, Margins, Read
from coca_lab.evaluation.needles import NEEDLES_TASK, NeedleSettings, scores_of
from coca_lab.evaluation.perplexity import (
    PERPLEXITY_TASK,
    PerplexitySettings,
    TextSettings,
)
from coca_lab.evaluation.task import Cell, MethodSettings, Model, finish
from coca_lab.intervals import DocumentScore, mean_nats

SCORED_TOKENS = 1024
"""Tokens at the end of every document whose perplexity is measured, at most."""


@dataclass
class CheckSettings:
    """What the methods are measured on."""

    check: PathText = ""
    """Text on which every method is measured: stdlib; a file, folder or glob of .txt, .jsonl or
    .parquet; or hf:NAME. Perplexity and the log probability of numbers hidden in the text say which
    methods show no loss within L, and which of these is best beyond it."""
    check_lengths: list[PositiveInt] = field(default_factory=list)
    """Lengths of text to measure at beside L; by default 2 L, 4 L, … up to --to."""
    check_documents: PositiveInt = 10
    """Documents to read, of more tokens than the largest length."""
    check_numbers: PositiveInt = 10
    """Numbers that are hidden in a document for every length, and asked for there."""
    margin_perplexity: float = Margins.perplexity
    """Share of the perplexity within L whose loss does not matter."""
    margin_needles: float = Margins.needles
    """Nats a digit within L whose loss does not matter."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""


@dataclass(frozen=True)
class Check:
    """What was measured, and the method to take.

    Attributes:
        cells: Those of both tasks.
        choice: The method to take; the names of its readings are those of ``methods``.
        methods: By name.
        length: L, in tokens.
    """

    cells: list[Cell]
    choice: Choice
    methods: dict[str, MethodSettings]
    length: int

    @property
    def taken(self) -> MethodSettings | None:
        """The method to take."""
        return None if self.choice.taken is None else self.methods[self.choice.taken.method]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: what may be said of every method within L, and what it does beyond."""
        rows = []
        for each in (self.choice.base, *self.choice.others):
            chosen = " (taken)" if each is self.choice.taken else ""
            word = ""
            if each is not self.choice.base:
                word = each.word(self.choice.base, self.choice.margins)
            rows.append(
                [each.method + chosen, word, f"{mean_nats(each.far):.2f}", ", ".join(each.engines)]
            )
        return ["method", "within L", "nats a digit beyond L", "runs in"], rows

    @property
    def said(self) -> str:
        """The rule and what follows from it, in words."""
        return " ".join([RULE, self.choice.reason, *self.choice.warnings])


def check_methods(
    model: Model,
    methods: Sequence[MethodSettings],
    settings: CheckSettings,
    engine: Engine,
    *,
    length: int,
    to: int,
) -> Check:
    """Measure a model as it is and with every method.

    Args:
        model: The model.
        methods: Those to compare.
        settings: The text, and what is measured on it.
        engine: What computes, and keeps the values.
        length: L, in tokens.
        to: The longest text to read, in tokens.

    Raises:
        UserError: If the text is too short, or numbers cannot be hidden in it.
    """
    lengths = check_lengths(settings, length, to)
    text = TextSettings(
        source=settings.check,
        text_field=settings.text_field,
        bad_lines=settings.bad_lines,
        max_documents=settings.check_documents,
        max_tokens=lengths[-1] + 1,  # the last one read predicts one more
        skip_short=True,
    )
    tasks = [
        (
            PERPLEXITY_TASK,
            PerplexitySettings(
                **vars(text),
                windows=lengths,
                stride=max(1, min(SCORED_TOKENS, lengths[0] // 4)),
                attend_last=length,
            ),
        ),
        (
            NEEDLES_TASK,
            NeedleSettings(
                **vars(text), lengths=lengths, count=settings.check_numbers, near=length
            ),
        ),
    ]
    base = MethodSettings()
    measurements = [
        measurement
        for method in (base, *methods)
        for task, task_settings in tasks
        for measurement in task.measurements(model, task_settings, method)
    ]
    cells = finish(measurements, engine)
    margins = Margins(settings.margin_perplexity, settings.margin_needles)
    first, *others = (_read(cells, method, length) for method in (base, *methods))
    return Check(
        cells=cells,
        choice=Choice(replace(first, method="as it is"), others, margins),
        methods={method.name: method for method in methods},
        length=length,
    )


def check_lengths(settings: CheckSettings, length: int, to: int) -> list[int]:
    """Lengths to measure at: L, and by default its doubles up to ``to``."""
    doubles = [length << n for n in range(1, 20) if length << n < to]
    lengths = sorted({length, *(settings.check_lengths or [*doubles, to])})
    if lengths[-1] <= length:
        raise UserError(f"check_lengths need one above L = {length:,} tokens, got {lengths[-1]:,}")
    return lengths


def _read(cells: Sequence[Cell], method: MethodSettings, length: int) -> Read:
    """What one method has read."""
    perplexity: dict[int, list[DocumentScore]] = {}
    near: dict[int, list[DocumentScore]] = {}
    beyond: dict[int, list[DocumentScore]] = {}
    for cell in cells:
        if cell["scaling"] != method.name:
            continue
        if cell["task"] == "perplexity":
            if cell["window"] <= length:
                perplexity[cell["window"]] = [DocumentScore.of(x) for x in cell["documents"]]
        elif cell["length"] <= length:
            near[cell["length"]] = scores_of(cell["documents"])
        else:
            beyond[cell["length"]] = scores_of(cell["documents"], length, beyond=True)
    return Read(method.name, METHODS[method.method].engines, perplexity, near, beyond)
