"""Charts as data: what `coca_lab.report.drawing` draws, and the same in words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST = 8
"""Lines of a chart, of more than there may be."""
COLOURS = (  # words in a name, its colour on light pages and on dark ones; the first words hold
    (("limited", "rerope"), "#00838a", "#2fbfc4"),  # also of a model of another method
    (("yarn",), "#96115c", "#ff9ad5"),
    (("self-extend", "self_extend", "leaky"), "#7a35b8", "#bb8cff"),
    (("shifted", "string"), "#8a2015", "#ffb3a6"),
    (("dynamic", "ntk"), "#4a4600", "#ece9a0"),
    (("roles", "native"), "#0057b8", "#5aa9ff"),
    (("roformer", "rope", "rotary", "base"), "#c9480d", "#ff8a4c"),
    (("alibi",), "#8d6e00", "#d0a800"),
    (("strict",), "#1a7f37", "#7ddc7d"),
    (("slack",), "#a8527f", "#d883b4"),
    (("magnitude",), "#43349a", "#b7b0ff"),
    (("pope",), "#c3223f", "#f2707f"),
    (("thin",), "#3f5560", "#b4c6d0"),
    (("linear", "+ pi"), "#6b4a2b", "#cfa27a"),
    ((), "#6e6e6e", "#9a9a9a"),
    ((), "#33373d", "#e2e2e2"),
)
"""A method has one colour in every figure; names without one take those that are free."""
Frame = Any
"""A pandas.DataFrame, whose types leave open what a column, a row or a figure of it is."""
Palette = dict[str, tuple[int, int]]
"""The place of every name's colour, and how many names before it have the same."""


@dataclass(frozen=True)
class LineChart:
    """Lines over one horizontal axis, with their names at their ends.

    Attributes:
        points: A row for every point, in the order of the lines: ``line`` (its name), ``x``, ``y``;
            values that are not finite are left out. Optional are ``low`` and ``high``, the ends of
            the interval.
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        ticks: Where to label the horizontal axis, which is logarithmic to base 2.
        shares: Whether the vertical axis is linear, from 0 to 100 %; otherwise it is logarithmic.
        mark: A place on the horizontal axis, and its name.
        bars: Whether intervals are drawn, and not only told on hovering.
        strong: Lines in colour; the others are grey and thin, without intervals. All if empty.
    """

    points: Frame
    x: str
    y: str
    ticks: Sequence[float] = ()
    shares: bool = False
    mark: tuple[float, str] | None = None
    bars: bool = True
    strong: Sequence[str] = ()

    def drawn(self) -> Frame:
        """The finite points, with all columns: of more than `MOST` lines a choice."""
        missing = {name: np.nan for name in ("low", "high") if name not in self.points}
        points = self.points.assign(**missing)
        points = points.astype({"y": float, "low": float, "high": float})
        points = points[np.isfinite(points["y"])]
        names = points["line"].unique().tolist()
        if len(names) <= MOST:
            return points
        return points[points["line"].isin(self._chosen(points, names))]

    def _chosen(self, points: Frame, names: Sequence[str]) -> list[str]:
        """`MOST` lines: the best at the end, then one of every method, then a second."""
        far = points[points["x"] == points["x"].max()].set_index("line")["y"]
        best = far.idxmax() if self.shares else far.idxmin()
        seen: Counter[int | str] = Counter()
        turns = {}
        for line in [best, *(name for name in names if name != best)]:
            place = method_of(line)
            method = line if place is None else place
            turns[line] = seen[method]
            seen[method] += 1
        return sorted(turns, key=lambda line: turns[line])[:MOST]

    def said(self, y: float) -> str:
        """A figure as the vertical axis has it: in percent, or as a number."""
        return f"{y:.0%}" if self.shares else f"{y:,.4g}"

    def words(self) -> str:
        """What the chart shows, for screen readers: its axes, and the ends of every line."""
        parts = []
        for name, line in self.drawn().groupby("line", sort=False):
            ends = dict.fromkeys(line[["x", "y"]].iloc[[0, -1]].itertuples(index=False, name=None))
            parts.append(f"{name}: " + " to ".join(f"{self.said(y)} at {x:,.10g}" for x, y in ends))
        return f"Lines of {self.y} against {self.x}. {'; '.join(parts)}."


@dataclass(frozen=True)
class DotChart:
    """Shares in rows of two dots with their intervals, in the order of the first dots.

    Attributes:
        points: A row for every dot: ``line`` (the name of its row), ``place`` (which of the two
            it is), ``y``, ``low`` and ``high``.
        x: Title of the axis, from 0 to 100 %.
        places: The names of the first dot and of the second.
        notes: By the name of a row, words below it.
        bold: The row whose name is bold, if any.
        mark: A share, and its name.
    """

    points: Frame
    x: str
    places: tuple[str, str]
    notes: Mapping[str, str]
    bold: str
    mark: tuple[float, str]

    @property
    def order(self) -> list[str]:
        """The rows, from the one with the smallest first dot."""
        first = self.points[self.points["place"] == self.places[0]]
        return first.sort_values("y", kind="stable")["line"].tolist()

    def words(self) -> str:
        """What the chart shows, for screen readers."""
        table = self.points.pivot_table("y", "line", "place")
        rows = []
        for line in self.order:
            note = f" ({self.notes[line]})" if self.notes.get(line) else ""
            shares = " and ".join(f"{table.loc[line, place]:.0%}" for place in self.places)
            rows.append(f"{line}{note}: {shares}")
        places = " and ".join(self.places)
        share, name = self.mark
        return f"Dots, a row a method: {self.x}, {places}. {'; '.join(rows)}. {name}: {share:.0%}."


def method_of(name: str) -> int | None:
    """The place in `COLOURS` of the first method that a name speaks of, None if it has none."""
    places = (i for i, (words, *_) in enumerate(COLOURS) if any(w in name.lower() for w in words))
    return next(places, None)
