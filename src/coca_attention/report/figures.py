"""Figures as inline SVG. Each is drawn twice, for wide and for narrow screens."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from coca_attention.report.results import Series, all_windows

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#767676", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = {"none": "-", "ntk": "--", "dynamic": "--", "linear": "-.", "attend-last": ":"}
SIZES = {"wide": (9.0, 5.2), "narrow": (4.4, 6.4)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "coca-attention",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.edgecolor": "#888888",
}


def draw(name: str, plot: Callable[[Axes], None]) -> dict[str, str]:
    """SVG of a plot at every size: {"wide": "<svg …", "narrow": "<svg …"}."""
    import matplotlib

    drawings = {}
    for screen, size in SIZES.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.subplots()
            plot(axes)
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=2 if screen == "wide" else 1,
                frameon=False,
                handlelength=2.6,
                fontsize=9,
            )
            buffer = io.StringIO()
            figure.savefig(
                buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
            )
        text = buffer.getvalue()
        # Ids must not repeat between the drawings of one page.
        drawings[screen] = re.sub(
            r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-{screen}-", text[text.index("<svg") :]
        )
    return drawings


def perplexity_figure(series: Sequence[Series], training_length: int | None) -> dict[str, str]:
    """Perplexity against the tokens read at once (the paper's Figure 1), with 95 % bands."""
    windows = all_windows(series)
    colours = _colours([item.model for item in series])

    def plot(axes: Axes) -> None:
        for item in series:
            colour, dash = colours[item.model], DASHES[item.kind]
            if item.kind == "attend-last":
                value = item.points[0].perplexity
                axes.plot(
                    [windows[0], windows[-1]],
                    [value, value],
                    label=item.label,
                    lw=1.2,
                    color=colour,
                    ls=dash,
                )
                continue
            x = [point.window for point in item.points]
            axes.plot(
                x,
                [point.perplexity for point in item.points],
                label=item.label,
                marker="o",
                ms=4,
                lw=1.8,
                color=colour,
                ls=dash,
            )
            if item.kind == "none" and all(point.low is not None for point in item.points):
                axes.fill_between(
                    x,
                    [point.low or 0.0 for point in item.points],
                    [point.high or 0.0 for point in item.points],
                    color=colours[item.model],
                    alpha=0.08,
                    lw=0,
                )
        if training_length is not None:
            axes.axvline(training_length, color="#444444", lw=1, ls=(0, (1, 2)))
            axes.annotate(
                "training length",
                (training_length, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -4),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color="#444444",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(windows, [f"{window:,}" for window in windows])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        if high / low > 20:
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=8)
        axes.set_xlabel("window: tokens read at once")
        axes.set_ylabel("perplexity (lower is better)")

    return draw("perplexity", plot)


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(names))}
