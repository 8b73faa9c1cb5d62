"""Charts: what a section shows, and the one Vega-Lite specification that draws it.

The specification gives both the interactive chart of the page and the static SVG. Colours are
variables of the page's style sheet, since they depend on whether the page is light or dark.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import vl_convert

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
DASHES = ("1 0", "6 3", "2 3", "9 3 2 3")
"""Of lines without dashes of their own, by how often the colours have been used up."""
ENTRIES = 8
"""Names in a legend, at most; the lines of all others are drawn on demand."""
SPAN = 1.2
"""A vertical axis of one model reaches from a value to so many times it, at least."""
WIDTH, HEIGHT = 660, 300
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
STYLE = {
    "background": "transparent",
    "font": FONT,
    "aria": False,  # the page describes the chart; a reader of single marks would be told hundreds
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)",
        "titleColor": "var(--text)",
        "titleFontWeight": "normal",
        "gridColor": "var(--rule)",
        "domainColor": "var(--axis)",
        "tickColor": "var(--axis)",
        "labelFontSize": 11,
        "titleFontSize": 12,
    },
    # The title of the vertical axis stands above it, where it takes no width.
    "axisY": {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": 0}
    | {"titleY": -12, "titleBaseline": "bottom"},
    "legend": {
        "labelColor": "var(--text)",
        "titleColor": "var(--text)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "labelLimit": 300,
        "symbolSize": 300,
        "symbolStrokeWidth": 2,
        "columns": 2,
        "columnPadding": 40,
        "orient": "bottom",
    },
}

LOOKS = {"colour": "", "dash": "", "mark": "both", "legend": "first"}
"""How lines are drawn, in columns that points may have, and what holds without them."""
Frame = Any
"""A pandas.DataFrame, whose types leave open what a column, a row or a figure of it is."""
Palette = dict[str, int]
"""The place of every name's colour, so that a model has one colour on a page."""


@dataclass(frozen=True)
class LineChart:
    """Lines over one horizontal axis.

    Attributes:
        points: A row for every point, in the order of the lines: ``line`` (its name), ``x``, ``y``;
            values that are not finite are left out. Optional are ``low`` and ``high`` (ends of the
            interval), ``colour`` (a name that has one colour in all charts; by default the line's),
            ``dash`` (lengths of dashes and gaps, such as "6 3"), ``mark`` ("line", "points" or
            "both"), and ``legend``: "first", "spare" (named where there is room) or "none" (never
            named; it comes and goes with its colour).
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        ticks: Where to label the horizontal axis, which is then logarithmic to base 2.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is logarithmic at first; None: always linear.
        top: Upper end of a linear vertical axis.
        mark: A place on the horizontal axis, and its name.
        level: A value on the vertical axis at which a line is drawn.
        bars: Whether intervals are drawn, and not only told on hovering.
    """

    points: Frame
    x: str
    y: str
    ticks: Sequence[float] = ()
    log_x: bool = False
    log_y: bool | None = None
    top: float | None = None
    mark: tuple[float, str] | None = None
    level: float | None = None
    bars: bool = True

    def _complete(self) -> Frame:
        """The finite points, with all columns."""
        every = {"low": np.nan, "high": np.nan, **LOOKS}
        missing = {name: of for name, of in every.items() if name not in self.points}
        points = self.points.assign(**missing).fillna(LOOKS)
        points = points.astype({"y": float, "low": float, "high": float})
        points["colour"] = points["colour"].where(points["colour"] != "", points["line"])
        return points[np.isfinite(points["y"])]

    @property
    def legend(self) -> list[str]:
        """The names that are shown at first."""
        lines = self._complete().drop_duplicates("line")
        names = lines[lines["legend"] != "none"]
        if len(names) > ENTRIES:
            names = names[names["legend"] == "first"]
        return names["line"].tolist()[:ENTRIES]

    def words(self) -> str:
        """What the chart shows, for screen readers: its axes, and the ends of every line."""
        parts, points = [], self._complete()
        for name, line in points[points["mark"] != "points"].groupby("line", sort=False):
            ends = dict.fromkeys(line[["x", "y"]].iloc[[0, -1]].itertuples(index=False, name=None))
            parts.append(f"{name}: " + " to ".join(f"{y:,.3g} at {x:,.10g}" for x, y in ends))
        return f"Lines of {self.y} against {self.x}. {'; '.join(parts)}."

    def specification(self, palette: Palette) -> dict[str, Any]:
        """The Vega-Lite specification, and in ``usermeta`` what the page's script may change.

        ``log``: whether the vertical axis is logarithmic, if it can be switched. ``hidden``: how
        many lines are filtered out at first.
        """
        points, names = self._complete(), self.legend
        lines = points.drop_duplicates("line")
        beside = set(lines["colour"][lines["line"].isin(names)])
        unnamed = (points["legend"] == "none") & points["colour"].isin(beside)
        points["first"] = points["line"].isin(names) | unnamed
        shown = alt.selection_point(name="shown", fields=["line"], bind="legend", toggle="true")
        zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")
        base = self._encoded(points, lines, names, palette)
        base = base.encode(opacity=alt.condition(shown, alt.value(1), alt.value(0.1)))
        layers: list[Any] = [base.transform_filter("datum.mark != 'points'").mark_line()]
        # Named, as names that Altair gives differ from call to call.
        layers[0] = layers[0].add_params(shown, zoom).properties(name="lines")
        layers.append(base.transform_filter("datum.mark != 'line'").mark_circle(size=45))
        if self.bars and points["low"].notna().any():
            ends = {"y": "low:Q", "y2": "high:Q", "strokeWidth": alt.value(1.2)}
            layers.append(base.transform_filter("isValid(datum.low)").mark_rule().encode(**ends))
        layers += self._marks()
        made = _styled(alt.layer(*layers).properties(width=WIDTH, height=HEIGHT))
        made["padding"] = {"top": 5, "left": 5, "bottom": 5, "right": 25}
        made["params"] = [{"name": "all", "value": False}, *made["params"]]
        made["usermeta"] = {"hidden": int((lines["legend"] != "none").sum()) - len(names)}
        if self.log_y is not None:
            made["usermeta"]["log"] = self.log_y
        return made

    def _encoded(
        self, points: Frame, lines: Frame, names: list[str], palette: Palette
    ) -> alt.Chart:
        """The points with their axes, and the look of every line."""
        legend = alt.Legend(title=None, symbolType="stroke", values=names)

        def by_line(values: Iterable[Any]) -> dict[str, Any]:
            scale = alt.Scale(type="ordinal", domain=lines["line"].tolist(), range=[*values])
            return {"scale": scale, "legend": legend}

        looks = [_look(row.colour, row.dash, palette) for row in lines.itertuples()]
        widths = _widths(points, names, logarithmic=bool(self.log_y))
        base = alt.Chart(alt.InlineData(values=_records(points)))
        return base.transform_filter("all || datum.first").encode(
            x=self._horizontal(),
            y=alt.Y("y:Q", title=self.y, scale=self._scale_y(points), axis=alt.Axis(format=",~g")),
            color=alt.Color("line:N", **by_line(colour for colour, _ in looks)),
            strokeDash=alt.StrokeDash("line:N", **by_line(dash for _, dash in looks)),
            strokeWidth=alt.StrokeWidth(
                "line:N", **by_line(widths.get(n, 2) for n in lines["line"])
            ),
            tooltip=[
                alt.Tooltip("line:N", title="line"),
                alt.Tooltip("x:Q", title=self.x, format=",~g"),
                alt.Tooltip("y:Q", title=self.y, format=",.4~g"),
                alt.Tooltip("interval:N", title="95 % interval"),
            ],
        )

    def _horizontal(self) -> alt.X:
        scale, axis = alt.Scale(nice=False), alt.Axis(format=",~g")
        if self.ticks:
            scale = alt.Scale(type="log", base=2)
            axis = alt.Axis(values=list(self.ticks), format=",~g", labelOverlap="parity")
        elif self.log_x:
            scale = alt.Scale(type="log", nice=False, padding=15)
            axis = alt.Axis(format="~s", labelOverlap=True, labelSeparation=10)
        return alt.X("x:Q", title=self.x, scale=scale, axis=axis)

    def _scale_y(self, points: Frame) -> alt.Scale:
        if self.top is not None:
            return alt.Scale(domain=[-0.02 * self.top, 1.06 * self.top], nice=False)
        domain: Any = alt.Undefined
        if self.log_y is not None and points["colour"].nunique() == 1:
            values = points[["y", "low", "high"]]
            low, high = float(values.min(axis=None)), float(values.max(axis=None))
            if 0 < low <= high < SPAN * low:
                middle, reach = math.sqrt(low * high), math.sqrt(SPAN)
                domain = [float(f"{end:.4g}") for end in (middle / reach, middle * reach)]
        if self.log_y:
            return alt.Scale(type="log", nice=False, padding=8, domain=domain)
        return alt.Scale(zero=self.log_y is None, domain=domain)

    def _marks(self) -> list[Any]:
        """The marked place and level."""
        layers: list[Any] = []
        if self.level is not None:
            data = alt.Chart(alt.InlineData(values=[{"y": self.level}]))
            layers.append(data.mark_rule(color="var(--soft)", strokeDash=[2, 3]).encode(y="y:Q"))
        if self.mark is not None:
            place, name = self.mark
            data = alt.Chart(alt.InlineData(values=[{"x": place, "name": name}])).encode(x="x:Q")
            layers.append(data.mark_rule(color="var(--soft)", strokeDash=[2, 3]))
            words = data.mark_text(color="var(--soft)", align="left", baseline="top", dx=4)
            layers.append(words.encode(y=alt.value(0), text="name:N"))
        return layers


@dataclass(frozen=True)
class HeatMap:
    """Values in a grid.

    Attributes:
        values: A row of the grid for every row; index and columns are the names along the axes.
        x: Title of the columns.
        y: Title of the rows.
        measure: What the values are.
        labels: Names of columns to label.
    """

    values: Frame
    x: str
    y: str
    measure: str
    labels: Sequence[str]

    def words(self) -> str:
        """What the chart shows, for screen readers."""
        ends = f"from {self.values.min(axis=None):.3g} to {self.values.max(axis=None):.3g}"
        return f"Heat map of the {self.measure}, {ends}, by {self.y} and {self.x}."

    def specification(self, palette: Palette) -> dict[str, Any]:
        """The Vega-Lite specification."""
        values = self.values.reset_index(names="y").melt("y", var_name="x")
        rows = values.to_dict("records")
        axis = alt.Axis(values=list(self.labels), labelAngle=0)
        legend = alt.Legend(gradientLength=300, titleLimit=400)
        scale = alt.Scale(scheme="cividis", domainMin=0)
        chart = alt.Chart(alt.InlineData(values=rows)).encode(
            x=alt.X("x:O", sort=None, title=self.x, axis=axis),
            y=alt.Y("y:O", sort=None, title=self.y),
            color=alt.Color("value:Q", title=self.measure, scale=scale, legend=legend),
            tooltip=[
                alt.Tooltip("y:O", title=self.y),
                alt.Tooltip("x:O", title=self.x),
                alt.Tooltip("value:Q", title=self.measure, format=".3~g"),
            ],
        )
        height = min(400, max(120, 22 * len(self.values)))
        return _styled(chart.mark_rect().properties(width=WIDTH, height=height))


Chart = LineChart | HeatMap


def static_svg(specification: dict[str, Any], prefix: str) -> str:
    """A chart as SVG, with ids that begin with a prefix and so are unique on the page."""
    svg = vl_convert.vegalite_to_svg(specification)
    numbers: dict[str, int] = {}

    def named(found: re.Match[str]) -> str:
        return f"{found[1]}{prefix}-{numbers.setdefault(found[2], len(numbers))}"

    def renamed(tag: re.Match[str]) -> str:
        return re.sub(r'(\bid="|href="#|url\(#)([^")]+)', named, tag[0])

    return re.sub(r"<[^<>]+>", renamed, svg)  # tags alone: names may contain anything


def _styled(chart: Any) -> dict[str, Any]:
    made = chart.to_dict(validate=False) | {"config": STYLE}
    del made["$schema"]  # an address, which the page does not need
    return made


def _records(points: Frame) -> list[dict[str, Any]]:
    """The points as JSON values, with their intervals in words."""
    rows = points[["line", "x", "y", "low", "high", "mark", "first"]].to_dict("records")
    for row in rows:
        low, high = row["low"], row["high"]
        if math.isfinite(low) and math.isfinite(high):
            row["interval"] = f"{low:.4g} to {high:.4g}"
        else:
            del row["low"], row["high"]
    return rows


def _look(colour: str, dash: str, palette: Palette) -> tuple[str, list[int]]:
    """The colour and dashes of a line."""
    place = palette.setdefault(colour, len(palette))
    turn = place // len(COLOURS)
    dashes = dash or DASHES[turn % len(DASHES)]
    return f"var(--c{place % len(COLOURS)})", [int(length) for length in dashes.split()]


def _widths(points: Frame, names: Sequence[str], *, logarithmic: bool) -> dict[str, int]:
    """Widths of named lines: what later ones would cover stays visible at their sides."""
    table = points.pivot_table("y", "x", "line").reindex(columns=names)
    if logarithmic:
        table = table[table > 0].map(np.log)
    near = 0.01 * (table.max(axis=None) - table.min(axis=None))
    widths = {}
    for place, name in enumerate(names):
        later = table.iloc[:, place + 1 :]
        close = later.sub(table[name], axis=0).abs() <= near
        covers = (close.sum() == table[name].count()) & (table[name].count() > 1)
        widths[name] = 2 + 3 * min(int(covers.sum()), 3)
    return widths
