"""Charts: what a section shows, and the Vega-Lite specification that draws it.

A chart is a static SVG, for a wide and a narrow page. Colours are variables of the page's style
sheet, since they depend on whether the page is light or dark.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np
import vl_convert

METHODS = (  # words in a name, its colour on light pages and on dark ones
    (("roles", "native"), "#0057b8", "#6db3f2"),
    (("roformer", "rope", "rotary", "base"), "#b0522a", "#e08a66"),
    (("alibi",), "#86691a", "#d0ae55"),
    (("strict",), "#2e7d5b", "#6fc5a0"),
    (("slack",), "#a0527d", "#d893b8"),
    (("magnitude",), "#6a5a9c", "#b3a6e6"),
    (("limited", "rerope"), "#0d6f73", "#4cc4c9"),
    (("yarn",), "#7a4a12", "#c9925a"),
    (("self-extend",), "#7d3c98", "#c79be0"),
    (("dynamic", "ntk"), "#5d6b1e", "#b5c240"),
    (("pope",), "#a33b4a", "#f0909c"),
    (("thin",), "#4d6b7c", "#9db8c7"),
    (("linear",), "#8a5a00", "#f0b429"),
    ((), "#5f5f5f", "#b4b4b4"),
    ((), "#35618e", "#8fb6dd"),
)
"""A method has one colour in every figure; names without one take those that are free."""
LIMITED = 6
"""The place of limited distances, which a model of another method may have been given."""
DASHES = ("1 0", "6 3", "2 3", "9 3 2 3")
"""Of lines without dashes of their own, by how many names of a page have the same colour."""
LEAST = 0.15
"""A vertical axis spans at least so much to either side of its middle: noise is no trend."""
WIDE, NARROW = 700, 350
"""Pixels, with the labels."""
FEWEST, MOST = 5, 8
"""Lines that are drawn at first, of more than there may be."""
GAP = 15
"""Pixels between two labels."""
STYLE = {
    "background": "transparent",
    "font": "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **{"labelColor": "var(--soft)", "titleColor": "var(--text)", "titleFontWeight": "normal"},
        **{"gridColor": "var(--rule)", "domainColor": "var(--axis)", "tickColor": "var(--axis)"},
        **{"labelFontSize": 12, "titleFontSize": 13},
    },
    # The title of the vertical axis stands above it, where it takes no width.
    "axisY": {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": 0}
    | {"titleY": -24, "titleBaseline": "bottom"},
    "legend": {"labelColor": "var(--text)", "titleColor": "var(--text)", "orient": "bottom"}
    | {"titleFontWeight": "normal", "titleFontSize": 13, "labelFontSize": 12},
}

LOOKS = {"colour": "", "dash": "", "mark": "both", "first": True}
"""How lines are drawn, in columns that points may have, and what holds without them."""
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
            ``dash`` (lengths of dashes and gaps, such as "6 3"), ``mark`` ("line", "points" or
            "both"), and ``first``: whether the line is drawn at first, or in `everything` alone.
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        ticks: Where to label the horizontal axis, which is then logarithmic to base 2.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is logarithmic.
        top: Upper end of a linear vertical axis that begins at 0.
        mark: A place on the horizontal axis, and its name.
        level: A value on the vertical axis at which a line is drawn.
        bars: Whether intervals are drawn, and not only told on hovering.
        every: Whether all lines are drawn.
    """

    points: Frame
    x: str
    y: str
    ticks: Sequence[float] = ()
    log_x: bool = False
    log_y: bool = False
    top: float | None = None
    mark: tuple[float, str] | None = None
    level: float | None = None
    bars: bool = True
    every: bool = False

    def _complete(self) -> Frame:
        """The finite points, with all columns."""
        every = {"low": np.nan, "high": np.nan, **LOOKS}
        missing = {name: of for name, of in every.items() if name not in self.points}
        points = self.points.assign(**missing).fillna(LOOKS)
        points = points.astype({"y": float, "low": float, "high": float})
        points["colour"] = points["colour"].where(points["colour"] != "", points["line"])
        return points[np.isfinite(points["y"])]

    def _first(self) -> Frame:
        """The points that are drawn at first.

        Of many lines they are the best at the end, the first of every method, then the second.
        """
        points = self._complete()
        if self.every:
            return points
        chosen = points[points["first"].astype(bool)]
        chosen = chosen if len(chosen) else points
        lines = chosen.drop_duplicates("line").set_index("line")
        if len(lines) > MOST:
            far = chosen[chosen["x"] == chosen["x"].max()].set_index("line")["y"]
            best = far.idxmax() if self.top else far.idxmin()  # the one that is written about
            methods = lines["colour"].map(
                lambda name: name if (m := method_of(name)) is None else m
            )
            methods = methods.loc[[best, *methods.index.drop(best)]]
            turn = methods.groupby(methods, sort=False).cumcount()
            count = max(FEWEST, min(MOST, methods.nunique()))
            names = turn[turn < len(DASHES)].sort_values(kind="stable").index[:count]
            chosen = chosen[chosen["line"].isin(names)]
        return chosen

    @property
    def everything(self) -> "LineChart | None":
        """The chart with the lines that are not drawn at first, if there are any."""
        hidden = len(self._first()) < len(self._complete())
        return replace(self, every=True) if hidden else None

    def words(self) -> str:
        """What the chart shows, for screen readers: its axes, and the ends of every line."""
        parts, points = [], self._first()
        for name, line in points[points["mark"] != "points"].groupby("line", sort=False):
            ends = dict.fromkeys(line[["x", "y"]].iloc[[0, -1]].itertuples(index=False, name=None))
            parts.append(f"{name}: " + " to ".join(f"{y:,.3g} at {x:,.10g}" for x, y in ends))
        return f"Lines of {self.y} against {self.x}. {'; '.join(parts)}."

    def specification(self, palette: Palette, width: int = WIDE, height: int = 0) -> dict[str, Any]:
        """The Vega-Lite specification of a picture so wide, with room for the lines' names."""
        points = self._first()
        lines = points.drop_duplicates("line")
        looks = [_look(row.colour, row.dash, palette) for row in lines.itertuples()]
        low, high = domain = self._domain(points)
        height = max(height or (300 if width == WIDE else 260), GAP * len(lines))
        label = min(7.5 * max(map(len, lines["line"]), default=0) + 8, 0.36 * width)

        def by_line(values: Sequence[Any]) -> alt.Scale:
            return alt.Scale(type="ordinal", domain=lines["line"].tolist(), range=[*values])

        base = alt.Chart(alt.InlineData(values=_records(points, self))).encode(
            x=self._horizontal(points, width),
            y=alt.Y("y:Q", title=self.y, scale=self._scale(domain), axis=_axis(low, high, self)),
            color=alt.Color("line:N", scale=by_line([c for c, _ in looks]), legend=None),
            strokeDash=alt.StrokeDash("line:N", scale=by_line([d for _, d in looks]), legend=None),
        )
        layers: list[Any] = [base.transform_filter("datum.mark != 'points'").mark_line(clip=True)]
        if self.bars and points["low"].notna().any():
            ends = base.transform_filter("isValid(datum.low)").encode(y="low:Q", y2="high:Q")
            layers.insert(
                0, ends.transform_filter("datum.mark != 'points'").mark_area(opacity=0.15)
            )
            layers.append(ends.transform_filter("datum.mark == 'points'").mark_rule())
        dots = base.transform_filter("datum.mark != 'line'").encode(description="told:N")
        layers += [dots.mark_circle(size=45, opacity=1), *self._marks(points)]
        layers += self._labels(lines, points, looks, (low, high), height, label)
        made = _styled(alt.layer(*layers).properties(width=width - label - 80, height=height))
        made["padding"] = {"top": 5, "left": 5, "bottom": 5, "right": 20}
        return made

    def _domain(self, points: Frame) -> tuple[float, float]:
        """Ends of the vertical axis, at least `LEAST` to either side of the middle."""
        if self.top is not None:
            return -0.02 * self.top, 1.04 * self.top
        values = points[["y", "low", "high"]] if self.bars else points[["y"]]
        found = values.to_numpy(dtype=float)
        found = found[np.isfinite(found) & ((found > 0) | (not self.log_y))]
        if not found.size:
            return 0.1, 1.0
        low, high = float(found.min()), float(found.max())
        if self.level is not None:
            low, high = min(low, self.level), max(high, self.level)
        if self.log_y:
            middle = math.sqrt(low * high)
            reach = max(math.sqrt(high / low) * 1.03, 1 + LEAST)
            return middle / reach, middle * reach
        middle = (low + high) / 2
        reach = max((high - low) * 0.52, LEAST * abs(middle)) or 1.0
        return middle - reach, middle + reach

    def _scale(self, domain: tuple[float, float]) -> alt.Scale:
        kind: Any = "log" if self.log_y else "linear"
        ends = [float(f"{end:.6g}") for end in domain]
        return alt.Scale(type=kind, domain=ends, nice=False, zero=False)

    def _horizontal(self, points: Frame, width: int) -> alt.X:
        scale, axis = alt.Scale(nice=False, zero=False), alt.Axis(format=",.6~g", grid=False)
        if self.ticks:
            scale = alt.Scale(type="log", base=2, nice=False)
            axis = alt.Axis(values=[*self.ticks], format=",.6~g", labelOverlap="parity", grid=False)
        elif self.log_x:
            scale = alt.Scale(type="log", nice=False, padding=15)
            axis = alt.Axis(format="~s", labelOverlap=True, labelSeparation=10, grid=False)
        if width == NARROW:
            axis["tickCount"] = 4
        return alt.X("x:Q", title=self.x, scale=scale, axis=axis)

    def _marks(self, points: Frame) -> list[Any]:
        """The marked place and level."""
        layers: list[Any] = []
        if self.level is not None:
            data = alt.Chart(alt.InlineData(values=[{"y": self.level}]))
            layers.append(data.mark_rule(color="var(--soft)", strokeDash=[2, 3]).encode(y="y:Q"))
        if self.mark is not None and self.mark[0] <= points["x"].max():
            place, name = self.mark
            data = alt.Chart(alt.InlineData(values=[{"x": place, "name": name}])).encode(x="x:Q")
            layers.append(data.mark_rule(color="var(--axis)", strokeDash=[2, 3]))
            words = data.mark_text(color="var(--soft)", align="left", baseline="bottom", dx=2)
            layers.append(words.encode(y=alt.value(-4), text="name:N"))
        return layers

    def _labels(
        self,
        lines: Frame,
        points: Frame,
        looks: Sequence[Any],
        domain: tuple[float, float],
        height: int,
        width: float,
    ) -> list[Any]:
        """The names of the lines beside their ends, apart from each other."""
        drawn = points[points["mark"] != "points"]
        ends = drawn.loc[drawn.groupby("line", sort=False)["x"].idxmax()].set_index("line")["y"]
        colours = {name: colour for name, (colour, _) in zip(lines["line"], looks, strict=True)}
        turn = math.log if self.log_y else float
        low, high = map(turn, domain)
        places = {
            name: height * (high - turn(max(y, domain[0]) if self.log_y else y)) / (high - low)
            for name, y in ends.items()
        }
        return [
            alt.Chart(alt.InlineData(values=[{"name": name}]))
            .mark_text(align="left", baseline="middle", dx=8, limit=width - 8, fontSize=12)
            .encode(
                x=alt.value("width"),
                y=alt.value(round(place, 1)),
                text="name:N",
                color=alt.value(colours[name]),
            )
            for name, place in spread(places, height).items()
        ]


def spread(places: dict[str, float], height: float) -> dict[str, float]:
    """Places moved apart to at least `GAP`, in their order, and down to ``height`` if they fit."""
    order = sorted(places, key=lambda name: places[name])
    found: list[float] = []
    for name in order:
        found.append(max(places[name], found[-1] + GAP if found else 0.0))
    end = float(height)
    for index in reversed(range(len(found))):
        found[index] = min(found[index], end)
        end = found[index] - GAP
    return dict(zip(order, found, strict=True))


def static_svg(specification: dict[str, Any], prefix: str) -> str:
    """A chart as SVG, with ids that begin with a prefix and so are unique on the page.

    What a point says in its description becomes its title, which browsers show on hovering.
    """
    svg = vl_convert.vegalite_to_svg(specification)
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        number = numbers.setdefault(match[2], len(numbers))
        return f"{match[1]}{prefix}-{number}"

    def change(tag: re.Match[str]) -> str:
        # The page describes the chart; marks that have a role but no name are an error to checkers.
        bare = re.sub(r' (role|aria-[a-z]+)="[^"]*"', "", tag[0])
        bare = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', numbered, bare)
        told = re.match(r'<path aria-label="([^"]*)"[^>]*aria-roledescription="circle"', tag[0])
        return f"{bare.removesuffix('/>')}><title>{told[1]}</title></path>" if told else bare

    return re.sub(r"<[^<>]+>", change, svg)  # tags alone: names may contain anything


def _axis(low: float, high: float, chart: LineChart) -> alt.Axis:
    """An axis with few round labels; Vega has none on a logarithmic one of less than a decade."""
    if chart.top == 1:
        return alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format="%")
    if not chart.log_y:
        return alt.Axis(format=",.6~g", tickCount=5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), np.arange(1, 10, 0.5)):
        ticks = [float(s * 10.0**d) for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= 3:
            return alt.Axis(values=ticks, format=",.4~g", labelOverlap=True)
    return alt.Axis(values=np.geomspace(low, high, 5).tolist(), format=",.3~g")


def _styled(chart: Any) -> dict[str, Any]:
    made = chart.to_dict(validate=False) | {"config": STYLE}
    del made["$schema"]  # an address, which the page does not need
    return made


def _records(points: Frame, chart: LineChart) -> list[dict[str, Any]]:
    """The points as JSON values, with what they say on hovering."""
    rows = points[["line", "x", "y", "low", "high", "mark"]].to_dict("records")
    for row in rows:
        row["told"] = f"{row['line']}: {row['y']:,.4g} at {row['x']:,.10g}"
        if math.isfinite(row["low"]) and math.isfinite(row["high"]):
            row["told"] += f" ({row['low']:,.4g} to {row['high']:,.4g})"
        else:
            del row["low"], row["high"]
    return rows


def method_of(name: str) -> int | None:
    """The place in `METHODS` of the method that a name speaks of, None if it has none."""
    places = [i for i, (words, *_) in enumerate(METHODS) if any(w in name.lower() for w in words)]
    return LIMITED if LIMITED in places else next(iter(places), None)


def _look(name: str, dash: str, palette: Palette) -> tuple[str, list[int]]:
    """The colour and dashes of a line."""
    if name not in palette:
        place, taken = method_of(name), [place for place, _ in palette.values()]
        if place is None:
            free = (i for i in reversed(range(len(METHODS))) if i not in taken)
            place = next(free, len(palette) % len(METHODS))
        palette[name] = place, taken.count(place)
    place, before = palette[name]
    return f"var(--c{place})", [int(n) for n in (dash or DASHES[before % len(DASHES)]).split()]
