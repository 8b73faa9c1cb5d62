"""Figures as inline SVG, each drawn twice: for wide and for narrow screens."""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.textpath import TextPath
from matplotlib.ticker import LogFormatter, LogFormatterMathtext

# Okabe and Ito's palette, which colour-blind readers can distinguish, in tones with a contrast of
# 3 to white, and five more.
COLOURS = (
    *("#767676", "#d55e00", "#0072b2", "#008f68", "#c2649a", "#b37c00", "#2f8fc9"),
    *("#7a4a12", "#6a3d9a", "#b2182b", "#66700c", "#0d6f73"),
)
DARK = (
    *("#a8a8a8", "#ff8a3d", "#4ba3e3", "#2cc79b", "#e29ac4", "#f0b429", "#86cdf5"),
    *("#c9925a", "#b794e0", "#f2747f", "#b5c240", "#4cc4c9"),
)
"""The same colours on a dark page."""
LEGEND = 9  # points
MARKERS = "os^Dv"
"""By how often the colours have been used up before."""
INK, AXIS, GRID, FAINT = "#444444", "#888888", "#e4e4e4", "#bbbbbb"
VARIABLES = {"#000000": "currentColor", INK: "var(--soft)", AXIS: "var(--axis)"}
VARIABLES |= {GRID: "var(--rule)", FAINT: "var(--faint)"}
VARIABLES |= {colour: f"var(--c{index})" for index, colour in enumerate(COLOURS)}
"""What the page's style sheet sets, since it depends on whether the page is light or dark."""
SIZES = {"wide": (9.0, 5.2), "narrow": (4.4, 6.4)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "coca-attention",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,  # a name may contain $
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.edgecolor": AXIS,
}
_places: ContextVar[dict[str, int] | None] = ContextVar("places", default=None)


def draw(name: str, plot: Callable[[Axes], None]) -> dict[str, str]:
    """Draw a plot at every size: ``{"wide": "<svg …", "narrow": "<svg …"}``.

    Args:
        name: Prefix of the SVG's ids, unique on the page.
        plot: Draws into the axes; a legend and a description for screen readers are added.
    """
    import matplotlib

    drawings = {}
    for screen, size in SIZES.items():
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            # The browser sets the text, in its own fonts.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.subplots()
            plot(axes)
            _write_powers_as_numbers(axes)
            _add_legend(figure, axes, is_wide=screen == "wide")
            buffer = io.StringIO()
            figure.savefig(
                buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
            )
        text = buffer.getvalue()
        text = labelled(with_ids(text[text.index("<svg") :], f"{name}-{screen}"), _describe(axes))
        drawings[screen] = _within_tags(_use_variables, text)
    return drawings


def with_ids(svg: str, prefix: str) -> str:
    """A drawing whose ids, which must be unique on a page, begin with a prefix."""
    pattern = r'(\bid="|href="#|url\(#)'
    return _within_tags(lambda tag: re.sub(pattern, rf"\g<1>{prefix}-", tag), svg)


def labelled(svg: str, words: str) -> str:
    """A drawing with words for screen readers before those that it has."""
    if "aria-label" in svg[: svg.find(">")]:
        return svg.replace(' aria-label="', f' aria-label="{escape(words)} ', 1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1)


@contextmanager
def one_palette() -> Iterator[None]:
    """Within it, `colours` and `turns` give a name the same colour every time."""
    token = _places.set({})
    try:
        yield
    finally:
        _places.reset(token)


def turns(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """For every name a colour, and how often the colours had been used up before."""
    places = _places.get()
    places = {} if places is None else places
    found = {name: places.setdefault(name, len(places)) for name in names}
    return {n: (COLOURS[i % len(COLOURS)], i // len(COLOURS)) for n, i in found.items()}


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for every name, in the order of first appearance; they repeat after the last."""
    return {name: colour for name, (colour, _) in turns(names).items()}


def _add_legend(figure: Figure, axes: Axes, *, is_wide: bool) -> None:
    """The labels of all lines, whole, in as many rows as they need."""
    # By itself matplotlib leaves out names that begin with an underscore.
    lines = [line for line in axes.get_lines() if not _unnamed(line)]
    if not lines:
        return
    labels = [str(line.get_label()) for line in lines]
    widths = [_points(label) for label in labels]
    columns = 2 if is_wide and max(widths) <= 285 else 1
    room = 600 if is_wide else 270
    texts = [
        # As many of the widest letters fit.
        textwrap.fill(label, room // 10, drop_whitespace=False) if width > room else label
        for label, width in zip(labels, widths, strict=True)
    ]
    rows = sum(text.count("\n") + 1 for text in texts) / columns
    figure.set_figheight(figure.get_figheight() + 0.19 * max(0, rows - 6))
    figure.legend(
        lines,
        texts,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
        fontsize=LEGEND,
    )


def _points(label: str) -> float:
    """About the width of a label; letters without a glyph here are taken to be wide."""
    font = get_font(findfont(STYLE["font.sans-serif"][-1]))
    known = font.get_charmap()
    text = "".join(letter if ord(letter) in known else "W" for letter in label)
    return TextPath((0, 0), text, size=LEGEND).get_extents().width if text.strip() else 0.0


def _describe(axes: Axes) -> str:
    """What a figure shows: its axes, and the ends of every line or the range of a heat map."""
    figure = axes.get_figure()
    assert figure is not None
    across, up = axes.get_xlabel(), axes.get_ylabel()
    if len(figure.axes) > 1:  # the other one is the colour bar of a heat map
        values = axes.collections[0].get_array()
        assert values is not None
        measure = figure.axes[1].get_ylabel()
        ranges = f"from {values.min():.3g} to {values.max():.3g}"
        return f"Heat map of the {measure}, {ranges}, by {up or 'row'} and {across}."
    parts = []
    for line in axes.get_lines():
        x, y = (np.asarray(data).tolist() for data in line.get_data())
        if x and not _unnamed(line):
            ends = [
                f"{b:,.3g} at {a:,.10g}" for a, b in dict.fromkeys([(x[0], y[0]), (x[-1], y[-1])])
            ]
            parts.append(f"{line.get_label()}: {' to '.join(ends)}")
    return f"Lines of {up} against {across}. {'; '.join(parts)}."


def _unnamed(line: Any) -> bool:
    return re.fullmatch(r"_child\d+", str(line.get_label())) is not None


class _Numbers(LogFormatter):
    """Labels such as 0.9 and 200,000 in place of 9e-01 and 2e+05, at the same ticks."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,.10g}" if super().__call__(x, pos) else ""


def _write_powers_as_numbers(axes: Axes) -> None:
    """Replace matplotlib's own labels of logarithmic axes, which are set as mathematics."""
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(_Numbers())
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(_Numbers())


def _within_tags(change: Callable[[str], str], svg: str) -> str:
    """Change the tags of a drawing and leave its text, such as the names of models, alone."""
    return re.sub(r"<[^<>]+>", lambda match: change(match.group()), svg)


def _use_variables(tag: str) -> str:
    for colour, variable in VARIABLES.items():
        tag = tag.replace(f": {colour}", f": {variable}")
    return tag
