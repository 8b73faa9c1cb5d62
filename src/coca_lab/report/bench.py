"""Benchmarks as sections: the shapes of the paper's Figure 6 (speed) and Table 6 (memory)."""

from collections.abc import Sequence
from typing import Annotated

import pandas as pd
from pydantic import Field

from coca_lab.report.cells import (
    AboveZero,
    CheckedCell,
    Facts,
    Interval,
    Name,
    Number,
    Record,
    Whole,
)
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.lengths import length_table, lengths_of
from coca_lab.report.results import grouped
from coca_lab.report.section import Section, span


class Variant(Record):
    """What one of the things compared in a benchmark needs."""

    median_ms: AboveZero = 1.0
    rounds: Whole = 1
    ratio: AboveZero = 1.0
    ratio_quartiles: Interval = [1.0, 1.0]
    error: Number | None = None
    cache_megabytes: AboveZero | None = None
    peak_megabytes: AboveZero | None = None


class Bench(CheckedCell):
    """A benchmark at one length; the first variant is the one that others are compared with."""

    case: Name
    title: Name
    text: str
    measure: str
    device: str
    dtype: str
    batch: Whole | None = None
    length: Whole
    sizes: dict[str, int | str | None] = {}
    variants: Annotated[dict[str, Variant], Field(min_length=1)]

    @property
    def facts(self) -> Facts:
        """The machine, and what was measured: a second measurement of it is shown apart."""
        case = {(self.setting, self.case, self.length): self.variants}
        return case | {"machine": self.machine} if self.machine else case

    @property
    def setting(self) -> str:
        """The sizes, precision and device in words."""
        sizes = {**self.sizes, "batch": self.batch}
        words = [f"{n.replace('_', ' ')} {size}" for n, size in sizes.items() if size is not None]
        return ", ".join([*words, self.dtype, self.device])


def bench_sections(cells: Sequence[Bench]) -> list[Section]:
    """A chart and a table for every case, device, precision and size."""
    ordered = sorted(cells, key=lambda cell: cell.length)
    groups = grouped(ordered, lambda cell: (cell.case, cell.setting))
    places = list(dict.fromkeys(cell.case for cell in cells))
    return [_section(groups[key]) for key in sorted(groups, key=lambda k: places.index(k[0]))]


def _section(group: Sequence[Bench]) -> Section:
    """A row per variant, a column per length: the first one's time, then ratios; or megabytes."""
    first = group[0]
    measured = [variant for cell in group for variant in cell.variants.values()]
    memory = all(each.peak_megabytes for each in measured)
    baseline, *_ = first.variants
    frame: Frame = pd.DataFrame(
        {
            "line": _row_name(first.variants, name),
            "x": cell.length,
            "y": variant.peak_megabytes if memory else variant.ratio,
            "entry": _entry(variant, name == baseline, memory),
            "cell": cell,
        }
        for cell in group
        for name, variant in cell.variants.items()
    )
    lengths = lengths_of(frame)
    label = "megabytes" if memory else "time, relative to the baseline"
    logarithmic = memory or bool(frame["y"].max() > 3)
    chart = LineChart(frame, "tokens", label, ticks=lengths, log_y=logarithmic)
    return Section(
        f"{first.title}: {first.setting}",
        _lead(first.title, frame[frame["x"] == lengths[-1]], memory),
        first.text,
        chart if len(lengths) > 1 else None,
        *length_table(frame, f"{first.case} ({first.setting})", frame["entry"]),
        _note(measured, memory),
    )


def _row_name(variants: dict[str, Variant], name: str) -> str:
    """The variant's name, and the size of its cache relative to the baseline's if they differ."""
    baseline = next(iter(variants.values())).cache_megabytes
    size = variants[name].cache_megabytes if name in variants else None
    if not size or not baseline or size == baseline:
        return name
    return f"{name} ({size / baseline:.2f} × bytes)"


def _entry(variant: Variant, first: bool, memory: bool) -> str:
    if memory:
        return f"{variant.peak_megabytes:,.0f} MB"
    if first:
        return f"{variant.median_ms:,.{0 if variant.median_ms >= 100 else 1}f} ms"
    low, high = variant.ratio_quartiles
    return f"{variant.ratio:.2f} × ({low:.2f}–{high:.2f})"


def _lead(title: str, longest: Frame, memory: bool) -> str:
    """What every variant needs at the longest length, against the first one."""
    (baseline, first), *others = longest[["line", "entry"]].itertuples(index=False)
    said = ", ".join(
        f"{name} {entry.partition(' (')[0].removesuffix(' ×')}" for name, entry in others
    )
    against = f"; {baseline} {first}" if memory else f" × the time of {baseline} ({first})"
    return f"{title}, {longest['x'].iloc[0]:,} tokens: {said}{against}."


def _note(measured: Sequence[Variant], memory: bool) -> str:
    """How the figures were measured."""
    if memory:
        return "Peak memory of one run, in megabytes above its inputs."
    note = (
        f"Medians of {span(each.rounds for each in measured)} interleaved rounds: the time of the "
        "first row, and the ratios of the others to it with their quartiles; below 1 is faster."
    )
    errors = [each.error for each in measured if each.error is not None]
    if errors:
        note += f" Largest error before timing, relative to the largest value: {max(errors):.1g}."
    return note
