"""Charts as pictures: a static SVG, for a wide and a narrow page, by Altair.

Colours are variables of the page's style sheet, since they depend on whether the page is light or
dark. Only pages import this module, so that commands which print tables start without Altair.
"""

import json
import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from scipy.optimize import isotonic_regression

from coca_lab.report.charts import COLOURS, DotChart, Frame, LineChart, Palette, method_of

SHADES, DASHES = ("c", "d"), ("1 0", "6 3", "2 3", "9 3 2 3")
"""In turn, of lines that have the same method: its colour and a deeper one, and their dashes."""
QUIET: tuple[str, list[int]] = "var(--soft)", [1, 0]
"""Colour and dashes of lines that are not strong."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
SHAPES += ("triangle-left", "triangle-right")
"""Of the dots of a chart's lines, as many as there may be."""
LEAST = 0.15
"""A vertical axis spans at least so much to either side of its middle: noise is no trend."""
FAR = 4
"""Lines without which the vertical axis can be so many times shorter are clipped."""
WIDE, NARROW = 900, 350
"""Pixels, with the labels."""
NAMES_OF_ROWS = 18
"""Letters of the names of rows, which wrap."""
APART = 4
"""Pixels of the two dots of a row from its middle, so that neither covers the other's interval."""
ACCENT = f"var(--c{method_of('roles')})"
"""Of the first dots of rows: blue, which is the colour of no method that trains nothing."""
FONT, LETTER = 12, 0.6
"""Pixels of labels, and of them the width of a letter; titles of axes are one pixel larger."""
COLUMN, PRINTED, PRINTED_FONT = 3.3, 10, "Helvetica, Arial, sans-serif"
"""Inches of a paper's column, in which 96 pixels are an inch and labels have 7.5 points."""
LOGARITHMIC = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.5, *range(2, 10)))
"""Digits of the ticks of a logarithmic axis: the first that give three."""
LONGER = 1.25
"""So many times a logarithmic axis may be longer than it must, to end with round numbers."""
GAP = 15
"""Pixels between two labels, and of the thin lines that lead to them."""
NAMES = ("page", "text", "soft", "axis", "rule")
INKS = {
    "light": ("#ffffff", "#24292f", "#57606a", "#888888", "#e4e4e4"),
    "dark": ("#1e2129", "#d7dde5", "#a9b1bb", "#888888", "#3a3f47"),
}
STYLE = {
    "background": "transparent",
    "font": "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **{"labelColor": "var(--soft)", "titleColor": "var(--text)", "titleFontWeight": "normal"},
        **{"gridColor": "var(--rule)", "domainColor": "var(--axis)", "tickColor": "var(--axis)"},
    },
    # The title of the vertical axis stands above it, where it takes no width.
    "axisY": {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": 0}
    | {"titleY": -24, "titleBaseline": "bottom"},
}
Specification = dict[str, Any]
"""Of a picture, in Vega-Lite's format."""


def specification(
    chart: LineChart | DotChart,
    palette: Palette,
    width: int = WIDE,
    height: int = 0,
    font: float = FONT,
) -> Specification:
    """The picture of a chart, so wide with room for the names of its lines or rows.

    Args:
        chart: What to draw.
        palette: The colours of the page so far; names without one are added.
        width: In pixels.
        height: In pixels, without the axis; by default as fits the width, or the rows.
        font: Size of the labels in pixels.
    """
    if isinstance(chart, DotChart):
        return _dots(chart, width, font)
    points = chart.drawn()
    strong = chart.strong or points["line"].unique().tolist()
    looks = {
        line: _look(line, palette) if line in strong else QUIET for line in points["line"].unique()
    }
    ticks = _ticks(chart, points)
    domain = (-0.02, 1.04) if chart.shares else (ticks[0], ticks[-1])
    last = points.sort_values("x", kind="stable").groupby("line", sort=False).tail(1)
    last = last.set_index("line")
    model = next(iter(looks), "")  # whose name stands once where all lines are of it
    of_one = all(line.startswith(model) for line in looks)
    names = {}  # in rows; of what is clipped with the value
    for line, y in last["y"].items():
        name = re.sub(rf"^{re.escape(model)}( \+|,) ", "", line) if of_one else line
        name += "" if y <= domain[1] else f" ↑ {chart.said(y)}"
        names[line] = textwrap.wrap(name, round(0.36 * width / (LETTER * font)))
    rows = {line: len(name) for line, name in names.items()}
    height = max(height or (300 if width == WIDE else 260), GAP * sum(rows.values()))
    longest = max((len(row) for name in names.values() for row in name), default=0)
    label = LETTER * font * longest + 2 * GAP

    def by_line(values: Iterable[Any]) -> alt.Scale:
        return alt.Scale(type="ordinal", domain=[*looks], range=[*values])

    if chart.shares:
        kind = "linear"
        title = chart.y
        axis = alt.Axis(values=ticks, format="%")
    else:
        kind = "log"
        title = f"{chart.y}, log scale"
        axis = alt.Axis(values=ticks, format=",.4~r", labelOverlap=True)
    across = alt.Axis(
        values=[*chart.ticks],
        format=",.9~r",
        labelOverlap="parity",
        labelSeparation=FONT / 2,
        grid=False,
    )
    colour = alt.Color("line:N", scale=by_line(look for look, _ in looks.values()), legend=None)
    dashes = by_line(look for _, look in looks.values())
    widths = by_line(2 if line in strong else 1 for line in looks)
    shape = alt.Shape("line:N", scale=by_line(SHAPES[: len(looks)]), legend=None)
    base = alt.Chart(alt.InlineData(values=_records(chart, points))).encode(
        x=alt.X("x:Q", title=chart.x, axis=across).scale(type="log", base=2, nice=False),
        y=alt.Y("y:Q", title=title, axis=axis).scale(
            type=kind, domain=domain, nice=False, zero=False
        ),
        color=colour,
        strokeDash=alt.StrokeDash("line:N", scale=dashes, legend=None),
    )
    width_of_line = alt.StrokeWidth("line:N", scale=widths, legend=None)
    layers: list[Any] = [base.mark_line(clip=True).encode(strokeWidth=width_of_line)]
    if chart.bars and points["low"].notna().any():
        areas = base.transform_filter("isValid(datum.low)").encode(y="low:Q", y2="high:Q")
        areas = areas.transform_filter(alt.FieldOneOfPredicate(field="line", oneOf=strong))
        layers = [areas.mark_area(opacity=0.15, clip=True), *layers]
    dots = base.transform_filter(f"datum.y <= {domain[1]}")
    dots = dots.encode(description="told:N", shape=shape)
    layers.append(dots.mark_point(filled=True, size=50, opacity=1))
    if chart.mark is not None and points["x"].min() <= chart.mark[0] <= points["x"].max():
        place, name = chart.mark
        data = alt.Chart(alt.InlineData(values=[{"x": place, "name": name}])).encode(x="x:Q")
        flag = data.mark_rule(color="var(--soft)", strokeDash=[2, 3])
        layers.append(flag.encode(y=alt.value(-15), y2=alt.value("height")))
        words = data.mark_text(color="var(--soft)", align="left", baseline="bottom", dx=2)
        layers.append(words.encode(y=alt.value(-4), text="name:N", size=alt.value(font)))
    # The names of the lines beside their ends, down to the labels of the axis, behind a dot of the
    # line, to which thin lines lead from ends at the edge. Heights are in pixels, without a scale.
    low, high = domain
    heights = last["y"]
    if not chart.shares:
        low, high = math.log(low), math.log(high)
        heights = np.log(heights.clip(domain[0]))
    ends = (height * (high - heights) / (high - low)).to_dict()
    places = spread(ends, height + GAP, rows)
    led = (last["x"] == last["x"].max()) & (last["y"] <= domain[1])
    labels = [
        {"line": line, "name": names[line], "led": bool(led[line]), "end": end}
        | {"place": places[line] - GAP * (rows[line] - 1) / 2}
        for line, end in ends.items()
    ]
    edge = alt.value("width")
    named = alt.Chart(alt.InlineData(values=labels)).encode(x=edge, color=colour)

    def at(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=None, axis=None)

    leads = named.transform_filter("datum.led").mark_rule(strokeWidth=0.7, x2Offset=GAP)
    layers.append(leads.encode(x2=edge, y=at("end"), y2="place"))
    keys = named.mark_point(filled=True, size=50, opacity=1, xOffset=GAP + 6, aria=False)
    layers.append(keys.encode(y=at("place"), shape=shape))
    texts = named.mark_text(
        align="left", baseline="middle", dx=2 * GAP, fontSize=font, lineHeight=GAP
    )
    layers.append(texts.encode(y=at("place"), text="name:N"))
    whole = alt.layer(*layers).properties(width=width - label - 80, height=height)
    return _styled(whole, font)


def _dots(chart: DotChart, width: int, font: float) -> Specification:
    """The picture of a chart of dots, with its rows' names on the left."""
    first = chart.places[0]
    order = [*reversed(chart.order)]
    rows = []
    for row in chart.points.to_dict("records"):
        line = row["line"]
        name = textwrap.wrap(line, NAMES_OF_ROWS)
        note = chart.notes.get(line, "")
        told = f"{line}: {row['y']:.0%} ({row['low']:.0%} to {row['high']:.0%}) {row['place']}"
        up = -7 if note or len(name) > 1 else 0
        weight = "bold" if line == chart.bold else "normal"
        shift = -APART if row["place"] == first else APART
        words = {"name": name, "note": note, "told": told, "up": up, "weight": weight}
        rows.append(row | words | {"shift": shift})
    label = LETTER * font * NAMES_OF_ROWS + 10
    ticks = np.linspace(0, 1, 5 if width > 1.2 * NARROW else 3).tolist()
    axis = alt.Axis(grid=False, values=ticks, format="%")
    title = textwrap.wrap(chart.x, round((width - label) / (LETTER * (font + 1))))
    legend = alt.Legend(orient="top", title=None, offset=24, columns=1)
    soft = "var(--soft)"
    inks = alt.Scale(domain=chart.places, range=[ACCENT, soft])
    fills = alt.Scale(domain=chart.places, range=[ACCENT, "var(--page)"])
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("y:Q", title=title, axis=axis).scale(domain=[0, 1]),
        y=alt.Y("line:N", sort=order, axis=None),
    )
    one = base.transform_filter(f"datum.place == '{first}'")
    names = one.encode(x=alt.value(-label))
    weight = alt.expr("datum.weight")
    shift = alt.expr("datum.shift")
    text: dict[str, Any] = {"align": "left", "baseline": "middle", "fontSize": font}
    share, name = chart.mark
    figure = alt.Text("y:Q", format=".0%")
    place = {"y": share, "name": f"{share:.0%}: {name}"}
    mark = alt.Chart(alt.InlineData(values=[place])).encode(x="y:Q")
    whole = alt.layer(
        one.mark_rule(color="var(--rule)").encode(x=alt.value(0), x2=alt.value("width")),
        mark.mark_rule(strokeDash=[2, 3], color=soft).encode(
            y=alt.value(-17), y2=alt.value("height")
        ),
        mark.mark_text(color=soft, dx=4, **text).encode(y=alt.value(-11), text="name:N"),
        # Below the dots, in the page's colour: the line of the mark stops at figures.
        base.mark_text(yOffset=shift, dx=6, stroke="var(--page)", strokeWidth=5, **text).encode(
            x="high:Q", text=figure
        ),
        base.mark_rule(strokeWidth=2, yOffset=shift).encode(
            x="low:Q", x2="high:Q", color=alt.Color("place:N", scale=inks, legend=None)
        ),
        base.mark_point(size=70, strokeWidth=2, opacity=1, yOffset=shift).encode(
            stroke=alt.Stroke("place:N", scale=inks, legend=legend),
            fill=alt.Fill("place:N", scale=fills, legend=legend),
            description="told:N",
        ),
        base.mark_text(yOffset=shift, dx=6, **text).encode(
            x="high:Q", text=figure, color=alt.Color("place:N", scale=inks, legend=None)
        ),
        names.mark_text(
            dy=alt.expr("datum.up"), fontWeight=weight, color="var(--text)", lineHeight=GAP, **text
        ).encode(text="name:N"),
        names.mark_text(dy=8, color=soft, **text).encode(text="note:N"),
    )
    whole = whole.resolve_scale(color="independent")
    whole = whole.properties(width=width - label - 30, height=3 * font * len(order))
    made = _styled(whole, font)
    labels = {"labelColor": "var(--text)", "labelFontSize": font, "labelLimit": 0}
    made["config"]["legend"] = labels
    return made


def _styled(chart: Any, font: float) -> Specification:
    """The specification of a chart in the style of the page."""
    sizes = {"labelFontSize": font, "titleFontSize": font + 1}
    made = chart.to_dict(validate=False) | {"config": STYLE | {"axis": STYLE["axis"] | sizes}}
    del made["$schema"]  # an address, which the page does not need
    return made | {"padding": {"top": 5, "left": 5, "bottom": 5, "right": 20}}


def static_svg(picture: Specification, prefix: str) -> str:
    """A picture as SVG, with ids that begin with a prefix and so are unique on the page.

    What a point says in its description becomes its title, which browsers show on hovering.
    """
    svg = vl_convert.vegalite_to_svg(picture)
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        number = numbers.setdefault(match[2], len(numbers))
        return f"{match[1]}{prefix}-{number}"

    def change(tag: re.Match[str]) -> str:
        # The page describes the chart; marks that have a role but no name are an error to checkers.
        bare = re.sub(r' (role|aria-[a-z]+)="[^"]*"', "", tag[0])
        bare = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', numbered, bare)
        told = re.match(r'<path aria-label="([^"]*)"[^>]*aria-roledescription="point"', tag[0])
        return f"{bare.removesuffix('/>')}><title>{told[1]}</title></path>" if told else bare

    return re.sub(r"<[^<>]+>", change, svg)  # tags alone: names may contain anything


def for_print(chart: LineChart | DotChart, palette: Palette) -> dict[str, bytes]:
    """A chart in the colours of a light page, as the contents of files by their endings.

    All are `COLUMN` wide; the PNG has 400 pixels an inch.
    """

    def drawn(width: float) -> tuple[str, float, float]:
        """The picture, and how wide and high it is in pixels, which depends on its labels."""
        spec = specification(chart, palette, round(width), font=PRINTED)
        text = of_theme(json.dumps(spec | {"background": "var(--page)"}), "light")
        svg = vl_convert.vegalite_to_svg(text.replace(STYLE["font"], PRINTED_FONT))
        (size,) = re.findall(r'^<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)
        return svg, float(size[0]), float(size[1])

    _, first, _ = drawn(NARROW)
    svg, width, height = drawn(NARROW + 96 * COLUMN - first)

    def sized(inch: float, unit: str = "") -> str:
        size = (
            f'width="{COLUMN * inch:.4f}{unit}" height="{COLUMN * height / width * inch:.4f}{unit}"'
        )
        return re.sub(r'width="[\d.]+" height="[\d.]+"', size, svg, count=1)

    return {
        "svg": sized(1, "in").encode(),
        "pdf": vl_convert.svg_to_pdf(sized(72)),  # in which a pixel is a point
        "png": vl_convert.svg_to_png(sized(400)),
    }


def of_theme(text: str, theme: str) -> str:
    """An SVG or a specification with the colours of one theme in place of their names."""
    named = colours(theme) | dict(zip(NAMES, INKS[theme], strict=True))
    return re.sub(r"var\(--(\w+)\)", lambda found: named[found[1]], text)


def colours(theme: str) -> dict[str, str]:
    """The colours of lines on pages of the theme ``light`` or ``dark``, by their names there."""
    named = {}
    for place, (_, light, dark) in enumerate(COLOURS):
        colour = light if theme == "light" else dark
        inks = ([int(ink[i : i + 2], 16) for i in (1, 3, 5)] for ink in (colour, INKS[theme][1]))
        deeper = [round((part + text) / 2) for part, text in zip(*inks, strict=True)]
        named[f"c{place}"] = colour
        named[f"d{place}"] = f"#{bytes(deeper).hex()}"
    return named


def _look(name: str, palette: Palette) -> tuple[str, list[int]]:
    """The colour and dashes of a line."""
    if name not in palette:
        place, taken = method_of(name), [place for place, _ in palette.values()]
        if place is None or taken.count(place) >= len(SHADES):
            free = (i for i in reversed(range(len(COLOURS))) if i not in taken)
            place = next(free, len(palette) % len(COLOURS))
        palette[name] = place, taken.count(place)
    place, before = palette[name]
    dash = DASHES[before % len(DASHES)]
    return f"var(--{SHADES[before % len(SHADES)]}{place})", [int(n) for n in dash.split()]


def _records(chart: LineChart, points: Frame) -> list[dict[str, Any]]:
    """The points as JSON values, with what they say on hovering."""
    rows = points[["line", "x", "y", "low", "high"]].to_dict("records")
    for row in rows:
        row["told"] = f"{row['line']}: {chart.said(row['y'])} at {row['x']:,.10g}"
        if math.isfinite(row["low"]) and math.isfinite(row["high"]):
            row["told"] += f" ({chart.said(row['low'])} to {chart.said(row['high'])})"
        else:
            del row["low"], row["high"]
    return rows


def _ticks(chart: LineChart, points: Frame) -> list[float]:
    """Ticks of the vertical axis, which spans at least `LEAST` to either side of the middle.

    Lines far above all others are not fitted in, so that the others can be told apart.
    """
    if chart.shares:
        return [0, 0.25, 0.5, 0.75, 1]
    near = points[~points["line"].isin(_far_above(points))]
    values = near[["y", "low", "high"] if chart.bars else ["y"]].to_numpy(dtype=float)
    values = np.append(values, points["y"].min())
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return [0.1, 1.0]
    low = float(values.min())
    high = float(values.max())
    middle = math.sqrt(low * high)
    reach = max(math.sqrt(high / low) * 1.03, 1 + LEAST)
    return round_ticks(middle / reach, middle * reach)


def _far_above(points: Frame) -> list[str]:
    """The fewest lines without which the axis can be `FAR` times shorter, if these are the fewer.

    At least three others remain.
    """
    shown = points[points["y"] > 0]
    heights = np.log(shown["y"])
    tops = heights.groupby(shown["line"]).max().sort_values() - heights.min()
    for kept in range(len(tops) - 1, max(2, len(tops) // 2), -1):
        if FAR * tops.iloc[kept - 1] < tops.iloc[-1]:
            return tops.index[kept:].tolist()
    return []


def round_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis, which begins and ends with one, little farther out than asked.

    Vega has none where an axis is shorter than a decade.
    """
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    rounds = [np.outer(decades, steps).ravel() for steps in LOGARITHMIC]
    # Where these are too few, multiples of 5, 2 or 1: of them there are at least three. Ends may
    # have a digit more.
    unit = 10.0 ** math.floor(math.log10((high - low) / 3))
    for step in unit * np.array([5, 2, 1, 0.5, 0.2, 0.1]):
        rounds.append(step * np.arange(1, high / step + 1))
    lows = [ticks[ticks <= low].max(initial=0) for ticks in rounds]
    highs = [ticks[ticks >= high].min(initial=math.inf) for ticks in rounds]
    most = (high / low) ** LONGER
    ends = (end for end in zip(lows, highs, strict=True) if end[1] <= most * end[0])
    first, last = next(ends, (decades[0], decades[-1]))
    inside = (ticks[(first <= ticks) & (ticks <= last)] for ticks in rounds)
    between = next(ticks for ticks in inside if len(ticks) >= 3)
    room = (last / first) ** (1 / 12)  # what the label of an end takes
    between = between[(room * first <= between) & (between <= last / room)]
    return [float(f"{tick:.6g}") for tick in (first, *between, last)]


def spread(places: dict[str, float], height: float, rows: dict[str, int]) -> dict[str, float]:
    """The middles of labels, as near to their places as those before and after them allow.

    Args:
        places: Where each would be best, in pixels from the top.
        height: The lowest place of a row.
        rows: Of each label; a row takes `GAP`.
    """
    order = sorted(places, key=lambda name: places[name])
    sizes = GAP * np.array([rows[name] for name in order])
    stacked = sizes.cumsum() - sizes / 2  # where they would be from 0 on, without room between them
    shifts = isotonic_regression([places[name] for name in order] - stacked).x
    shifts = shifts.clip(-GAP / 2, height + GAP / 2 - sizes.sum())
    return dict(zip(order, (stacked + shifts).tolist(), strict=True))
