"""What ``coca extend --check`` measures: every method by perplexity and needles on one text.

The tasks, the engine and the store are those of any study; `coca_lab.evaluation.choice` decides.
"""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from coca_attention.errors import UserError
from coca_attention.models import METHODS
from coca_attention.models.methods import PACKAGE, UNTRIED
from coca_lab.cells import ATTEND_LAST, MethodReading, Probability
from coca_lab.evaluation.choice import Choice, Read
from coca_lab.evaluation.needles import NEEDLES_TASK, last_alone, needle_texts
from coca_lab.evaluation.perplexity import PERPLEXITY_TASK, perplexity_texts
from coca_lab.evaluation.task import Cell, Measurement, Model
from coca_lab.intervals import (
    FEWEST_DOCUMENTS,
    DocumentScore,
    mean_nats,
    nats_interval,
    perplexity,
    scored_documents,
)
from coca_lab.settings.commands import CheckSettings
from coca_lab.settings.evaluations import NeedleSettings, PerplexitySettings
from coca_lab.settings.sources import TextSettings
from coca_lab.settings.studies import MethodSettings
from coca_lab.weights import quantised_by

log = logging.getLogger(__name__)

SCORED_TOKENS = 1024
"""Tokens at the end of every document whose perplexity is measured, at most."""
SHORT = 512
"""Tokens of short texts, whose perplexity is measured, too, at most: a method that changes all
distances, such as YaRN, may lose most there."""
SHORT_TEXTS = 8
"""Short texts that are read of every document, at most."""


@dataclass(frozen=True)
class Check:
    """What was measured, and the method to take.

    Attributes:
        choice: The method to take; the names of its readings are those of ``methods``.
        methods: By name.
    """

    choice: Choice
    methods: dict[str, MethodSettings]

    @property
    def taken(self) -> MethodSettings | None:
        """The method to take."""
        return None if self.choice.taken is None else self.methods[self.choice.taken.method]

    @property
    def readings(self) -> list[MethodReading]:
        """The model as it is, with the last L tokens alone, and with every method."""
        choice = self.choice
        found = []
        for each in (choice.base, choice.alone, *choice.others):
            engines = ", ".join(engine for engine in each.engines if engine not in UNTRIED)
            whole = perplexity(each.whole)
            reading = MethodReading(
                method=each.method,
                perplexity=whole if math.isfinite(whole) else None,
                back=_probability(each, beyond=False),
                far=_probability(each, beyond=True),
                runs_in="this package" if each.engines == PACKAGE else engines,
                taken=each is choice.taken,
            )
            if each in choice.others:
                reading.method = self.methods[each.method].method
                reading.word = each.word(choice.base, choice.margins)
                reading.verdict = each.verdict(choice.base, choice.margins)
            found.append(reading)
        return found


def check_table(readings: Sequence[MethodReading]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what is said of every method within L, and what it does beyond.

    Engines in which nothing has run are left out. A terminal of 80 columns has it without a broken
    line, so `verdicts` say beside it what a method loses.
    """
    rows = []
    for each in readings:
        name = "last L alone" if each.method.startswith("last ") else each.method
        rows.append(
            [
                f"{name} (taken)" if each.taken else name,
                each.word,
                "inf" if each.perplexity is None else f"{each.perplexity:.2f}",
                "–" if each.back is None else f"{each.back.value:.0%}",
                "–" if each.far is None else f"{each.far.value:.0%}",
                each.runs_in,
            ]
        )
    return ["method", "within L", "perplexity", "up to L", "farther", "runs in"], rows


def verdicts(readings: Sequence[MethodReading]) -> list[str]:
    """What methods lose within L, or how many documents could tell, where it is not shown."""
    return [f"{each.method}: {each.verdict}" for each in readings if each.verdict != each.word]


def _probability(read: Read, *, beyond: bool) -> Probability | None:
    """That of a digit of needles in texts above L, up to L back or beyond, if there are any."""
    scores = read.far if beyond else read.back
    found, needles = read.found(beyond=beyond)
    if not needles:
        return None
    enough = scored_documents(scores) >= FEWEST_DOCUMENTS
    interval = nats_interval(scores) if enough else None
    ends = None if interval is None else [math.exp(-max(nats, 0.0)) for nats in reversed(interval)]
    value = math.exp(-mean_nats(scores))
    return Probability(value=value, ci95=ends, found=found, needles=needles)


def measurements_of_check(
    model: Model,
    methods: Sequence[MethodSettings],
    settings: CheckSettings,
    *,
    length: int,
    to: int,
    decides: bool = True,
) -> list[Measurement]:
    """What is to be measured of a model as it is and with every method; the text is read.

    Args:
        model: The model.
        methods: Those to compare.
        settings: The text, and what is measured on it.
        length: L, in tokens.
        to: The longest text to read, in tokens.
        decides: Whether a method is to be chosen, which numbers farther back than L do.

    Raises:
        UserError: If the text is too short, numbers cannot be hidden in it, or none that decides
            would be.
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
    short = min(SHORT, max(1, lengths[0] // 4))
    beginning = {**vars(text), "max_tokens": SHORT_TEXTS * short + 1}
    whole = PerplexitySettings(
        **vars(text),
        windows=lengths,
        stride=max(1, min(SCORED_TOKENS, lengths[0] // 4)),
        attend_last=length,
    )
    needles = NeedleSettings(
        **vars(text),
        lengths=lengths,
        count=settings.check_numbers,
        near=length,
        attend_last=length,
    )
    # First the task that needs a token more, so that a text too short for both is told so.
    documents = len(perplexity_texts(model, whole))
    hidden = needle_texts(model, needles)
    distances = [
        needle.distance
        for texts in hidden.values()
        for each in texts.values()
        for needle in each.needles
    ]
    if decides and max(distances) <= length:
        raise UserError(
            f"no number would be hidden farther back than L = {length:,} tokens, so none could say "
            f"which method reads farther: hide more (`check_numbers`, {settings.check_numbers} "
            f"now), or read longer texts (`to`, {to:,} now)"
        )
    log.info(
        "documents to read: %d of more than %s tokens (at most %d: `check_documents`)",
        documents,
        f"{lengths[-1]:,}",
        settings.check_documents,
    )
    if decides and documents < 2:
        log.warning(
            "1 document of %s tokens cannot show whether a method loses within L: give at least "
            "2, from which intervals are computed",
            f"{lengths[-1]:,}",
        )
    tasks = [
        # The shortest texts first, after which the time that is left can be estimated.
        (PERPLEXITY_TASK, PerplexitySettings(**beginning, windows=[short])),
        (PERPLEXITY_TASK, whole),
        (NEEDLES_TASK, needles),
    ]
    return [
        measurement
        for method in (MethodSettings(), *methods)
        for task, task_settings in tasks
        for measurement in task.measurements(model, task_settings, method)
    ]


def check_of_cells(
    model: Model,
    methods: Sequence[MethodSettings],
    settings: CheckSettings,
    cells: Sequence[Cell],
    *,
    length: int,
) -> Check:
    """The decision, from the cells of `measurements_of_check`."""
    base = MethodSettings()
    quantised = quantised_by(model.path, model.module.config) if model.path else None
    first, *others = (
        _read(cells, {method.name}, method, length, quantised) for method in (base, *methods)
    )
    last = last_alone(length)
    alone = replace(_read(cells, {ATTEND_LAST, last}, base, length, quantised), method=last)
    return Check(
        choice=Choice(
            base=replace(first, method="as it is"),
            alone=alone,
            others=others,
            margins=settings.margins,
        ),
        methods={read.method: method for read, method in zip(others, methods, strict=True)},
    )


def check_lengths(settings: CheckSettings, length: int, to: int) -> list[int]:
    """Lengths to measure at: L, and by default its doubles up to ``to``."""
    doubles = [length << n for n in range(1, 20) if length << n < to]
    lengths = sorted({length, *(settings.check_lengths or [*doubles, to])})
    if not length < lengths[-1] <= to:
        given = ", ".join(f"{each:,}" for each in settings.check_lengths)
        raise UserError(
            f"the largest of `check_lengths` must be above L = {length:,} tokens and at most `to`, "
            f"{to:,}, got {given}"
        )
    return lengths


def engines_of(method: str, quantised: str | None) -> tuple[str, ...]:
    """What runs a model that is extended by a method, whose weights may be quantised."""
    without: tuple[str, ...] = ()
    if quantised is not None:  # llama.cpp reads its own format alone
        without = ("llama.cpp", "Transformers") if quantised == "modelopt" else ("llama.cpp",)
    return tuple(name for name in METHODS[method].engines if name not in without)


def _read(
    cells: Sequence[Cell],
    scalings: Collection[str],
    method: MethodSettings,
    length: int,
    quantised: str | None,
) -> Read:
    """What one method has read, in the cells with a name of it."""
    found = [cell for cell in cells if cell["scaling"] in scalings]
    row = METHODS[method.method]
    return Read(
        method=replace(method, length=None).name,  # L is that of all
        engines=engines_of(method.method, quantised),
        length=length,
        perplexity={
            cell["window"]: [DocumentScore.of(each) for each in cell["documents"]]
            for cell in found
            if cell["task"] == "perplexity"
        },
        needles={cell["length"]: cell["documents"] for cell in found if cell["task"] == "needles"},
        # Limits below L change texts of L tokens.
        exact=row.within == "exact"
        and (method.method != "limited" or method.options.get("near", length) >= length),
    )
