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
TURNS = ((1, 0), (6, 3), (2, 3), (9, 3, 2, 3))
"""Dashes of lines without dashes of their own, by how often the colours have been used up."""
ENTRIES = 8
"""Names in a legend, at most; the lines of all others are drawn on demand."""
SPAN = 1.2
"""A vertical axis of one model reaches from a value to so many times it, at least."""
WIDTH, HEIGHT = 660, 300
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
STYLE = {
    "background": "transparent",
    "font": FONT,
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

ENDS = ("y", "low", "high")
Palette = dict[str, int]
"""The place of every name's colour, so that a model has one colour on a page."""
Ends = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart; values that are not finite are left out.

    Attributes:
        label: Its name in the legend; lines of one name look alike.
        x: Horizontal places.
        y: Values.
        ends: Ends of the interval of every value, or None.
        colour: A name that has the same colour in every chart; by default the label.
        dash: Lengths of dashes and gaps; by default as often as the colours repeat.
        joined: Whether the points are joined.
        dotted: Whether the points are shown.
        main: Whether it goes before others where there are too many.
        named: Whether it stands in the legend; if not, it comes and goes with its colour.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    ends: Sequence[Ends | None] | None = None
    colour: str = ""
    dash: Sequence[int] = ()
    joined: bool = True
    dotted: bool = True
    main: bool = True
    named: bool = True

    @property
    def hue(self) -> str:
        """The name that its colour belongs to."""
        return self.colour or self.label

    def points(self) -> list[dict[str, Any]]:
        """The finite points as rows of data."""
        ends = self.ends if self.ends is not None else [None] * len(self.x)
        rows = []
        for x, y, interval in zip(self.x, self.y, ends, strict=True):
            if y is None or not math.isfinite(y):
                continue
            row: dict[str, Any] = {"line": self.label, "x": x, "y": y}
            if interval is not None and all(map(math.isfinite, interval)):
                row |= {"low": interval[0], "high": interval[1]}
                row["interval"] = " to ".join(f"{end:.4g}" for end in interval)
            rows.append(row | {"joined": self.joined, "dotted": self.dotted})
        return rows


@dataclass(frozen=True)
class LineChart:
    """Lines over one horizontal axis.

    Attributes:
        lines: The lines.
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

    lines: Sequence[Line]
    x: str
    y: str
    ticks: Sequence[float] = ()
    log_x: bool = False
    log_y: bool | None = None
    top: float | None = None
    mark: tuple[float, str] | None = None
    level: float | None = None
    bars: bool = True

    @property
    def legend(self) -> list[str]:
        """The names that are shown at first."""
        named = [line for line in self.lines if line.named]
        if len({line.label for line in named}) > ENTRIES:
            named = [line for line in named if line.main]
        return list(dict.fromkeys(line.label for line in named))[:ENTRIES]

    @property
    def rows(self) -> int:
        """Entries of the legend."""
        return len(self.legend)

    def words(self) -> str:
        """What the chart shows, for screen readers: its axes, and the ends of every line."""
        parts = []
        for line in self.lines:
            points = line.points()
            if points and line.joined:
                ends = dict.fromkeys((p["x"], p["y"]) for p in (points[0], points[-1]))
                said = " to ".join(f"{y:,.3g} at {x:,.10g}" for x, y in ends)
                parts.append(f"{line.label}: {said}")
        return f"Lines of {self.y} against {self.x}. {'; '.join(parts)}."

    def specification(self, palette: Palette) -> dict[str, Any]:
        """The Vega-Lite specification, and in ``usermeta`` what the page's script may change.

        ``log``: whether the vertical axis is logarithmic, if it can be switched. ``hidden``: how
        many lines are filtered out at first.
        """
        names = self.legend
        hues = {line.hue for line in self.lines if line.label in names}
        drawn = [line.label in names if line.named else line.hue in hues for line in self.lines]
        looks = {line.label: _look(line, palette) for line in self.lines}
        seen = [line for line in self.lines if line.label in names]
        widths = {line.label: _width(line, seen) for line in self.lines}
        shown = alt.selection_point(name="shown", fields=["line"], bind="legend", toggle="true")
        zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")
        legend = alt.Legend(title=None, symbolType="stroke", values=names)

        def by_line(values: Iterable[Any]) -> dict[str, Any]:
            scale = alt.Scale(type="ordinal", domain=[*looks], range=[*values])
            return {"scale": scale, "legend": legend}

        points = [
            point | {"first": first}
            for line, first in zip(self.lines, drawn, strict=True)
            for point in line.points()
        ]
        base = alt.Chart(alt.InlineData(values=points)).transform_filter("all || datum.first")
        base = base.encode(
            x=alt.X("x:Q", title=self.x, scale=self._scale_x(), axis=self._axis_x()),
            y=alt.Y("y:Q", title=self.y, scale=self._scale_y(), axis=alt.Axis(format=",~g")),
            color=alt.Color("line:N", **by_line(colour for colour, _ in looks.values())),
            strokeDash=alt.StrokeDash("line:N", **by_line(dash for _, dash in looks.values())),
            strokeWidth=alt.StrokeWidth("line:N", **by_line(widths.values())),
            opacity=alt.condition(shown, alt.value(1), alt.value(0.1)),
            tooltip=[
                alt.Tooltip("line:N", title="line"),
                alt.Tooltip("x:Q", title=self.x, format=",~g"),
                alt.Tooltip("y:Q", title=self.y, format=",.4~g"),
                alt.Tooltip("interval:N", title="95 % interval"),
            ],
        )
        layers: list[Any] = [base.transform_filter("datum.joined").mark_line()]
        # Named, as names that Altair gives differ from call to call.
        layers[0] = layers[0].add_params(shown, zoom).properties(name="lines")
        layers.append(base.transform_filter("datum.dotted").mark_circle(size=45))
        if self.bars and any(line.ends for line in self.lines):
            bars = base.transform_filter("isValid(datum.low)")
            ends = {"y": "low:Q", "y2": "high:Q", "strokeWidth": alt.value(1.2)}
            layers.append(bars.mark_rule().encode(**ends))
        layers += self._marks()
        chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
        made = _styled(chart)
        made["padding"] = {"top": 5, "left": 5, "bottom": 5, "right": 25}
        made["params"] = [{"name": "all", "value": False}, *made["params"]]
        made["usermeta"] = {
            "hidden": len({line.label for line in self.lines if line.named}) - len(names)
        }
        if self.log_y is not None:
            made["usermeta"]["log"] = self.log_y
        return made

    def _scale_x(self) -> alt.Scale:
        if self.ticks:
            return alt.Scale(type="log", base=2)
        return alt.Scale(type="log" if self.log_x else "linear", nice=False)

    def _axis_x(self) -> alt.Axis:
        if self.ticks:
            return alt.Axis(values=list(self.ticks), format=",~g", labelOverlap="parity")
        return alt.Axis(format=",~g")

    def _scale_y(self) -> alt.Scale:
        if self.top is not None:
            return alt.Scale(domain=[-0.02 * self.top, 1.06 * self.top], nice=False)
        domain: Any = alt.Undefined
        values = [p[n] for line in self.lines for p in line.points() for n in ENDS if n in p]
        if self.log_y is not None and len({line.hue for line in self.lines}) == 1 and values:
            low, high = min(values), max(values)
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
        x: Title of the columns, and their names.
        y: Title of the rows, and their names.
        values: A row of values for every row.
        measure: What the values are.
        top: The largest value of the scale; by default that of the values.
        labels: Names of columns to label; by default all.
    """

    x: tuple[str, Sequence[str]]
    y: tuple[str, Sequence[str]]
    values: Sequence[Sequence[float]]
    measure: str
    top: float | None = None
    labels: Sequence[str] | None = None
    rows: int = 1

    def words(self) -> str:
        """What the chart shows, for screen readers."""
        every = [value for row in self.values for value in row]
        ranges = f"from {min(every):.3g} to {max(every):.3g}"
        return f"Heat map of the {self.measure}, {ranges}, by {self.y[0]} and {self.x[0]}."

    def specification(self, palette: Palette) -> dict[str, Any]:
        """The Vega-Lite specification."""
        rows = [
            {"x": x, "y": y, "value": value}
            for y, row in zip(self.y[1], self.values, strict=True)
            for x, value in zip(self.x[1], row, strict=True)
        ]
        values = alt.Undefined if self.labels is None else list(self.labels)
        chart = alt.Chart(alt.InlineData(values=rows)).encode(
            x=alt.X("x:O", sort=None, title=self.x[0], axis=alt.Axis(values=values, labelAngle=0)),
            y=alt.Y("y:O", sort=None, title=self.y[0]),
            color=alt.Color(
                "value:Q",
                title=self.measure,
                scale=alt.Scale(scheme="cividis", domainMin=0, domainMax=self.top or alt.Undefined),
                legend=alt.Legend(gradientLength=300, titleLimit=400),
            ),
            tooltip=[
                alt.Tooltip("y:O", title=self.y[0]),
                alt.Tooltip("x:O", title=self.x[0]),
                alt.Tooltip("value:Q", title=self.measure, format=".3~g"),
            ],
        )
        height = min(400, max(120, 22 * len(self.y[1])))
        return _styled(chart.mark_rect().properties(width=WIDTH, height=height))


Chart = LineChart | HeatMap


def static_svg(specification: dict[str, Any], prefix: str) -> str:
    """A chart as SVG, with ids that begin with a prefix and so are unique on the page."""
    svg = vl_convert.vegalite_to_svg(specification)
    numbers: dict[str, int] = {}

    def own(match: re.Match[str]) -> str:
        number = numbers.setdefault(match[2], len(numbers))
        return f"{match[1]}{prefix}-{number}"

    def change(tag: re.Match[str]) -> str:
        # The page describes the chart; a reader of single marks would be told hundreds.
        bare = re.sub(r' (role|aria-[a-z]+)="[^"]*"', "", tag[0])
        return re.sub(r'(\bid="|href="#|url\(#)([^")]+)', own, bare)

    return re.sub(r"<[^<>]+>", change, svg)  # tags alone: names may contain anything


def _styled(chart: Any) -> dict[str, Any]:
    made = chart.to_dict(validate=False) | {"config": STYLE}
    del made["$schema"]  # an address, which the page does not need
    return made


def _look(line: Line, palette: Palette) -> tuple[str, list[int]]:
    place = palette.setdefault(line.hue, len(palette))
    turn = place // len(COLOURS)
    return f"var(--c{place % len(COLOURS)})", list(line.dash or TURNS[turn % len(TURNS)])


def _width(line: Line, seen: Sequence[Line]) -> int:
    """Width of a line: what later ones would cover stays visible at their sides."""
    if line not in seen:
        return 2
    every = [point["y"] for each in seen for point in each.points()]
    near = 0.01 * (max(every) - min(every)) if every else 0.0
    points = {point["x"]: point["y"] for point in line.points()}
    covers = 0
    for later in seen[seen.index(line) + 1 :]:
        apart = [abs(p["y"] - points[p["x"]]) for p in later.points() if p["x"] in points]
        covers += 2 * sum(each <= near for each in apart) > len(points) > 1
    return 2 + 4 * min(covers, 2)
