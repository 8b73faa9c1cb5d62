"""Benchmarks as sections: the shapes of the paper's Figure 6 (speed) and Table 6 (memory)."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.lengths import lengths_of, table_of
from coca_lab.report.results import Cell, grouped
from coca_lab.report.section import Section, span


def bench_facts(cell: Cell) -> dict[Any, Any]:
    """The machine, and what was measured: a second measurement of it is shown apart."""
    case = tuple(str(cell.get(n)) for n in ("case", "dtype", "device", "sizes", "batch", "length"))
    machine = {} if cell.get("machine") is None else {"machine": cell["machine"]}
    return {**machine, case: cell.get("variants")}


def bench_sections(cells: Sequence[Cell]) -> list[Section]:
    """A chart and a table for every case, device, precision and size."""
    cases = list(dict.fromkeys(cell["case"] for cell in cells))

    def about(cell: Cell) -> tuple[Any, ...]:
        place = cases.index(cell["case"]), cell["device"], cell["dtype"]
        return *place, str(cell["sizes"]), cell["batch"]

    ordered = sorted(cells, key=lambda cell: (about(cell), cell["length"]))
    return [_section(group) for group in grouped(ordered, about).values()]


def _section(group: Sequence[Cell]) -> Section:
    """A row per variant, a column per length: the first one's time, then ratios; or megabytes."""
    first, memory = group[0], group[0]["measure"] == "memory"
    baseline, *_ = first["variants"]
    frame: Frame = pd.DataFrame(
        {
            "line": _row_name(first["variants"], name),
            "x": cell["length"],
            "y": measured["peak_megabytes" if memory else "ratio"],
            "entry": _entry(measured, name == baseline),
        }
        for cell in group
        for name, measured in cell["variants"].items()
    )
    label = "megabytes" if memory else "time, relative to the baseline"
    logarithmic = memory or bool(frame["y"].max() > 3)
    chart = LineChart(frame, "tokens", label, ticks=lengths_of(frame), log_y=logarithmic)
    setting = _setting(first)
    return Section(
        f"{first['title']}: {setting}",
        _lead(first["title"], frame[frame["x"] == group[-1]["length"]], memory),
        first["text"],
        chart if len(group) > 1 else None,
        *table_of(frame, f"{first['case']} ({setting})"),
        _note([m for cell in group for m in cell["variants"].values()], memory),
    )


def _row_name(variants: dict[str, Any], name: str) -> str:
    """The variant's name, and the size of its cache relative to the baseline's if they differ."""
    baseline = next(iter(variants.values())).get("cache_megabytes")
    size = variants.get(name, {}).get("cache_megabytes")
    return f"{name} ({size / baseline:.2f} × bytes)" if size and size != baseline else name


def _entry(measured: dict[str, Any], first: bool) -> str:
    if "peak_megabytes" in measured:
        return f"{measured['peak_megabytes']:,.0f} MB"
    if first:
        milliseconds = measured["median_ms"]
        return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"
    low, high = measured["ratio_quartiles"]
    return f"{measured['ratio']:.2f} × ({low:.2f}–{high:.2f})"


def _lead(title: str, longest: Frame, memory: bool) -> str:
    """What every variant needs at the longest length, against the first one."""
    (baseline, first), *others = longest[["line", "entry"]].itertuples(index=False)
    said = ", ".join(
        f"{name} {entry.partition(' (')[0].removesuffix(' ×')}" for name, entry in others
    )
    against = f"; {baseline} {first}" if memory else f" × the time of {baseline} ({first})"
    return f"{title}, {longest['x'].iloc[0]:,} tokens: {said}{against}."


def _setting(cell: Cell) -> str:
    """The sizes, precision and device in words."""
    sizes = {**cell["sizes"], "batch": cell["batch"]}
    words = [f"{name.replace('_', ' ')} {size}" for name, size in sizes.items() if size is not None]
    return ", ".join([*words, cell["dtype"], cell["device"]])


def _note(measured: Sequence[dict[str, Any]], memory: bool) -> str:
    if memory:
        return "Peak memory of one run, in megabytes above its inputs."
    rounds = span((m["rounds"] for m in measured), "d")
    note = (
        f"Medians of {rounds} interleaved rounds: the time of the first row, and the ratios of the "
        "others to it with their quartiles; below 1 is faster."
    )
    errors = [m["error"] for m in measured if m["error"] is not None]
    if errors:
        note += f" Largest error before timing, relative to the largest value: {max(errors):.1g}."
    return note
