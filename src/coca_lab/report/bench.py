"""Benchmarks as sections: the shapes of the paper's Figure 6 (speed) and Table 6 (memory)."""

from collections.abc import Sequence
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from coca_lab.report.cells import Cell, Count, Interval, Name, Number, Part, Positive
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.lengths import lengths_of, table_of
from coca_lab.report.results import grouped
from coca_lab.report.section import Section, span


class Variant(Part):
    """What one of the things compared in a benchmark needs."""

    median_ms: Positive = 1.0
    rounds: Count = 1
    ratio: Positive = 1.0
    ratio_quartiles: Interval = [1.0, 1.0]
    error: Number | None = None
    cache_megabytes: Positive | None = None
    peak_megabytes: Positive | None = None


class Bench(Cell):
    """A benchmark at one length."""

    case: Name
    title: Name
    text: str
    measure: str
    device: str
    dtype: str
    batch: Count | None = None
    length: Count
    sizes: dict[str, int | str | None] = {}
    variants: Annotated[dict[str, Variant], Field(min_length=1)]

    @property
    def facts(self) -> dict[Any, Any]:
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
    memory = all(each.peak_megabytes for cell in group for each in cell.variants.values())
    baseline, *_ = first.variants
    frame: Frame = pd.DataFrame(
        {
            "line": _row_name(first.variants, name),
            "x": cell.length,
            "y": measured.peak_megabytes if memory else measured.ratio,
            "entry": _entry(measured, name == baseline, memory),
        }
        for cell in group
        for name, measured in cell.variants.items()
    )
    label = "megabytes" if memory else "time, relative to the baseline"
    logarithmic = memory or bool(frame["y"].max() > 3)
    chart = LineChart(frame, "tokens", label, ticks=lengths_of(frame), log_y=logarithmic)
    return Section(
        f"{first.title}: {first.setting}",
        _lead(first.title, frame[frame["x"] == group[-1].length], memory),
        first.text,
        chart if len(lengths_of(frame)) > 1 else None,
        *table_of(frame, f"{first.case} ({first.setting})"),
        _note([m for cell in group for m in cell.variants.values()], memory),
    )


def _row_name(variants: dict[str, Variant], name: str) -> str:
    """The variant's name, and the size of its cache relative to the baseline's if they differ."""
    baseline = next(iter(variants.values())).cache_megabytes
    size = variants[name].cache_megabytes if name in variants else None
    if not size or not baseline or size == baseline:
        return name
    return f"{name} ({size / baseline:.2f} × bytes)"


def _entry(measured: Variant, first: bool, memory: bool) -> str:
    if memory:
        return f"{measured.peak_megabytes:,.0f} MB"
    if first:
        return f"{measured.median_ms:,.{0 if measured.median_ms >= 100 else 1}f} ms"
    low, high = measured.ratio_quartiles
    return f"{measured.ratio:.2f} × ({low:.2f}–{high:.2f})"


def _lead(title: str, longest: Frame, memory: bool) -> str:
    """What every variant needs at the longest length, against the first one."""
    (baseline, first), *others = longest[["line", "entry"]].itertuples(index=False)
    said = ", ".join(
        f"{name} {entry.partition(' (')[0].removesuffix(' ×')}" for name, entry in others
    )
    against = f"; {baseline} {first}" if memory else f" × the time of {baseline} ({first})"
    return f"{title}, {longest['x'].iloc[0]:,} tokens: {said}{against}."


def _note(measured: Sequence[Variant], memory: bool) -> str:
    if memory:
        return "Peak memory of one run, in megabytes above its inputs."
    note = (
        f"Medians of {span((m.rounds for m in measured), 'd')} interleaved rounds: the time of the "
        "first row, and the ratios of the others to it with their quartiles; below 1 is faster."
    )
    errors = [m.error for m in measured if m.error is not None]
    if errors:
        note += f" Largest error before timing, relative to the largest value: {max(errors):.1g}."
    return note
