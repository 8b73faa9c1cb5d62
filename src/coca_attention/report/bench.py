"""Benchmarks as sections: the shapes of the paper's Figure 6 (speed) and Table 6 (memory)."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from coca_attention.report.figures import COLOURS, draw
from coca_attention.report.section import Section

TITLES = {
    "operator": "Operator, forward",
    "operator-training": "Operator, forward and backward",
    "operator-decode": "One query over a cache, attention alone",
    "training": "Training step of a model",
    "prefill": "Prefill of a model",
    "decode": "One token decoded, by the length of the cache",
    "decode-compiled": "One token decoded with torch.compile, static caches",
    "memory": "Memory of the operator, forward",
}
TEXTS = {
    "operator": "The shape of the paper's Figure 6. Ratios are to the first row, of runs in the "
    "same round; below 1 is faster.",
    "memory": "What the paper's Table 6 is about: linear in the length, or square. Megabytes "
    "above the inputs.",
}


def bench_sections(cells: Sequence[dict[str, Any]]) -> list[Section]:
    """A figure and a table for every case and kind of device; none without such cells."""
    sections = []
    for number, (case, group) in enumerate(_groups(cells)):
        first, lengths = group[0], [cell["length"] for cell in group]
        key = "peak_megabytes" if case == "memory" else "ratio"
        names = list(dict.fromkeys(name for cell in group for name in cell["variants"]))
        series = {
            name: [(c["length"], c["variants"][name][key]) for c in group if name in c["variants"]]
            for name in names
        }
        label = f"bench-{number}"
        sections.append(
            Section(
                f"{TITLES[case]}: {_where(first)}",
                text=TEXTS.get(case, ""),
                figure=_figure(label, series, case == "memory") if len(group) > 1 else None,
                header=["tokens", *(f"{length:,}" for length in lengths)],
                rows=bench_rows(group),
                note=_note(group),
            )
        )
    return sections


def bench_tables(cells: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows for the terminal."""
    return [
        ([f"{case} ({_where(group[0])})", *(f"{c['length']:,}" for c in group)], bench_rows(group))
        for case, group in _groups(cells)
    ]


def bench_rows(group: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row a variant, a column a length: the first one's time, then ratios; or megabytes."""
    names = list(dict.fromkeys(name for cell in group for name in cell["variants"]))
    return [
        [
            _row_name(group, name),
            *(_entry(cell["variants"].get(name), name == names[0]) for cell in group),
        ]
        for name in names
    ]


def _row_name(group: Sequence[dict[str, Any]], name: str) -> str:
    """The variant's name, with the share of the first one's bytes where a cache is read."""
    variants = group[0]["variants"]
    first, own = (variants[key].get("cache_megabytes") for key in (next(iter(variants)), name))
    return name if own is None or own == first else f"{name} ({own / first:.2f} × bytes)"


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


def _groups(cells: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Cells of one case, device, dtype and sizes together, by length."""

    def key(cell: dict[str, Any]) -> Any:
        place = list(TITLES).index(cell["case"])
        return place, cell["device"], cell["dtype"], str(cell["sizes"]), cell["batch"]

    bench = sorted((c for c in cells if c["task"] == "bench"), key=lambda c: (key(c), c["length"]))
    groups = [list(group) for _, group in groupby(bench, key)]
    return [(group[0]["case"], group) for group in groups]


def _where(cell: dict[str, Any]) -> str:
    sizes = cell["sizes"]
    what = (
        f"{sizes['heads']} head{'s' if sizes['heads'] > 1 else ''}"
        if "heads" in sizes
        else f"{sizes['layers']} layers of {sizes['hidden_size']}, heads"
    )
    groups = f", {sizes['groups']} key/value heads" if sizes["groups"] else ""
    return f"{what} of {sizes['head_width']}{groups}, {cell['dtype']}, {cell['device']}"


def _note(group: Sequence[dict[str, Any]]) -> str:
    measured = [m for cell in group for m in cell["variants"].values()]
    if group[0]["case"] == "memory":
        return ""
    errors = [m["error"] for m in measured if m["error"] is not None]
    rounds = sorted({m["rounds"] for m in measured})
    many = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return (
        f"Median of {many} rounds, interleaved: the first row's time, and the others' quotients by "
        f"it with their quartiles. Largest error before timing: {max(errors):.1g} of the largest "
        "number."
    )


def _figure(name: str, series: dict[str, list[tuple[int, float]]], memory: bool) -> dict[str, str]:
    def plot(axes: Axes) -> None:
        for index, (label, points) in enumerate(series.items()):
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[index % len(COLOURS)],
                label=label,
                marker="o",
                markersize=4,
            )
        lengths = sorted({length for points in series.values() for length, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("tokens")
        if memory or max(y for points in series.values() for _, y in points) > 3:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_ylabel("megabytes" if memory else "time, as a multiple of the first")

    return draw(name, plot)
