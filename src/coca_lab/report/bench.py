"""Benchmarks as sections: the shapes of the paper's Figure 6 (speed) and Table 6 (memory)."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from coca_lab.report.charts import Line, LineChart
from coca_lab.report.results import Cell
from coca_lab.report.section import Section, Table

# Phrases for sizes that are described together.
SIZE_PHRASES = (
    "{layers} layers of {hidden_size}",
    "{heads} heads of {head_width}",
    "heads of {head_width}",
    "{kv_heads} key/value heads",
)


def bench_facts(cell: Cell) -> dict[Any, Any]:
    """The machine, and what was measured: a second measurement of it is shown apart."""
    case = tuple(str(cell.get(n)) for n in ("case", "dtype", "device", "sizes", "batch", "length"))
    machine = {} if cell.get("machine") is None else {"machine": cell["machine"]}
    return {**machine, case: cell.get("variants")}


def bench_sections(cells: Sequence[Cell]) -> list[Section]:
    """A chart and a table for every case, device, precision and size."""
    return [
        Section(
            f"{group[0]['title']}: {_setting(group[0])}",
            text=group[0]["text"],
            chart=_chart(group) if len(group) > 1 else None,
            header=["tokens", *(f"{cell['length']:,}" for cell in group)],
            rows=bench_rows(group),
            note=_note(group),
        )
        for group in _groups(cells)
    ]


def bench_tables(cells: Sequence[Cell]) -> list[Table]:
    """Header and rows for the terminal."""
    tables: list[Table] = []
    for group in _groups(cells):
        name = f"{group[0]['case']} ({_setting(group[0])})"
        tables.append(([name, *(f"{c['length']:,}" for c in group)], bench_rows(group)))
    return tables


def bench_rows(group: Sequence[Cell]) -> list[list[str]]:
    """A row per variant, a column per length: the baseline's time, then ratios; or megabytes."""
    names = _variant_names(group)
    return [
        [
            _row_name(group, name),
            *(_entry(cell["variants"].get(name), name == names[0]) for cell in group),
        ]
        for name in names
    ]


def _variant_names(group: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(name for cell in group for name in cell["variants"]))


def _row_name(group: Sequence[Cell], name: str) -> str:
    """The variant's name, and the size of its cache relative to the baseline's if they differ."""
    variants = group[0]["variants"]
    baseline = next(iter(variants.values())).get("cache_megabytes")
    own = variants.get(name, {}).get("cache_megabytes")
    return f"{name} ({own / baseline:.2f} × bytes)" if own and own != baseline else name


def _entry(measured: dict[str, Any] | None, first: bool) -> str:
    if measured is None:
        return "–"
    if "peak_megabytes" in measured:
        return f"{measured['peak_megabytes']:,.0f} MB"
    if first:
        milliseconds = measured["median_ms"]
        return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"
    low, high = measured["ratio_quartiles"]
    return f"{measured['ratio']:.2f} × ({low:.2f}–{high:.2f})"


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one case, device, precision, sizes and batch size, by length."""
    cases = list(dict.fromkeys(cell["case"] for cell in cells))

    def key(cell: Cell) -> Any:
        place = cases.index(cell["case"])
        return place, cell["device"], cell["dtype"], str(cell["sizes"]), cell["batch"]

    ordered = sorted(cells, key=lambda cell: (key(cell), cell["length"]))
    return [list(group) for _, group in groupby(ordered, key)]


def _setting(cell: Cell) -> str:
    """The sizes, precision and device in words."""
    sizes = {name: size for name, size in cell["sizes"].items() if size is not None}
    phrases = []
    for phrase in SIZE_PHRASES:
        names = set(re.findall(r"{(\w+)}", phrase))
        if names <= sizes.keys():
            phrases.append(re.sub(r"^1 (.*)heads", r"1 \1head", phrase.format_map(sizes)))
            sizes = {name: size for name, size in sizes.items() if name not in names}
    phrases += [f"{name.replace('_', ' ')} {size}" for name, size in sizes.items()]
    batch = [f"batches of {cell['batch']}"] if cell["batch"] > 1 else []
    return ", ".join([*phrases, *batch, cell["dtype"], cell["device"]])


def _note(group: Sequence[Cell]) -> str:
    if group[0]["measure"] == "memory":
        return "Peak memory of one run, in megabytes above its inputs."
    measured = [m for cell in group for m in cell["variants"].values()]
    rounds = sorted({m["rounds"] for m in measured})
    count = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    note = (
        f"Medians of {count} interleaved rounds: the time of the first row, and the ratios of the "
        "others to it with their quartiles; below 1 is faster."
    )
    errors = [m["error"] for m in measured if m["error"] is not None]
    if not errors:
        return note
    return f"{note} Largest error before timing, relative to the largest value: {max(errors):.1g}."


def _chart(group: Sequence[Cell]) -> LineChart:
    memory = group[0]["measure"] == "memory"
    key = "peak_megabytes" if memory else "ratio"
    lines = []
    for name in _variant_names(group):
        points = {c["length"]: c["variants"][name][key] for c in group if name in c["variants"]}
        lines.append(Line(name, list(points), list(points.values())))
    highest = max(value or 0.0 for line in lines for value in line.y)
    label = "megabytes" if memory else "time, relative to the baseline"
    lengths = [cell["length"] for cell in group]
    return LineChart(lines, "tokens", label, ticks=lengths, log_y=memory or highest > 3)
