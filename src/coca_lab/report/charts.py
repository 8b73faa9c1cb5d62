"""Charts as data: what `coca_lab.report.drawing` draws, and the same in words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LOOKS = {"colour": "", "dash": "", "mark": "both"}
"""How lines are drawn, in columns that points may have, and what holds without them."""
MOST = 8
"""Lines of a chart, of more than there may be."""
COLOURS = (  # words in a name, its colour on light pages and on dark ones
    (("limited", "rerope"), "#0d6f73", "#4cc4c9"),  # also of a model of another method
    (("roles", "native"), "#0057b8", "#6db3f2"),
    (("roformer", "rope", "rotary", "base"), "#b0522a", "#e08a66"),
    (("alibi",), "#86691a", "#d0ae55"),
    (("strict",), "#2e7d5b", "#6fc5a0"),
    (("slack",), "#a0527d", "#d893b8"),
    (("magnitude",), "#6a5a9c", "#b3a6e6"),
    (("yarn",), "#7a4a12", "#c9925a"),
    (("self-extend", "leaky"), "#7d3c98", "#c79be0"),
    (("dynamic", "ntk"), "#5d6b1e", "#b5c240"),
    (("pope",), "#a33b4a", "#f0909c"),
    (("thin",), "#4d6b7c", "#9db8c7"),
    (("linear",), "#8a5a00", "#f0b429"),
    ((), "#5f5f5f", "#b4b4b4"),
    ((), "#35618e", "#8fb6dd"),
)
"""A method has one colour in every figure; names without one take those that are free."""
DASHES = ("1 0", "6 3", "2 3", "9 3 2 3")
"""Of lines without dashes of their own, by how many names of a page have the same colour."""
Frame = Any
"""A pandas.DataFrame, whose types leave open what a column, a row or a figure of it is."""
Palette = dict[str, tuple[int, int]]
"""The place of every name's colour, and how many names before it have the same."""


@dataclass(frozen=True)
class LineChart:
    """Lines over one horizontal axis, with their names at their ends.

    Attributes:
        points: A row for every point, in the order of the lines: ``line`` (its name), ``x``, ``y``;
            values that are not finite are left out. Optional are ``low`` and ``high`` (ends of the
            interval), ``colour`` (a name that has one colour in all charts; by default the line's),
            ``dash`` (lengths of dashes and gaps, such as "6 3") and ``mark`` ("line" or "both").
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        ticks: Where to label the horizontal axis, which is logarithmic to base 2.
        shares: Whether the vertical axis is linear, from 0 to 100 %; otherwise it is logarithmic.
        mark: A place on the horizontal axis, and its name.
        bars: Whether intervals are drawn, and not only told on hovering.
    """

    points: Frame
    x: str
    y: str
    ticks: Sequence[float] = ()
    shares: bool = False
    mark: tuple[float, str] | None = None
    bars: bool = True

    def drawn(self) -> Frame:
        """The finite points, with all columns: of more than `MOST` lines a choice."""
        every = {"low": np.nan, "high": np.nan, **LOOKS}
        missing = {name: of for name, of in every.items() if name not in self.points}
        points = self.points.assign(**missing).fillna(LOOKS)
        points = points.astype({"y": float, "low": float, "high": float})
        points["colour"] = points["colour"].where(points["colour"] != "", points["line"])
        points = points[np.isfinite(points["y"])]
        lines = points.drop_duplicates("line").set_index("line")["colour"]
        if len(lines) <= MOST:
            return points
        return points[points["line"].isin(self._chosen(points, lines.to_dict()))]

    def _chosen(self, points: Frame, names: dict[str, str]) -> list[str]:
        """`MOST` lines: the best at the end, then one of every method, then a second."""
        far = points[points["x"] == points["x"].max()].set_index("line")["y"]
        best = far.idxmax() if self.shares else far.idxmin()
        seen: Counter[int | str] = Counter()
        turns = {}
        for line in [best, *(name for name in names if name != best)]:
            place = method_of(names[line])
            method = names[line] if place is None else place
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


def method_of(name: str) -> int | None:
    """The place in `COLOURS` of the first method that a name speaks of, None if it has none."""
    places = (i for i, (words, *_) in enumerate(COLOURS) if any(w in name.lower() for w in words))
    return next(places, None)
