"""A search with several sizes in the report: what becomes of a trial as the model grows."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from coca_lab.intervals import PowerLaw, fit_power_law
from coca_lab.report.figures import draw, turns
from coca_lab.report.section import Entry, Section

Cell = dict[str, Any]
Runs = dict[str, list[tuple[str, float, float]]]
"""By trial, the size, the parameters and the figure of every run."""
FAR = {350_000_000: "350M", 7_000_000_000: "7B"}
"""Parameters of the paper's models, to which trends are extended."""


def size_sections(cells: Sequence[Cell]) -> list[Section]:
    """Trends of perplexity over the sizes of a search; none if it has one size."""
    last = (cell for cell in cells if cell["rung"] == cell["rungs"])
    runs = [cell for cell in last if cell["status"] == "finished" and _windows(cell)]
    if len({cell["search"] for cell in runs}) < 2:
        return []
    windows = sorted(set.intersection(*(set(_windows(cell)) for cell in runs)))
    if not windows:
        return []
    near, far = windows[0], windows[-1]
    control = runs[0]["model"]
    base = {
        (cell["search"], cell["seed"]): _windows(cell)[near]
        for cell in runs
        if cell["model"] == control
    }

    def cost(cell: Cell) -> float | None:
        if cell["model"] == control:
            return None
        other = base.get((cell["search"], cell["seed"]))
        return other and _windows(cell)[near] / other

    found = [
        _section(
            "cost",
            f"Perplexity at {near:,} tokens against {control}’s, by size",
            _runs(runs, cost),
            f"perplexity, as a multiple of {control}’s",
            "Pairs of runs of the same seed.",
        )
    ]
    if far > near:
        found.append(
            _section(
                "far",
                f"Perplexity at {far:,} tokens against {near:,}, by size",
                _runs(runs, lambda cell: _windows(cell)[far] / _windows(cell)[near]),
                f"perplexity at {far:,} / at {near:,} tokens",
            )
        )
    return [section for section in found if section.rows]


def _windows(cell: Cell) -> dict[int, float]:
    """Perplexity by window, without scaling."""
    return {
        each["window"]: each["perplexity"]
        for each in cell["cells"]
        if each["task"] == "perplexity" and each["scaling"] == "none" and each["perplexity"]
    }


def _runs(cells: Sequence[Cell], figure: Callable[[Cell], float | None]) -> Runs:
    found: Runs = {}
    for cell in cells:
        value = figure(cell)
        if value is not None:
            run = cell["search"], cell["training"]["parameters"], value
            found.setdefault(cell["model"], []).append(run)
    return found


def _section(kind: str, title: str, runs: Runs, label: str, note: str = "") -> Section:
    points = {
        name: ([x for _, x, _ in found], [y for _, _, y in found]) for name, found in runs.items()
    }
    fits = {name: fit for name, each in points.items() if (fit := fit_power_law(*each))}

    def plot(axes: Axes) -> None:
        for name, (colour, _) in turns(runs).items():
            x, y = points[name]
            if name in fits:
                ends = min(x), max(x)
                axes.plot(ends, [fits[name].at(each)[0] for each in ends], color=colour, label=name)
            axes.plot(x, y, "o", color=colour, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("parameters")
        axes.set_ylabel(label)

    sizes = list(dict.fromkeys(size for found in runs.values() for size, _, _ in found))
    rows = [
        [
            name,
            *(_measured([y for each, _, y in found if each == size]) for size in sizes),
            *_extended(fits.get(name)),
        ]
        for name, found in runs.items()
    ]
    return Section(
        title,
        figure=draw(f"sizes-{kind}", plot) if fits else None,
        header=[
            "trial",
            *sizes,
            Entry("exponent", "95 % interval"),
            *(Entry(size, "if the trend holds") for size in FAR.values()),
        ],
        rows=rows,
        note=" ".join(
            filter(
                None,
                [
                    note,
                    "Means over seeds, and their range. Lines are power laws of the number of "
                    "parameters, fitted to all runs; intervals are 95 % intervals of the law, and "
                    "say nothing about whether it holds beyond the sizes measured.",
                ],
            )
        ),
    )


def _measured(values: Sequence[float]) -> str | Entry:
    if not values:
        return "–"
    extremes = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
    return Entry(f"{sum(values) / len(values):.3f}", extremes)


def _extended(fit: PowerLaw | None) -> list[str | Entry]:
    """The exponent, and the trend at the sizes of the paper."""
    if fit is None:
        return ["–"] * (1 + len(FAR))
    low, high = fit.exponent - fit.half, fit.exponent + fit.half
    trends = (fit.at(size) for size in FAR)
    return [
        Entry(f"{fit.exponent:+.3f}", f"{low:+.3f} to {high:+.3f}"),
        *(Entry(_plain(y, 3), f"{_plain(a, 2)} to {_plain(b, 2)}") for y, a, b in trends),
    ]


def _plain(value: float, digits: int) -> str:
    """Rounded to significant digits, and written without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"
