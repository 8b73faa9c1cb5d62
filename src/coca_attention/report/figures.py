"""Figures as inline SVG, each drawn twice: for wide and for narrow screens."""

import io
import re
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#767676", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
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
    """Draw a plot at every size: ``{"wide": "<svg …", "narrow": "<svg …"}``.

    Args:
        name: Prefix of the SVG's ids, unique on the page.
        plot: Draws into the axes; a legend is added.
    """
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
        # Ids must be unique among all drawings of a page.
        drawings[screen] = re.sub(
            r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-{screen}-", text[text.index("<svg") :]
        )
    return drawings


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for every name, in the order of first appearance; they repeat after the last."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(names))}
