"""What charts show: axes, labels, which lines, colours; and that published results have one."""

import importlib
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import vl_convert

import studies.recall  # noqa: F401 (registers its section)
from coca_lab.intervals import mean_interval
from coca_lab.report import LineChart, build_report
from coca_lab.report.charts import COLOURS, method_of
from coca_lab.report.drawing import (
    GAP,
    INKS,
    LEAST,
    LONGER,
    NARROW,
    WIDE,
    colours,
    round_ticks,
    specification,
    spread,
    static_svg,
)
from coca_lab.report.page import page_sections, parts_of
from coca_lab.report.result_files import parsed
from covering import mostly_slow
from studies.pages import WORDS, published

RESULTS = Path(__file__).parents[3] / "results"


def points(name, y, **more):
    return pd.DataFrame({"line": name, "x": [2**i for i in range(len(y))], "y": y, **more})


def chart(*lines, **options):
    return LineChart(pd.concat(lines), "x", "y", **options)


def domain(*lines, **options):
    made = specification(chart(*lines, **options), {})
    return made["layer"][0]["encoding"]["y"]["scale"]["domain"]


def test_an_axis_is_wide_enough_that_noise_is_no_trend():
    """81.6, 81.0 and 81.3 would draw a deep V."""
    flat = points("a", [81.6, 81.0, 81.3])
    for lines, middle in (([flat], 81.3), ([flat, points("b", [82.0] * 3)], 81.5)):
        low, high = domain(*lines)
        assert low < middle / 1.149 and high > middle * 1.149
    assert domain(points("a", [10.0, 100.0])) == [9, 150]
    assert domain(points("a", [18.9, 88.5])) == [15, 100]


def test_lines_far_above_the_others_are_clipped_and_say_where_they_end():
    """In an axis that fits 667, five methods between 21.7 and 23.2 are one line."""
    near = [points(name, [21.0, 22.0, 20.5 + i]) for i, name in enumerate("abc")]
    far = points("base", [20.0, 48.0, 667.0])
    low, high = domain(*near, far)
    assert low < 20 and 22.5 < high < 30
    made = specification(chart(*near, far), {})
    named = made["datasets"][made["layer"][-1]["data"]["name"]]
    assert [each["name"] for each in named if each["line"] == "base"] == [["base ↑ 667"]]
    assert [each["name"] for each in named if each["line"] in "abc"] == [["a"], ["b"], ["c"]]
    svg = static_svg(made, "s")
    assert "a: 21 at 1" in svg and "667 at 4" not in svg  # no dot outside the axes
    # What two others contrast with, or more than half of the lines, is shown in full.
    assert domain(*near[:2], far)[1] > 667
    assert domain(*near, *(points(n, [20.0, 500.0, 667.0]) for n in "def"))[1] > 667
    assert domain(*near, points("d", [20.0, 22.0, 28.0]))[1] > 28


def test_a_logarithmic_axis_has_few_ticks_and_round_ones():
    """Of 15.5 to 24.2 it had 17.2, 19.3 and 21.6, and of 31 to 97 thirteen; it ends with ticks."""
    for low in np.geomspace(0.1, 1000, 200):
        for factor in ((1 + LEAST) ** 2, 1.6, 2.0, 3.0, 10.0, 1000.0):
            ticks = round_ticks(low, factor * low)
            assert 3 <= len(ticks) <= 8 and ticks == sorted(ticks)
            assert ticks[0] <= low * (1 + 1e-5) and factor * low <= ticks[-1] * (1 + 1e-5)
            assert math.log(ticks[-1] / ticks[0]) < (LONGER + 1e-3) * math.log(factor)
            assert ticks == pytest.approx([float(f"{tick:.3g}") for tick in ticks], rel=1e-9)
    made = specification(chart(points("a", [16.0, 24.0])), {})
    along = made["layer"][0]["encoding"]["y"]
    assert along["axis"]["values"] == [15, 20, 25] and along["axis"]["format"] == ",.4~r"
    assert along["scale"]["domain"] == [15, 25]


def test_a_place_is_marked_among_the_points_alone():
    """Before the first one, there is no tick that says where it is."""
    for place, marked in ((0.5, False), (1, True), (1.5, True), (2, True), (4, False)):
        made = specification(chart(points("a", [1, 2]), mark=(place, "training context")), {})
        assert ("training context" in str(made)) == marked


def test_shares_are_told_in_percent_as_on_their_axis():
    found = chart(points("a", [0.7, 0.0], low=0.4, high=0.9), shares=True)
    assert "a: 70% at 1 to 0% at 2" in found.words()
    assert "a: 70% at 1 (40% to 90%)" in str(specification(found, {}))


def test_names_are_as_near_to_the_ends_of_their_lines_as_they_fit():
    places = {"c": 299.0, "a": 50.0, "b": 52.0, "d": 299.0}
    found = spread(places, 300, dict.fromkeys(places, 1))
    assert found == {"a": 51 - GAP / 2, "b": 51 + GAP / 2, "c": 300 - GAP, "d": 300}
    found = spread(places, 300, {**dict.fromkeys(places, 1), "b": 3})
    assert found == {"a": 51 - GAP, "b": 51 + GAP, "c": 300 - GAP, "d": 300}
    # It was 45 pixels above the end of its line, since the names below it take two rows each.
    low = {"Native": 215.0, "b": 232.0, "c": 233.0, "d": 250.0}
    found = spread(low, 260 + GAP, {**dict.fromkeys(low, 2), "Native": 1})
    assert 0 < low["Native"] - found["Native"] < 2.5 * GAP


def test_thin_lines_lead_from_the_ends_of_lines_to_their_names():
    """From those at the edge of the chart, which are neither clipped nor end before it."""
    flat = [points(name, [20.0, 20.0, 20.0 + i / 100]) for i, name in enumerate("abc")]
    others = [points("base", [20.0, 48.0, 667.0]), points("short", [20.0, 21.0])]
    made = specification(chart(*flat, *others), {})
    low, high = domain(*flat, *others)
    leads, keys, texts = made["layer"][-3:]
    assert leads["mark"]["type"] == "rule" and leads["data"] == keys["data"] == texts["data"]
    labels = {each["line"]: each for each in made["datasets"][texts["data"]["name"]]}
    assert [line for line, label in labels.items() if label["led"]] == ["a", "b", "c"]
    for name, y in {"a": 20.0, "b": 20.01, "c": 20.02}.items():
        share = math.log(high / y) / math.log(high / low)
        assert labels[name]["end"] == pytest.approx(made["height"] * share, rel=1e-4)
    assert labels["a"]["place"] - labels["c"]["place"] == pytest.approx(2 * GAP)
    marks = vl_convert.vegalite_to_svg(made).partition("mark-rule role-mark")[2]
    assert marks.partition("</g>")[0].count("<line") == 3


@pytest.mark.parametrize("shares", [True, False])
def test_a_chart_without_a_finite_point_is_drawn_empty(shares):
    """As of a model whose losses are all NaN, which are null in result files."""
    made = specification(chart(points("a", [math.inf, math.nan]), shares=shares), {})
    assert "<title>" not in static_svg(made, "s")


def test_a_logarithmic_axis_says_so():
    for shares, title in ((True, "y"), (False, "y, log scale")):
        made = specification(chart(points("a", [0.5, 1.0]), shares=shares), {})
        assert made["layer"][0]["encoding"]["y"]["title"] == title


def test_a_long_name_is_written_in_rows():
    """It ended in "No positions, with d…"."""
    name = "No positions, with decay and temperature"
    for width, rows in ((WIDE, 1), (NARROW, 3)):
        made = specification(chart(points(name, [1, 2]), points("a", [1, 2])), {}, width)
        named = made["datasets"][made["layer"][-1]["data"]["name"]]
        written = {each["line"]: each["name"] for each in named}
        assert len(written[name]) == rows and " ".join(written[name]) == name
        assert written["a"] == ["a"] and "limit" not in str(made)


def test_the_name_of_a_model_stands_once_where_all_lines_are_of_it():
    """On a phone, seven lines of SmolLM2-135M-Instruct left a third of the chart's width."""
    lines = ["a-b", "a-b + limited to 1.5 L", "a-b, the last 64 tokens alone", "a-b-c"]
    for others, shown in (([], ["a-b", "limited to 1.5 L", "the last 64 tokens alone", "a-b-c"]),
                          (["c + yarn"], [*lines, "c + yarn"])):  # fmt: skip
        made = specification(chart(*(points(name, [1, 2]) for name in lines + others)), {})
        named = made["datasets"][made["layer"][-1]["data"]["name"]]
        assert [" ".join(each["name"]) for each in named] == shown


def test_of_many_lines_the_best_one_and_those_of_every_method_are_drawn():
    models = [points(f"Roles, {i}", [i, abs(i - 5)]) for i in range(9)]
    others = [points(name, [1.0, 2.0]) for name in ("RoFormer", "ALiBi")]
    assert len(chart(*models[:6], *others).drawn()) == 16
    many = chart(*models, *others)
    drawn = [f"Roles, {i}" for i in (0, 1, 2, 3, 4, 5)] + ["RoFormer", "ALiBi"]  # 5 is best
    assert re.findall(r"(\w[\w, ]*): ", many.words()) == drawn


def test_a_method_has_one_colour_in_every_chart():
    palette = {}
    specification(chart(points("RoFormer", [1, 2]), points("x", [1, 2])), palette)
    specification(chart(points("Roles, rotary", [1, 2]), points("Native", [1, 2])), palette)
    assert palette["RoFormer"] == (method_of("RoPE"), 0)
    assert palette["Roles, rotary"] == (method_of("roles"), 0)
    assert palette["Native"] == (method_of("roles"), 1)  # deeper, and dashed
    assert COLOURS[palette["x"][0]][0] == ()
    # Methods that read farther have theirs, whatever they are of: four lines of RoPE had one.
    names = ["RoPE", "RoPE + YaRN", "RoPE + NTK to 4 L", "RoPE + leaky", "RoPE, limited distances"]
    assert len({method_of(name) for name in names}) == len(names)


def test_lines_of_a_chart_are_told_apart_by_their_colours_and_by_their_dots():
    """Also many of one method; on light and on dark pages, and without colour."""
    names = [f"Roles, {i}" for i in range(5)] + ["x", "y", "RoPE"]
    made = specification(chart(*(points(name, [1, 2]) for name in names)), {})
    looks = [layer["encoding"] for layer in made["layer"] if "shape" in layer["encoding"]]
    dots, keys = (look["shape"]["scale"]["range"] for look in looks)
    assert len(set(dots)) == len(names) and keys == dots
    used = [name[6:-1] for name in looks[0]["color"]["scale"]["range"]]
    for theme in INKS:
        assert len({colours(theme)[name] for name in used}) == len(names)


def test_lines_that_matter_less_are_grey_thin_and_without_intervals():
    """In a picture of eight lines colours could not be told apart."""
    lines = [points(name, [1, 2], low=0.5, high=3.0) for name in ("RoPE", "NTK", "YaRN")]
    made = specification(chart(*lines, strong=["RoPE"]), {})
    area, line, dots, *_ = made["layer"]
    assert area["transform"][1]["filter"]["oneOf"] == ["RoPE"]
    colour, *greys = line["encoding"]["color"]["scale"]["range"]
    assert colour == f"var(--c{method_of('RoPE')})" and greys == ["var(--soft)"] * 2
    assert line["encoding"]["strokeWidth"]["scale"]["range"] == [2, 1, 1]
    assert len(set(dots["encoding"]["shape"]["scale"]["range"])) == 3
    every = specification(chart(*lines), {})["layer"][1]["encoding"]
    assert "var(--soft)" not in every["color"]["scale"]["range"]
    assert every["strokeWidth"]["scale"]["range"] == [2, 2, 2]


def test_labels_of_lengths_do_not_touch():
    """In a picture 2,048 and 4,096 were one number."""
    lines = points("RoPE, the last 256 alone", [1] * 5).assign(x=[256, 512, 1024, 2048, 4096])
    made = specification(chart(lines, ticks=lines["x"].tolist()), {}, 440)
    texts = re.findall(r"<text[^>]*>[\d,]+</text>", vl_convert.vegalite_to_svg(made))
    shown = [re.sub(r"<[^>]+>", "", text) for text in texts if 'opacity="0"' not in text]
    assert shown[:3] == ["256", "1,024", "4,096"]


def test_a_chart_of_one_length_is_left_out_since_its_table_says_the_same():
    read = [
        {"task": "passkey", "model": "a", "length": length, "accuracy": 0.5, "samples": []}
        for length in (64, 128)
    ]
    for cells, drawn in ((read[:1], False), (read, True)):
        (section,) = page_sections(*parts_of(parsed([{"results": cells}])))
        assert section.rows and (section.chart is not None) == drawn


@pytest.mark.parametrize("theme", INKS)
def test_colours_differ_enough_from_the_page_to_be_read(theme):
    """WCAG's contrast of 4.5 for text, as the lines' names are."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.05 + sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    for page in (INKS[theme][0], "#16181c" if theme == "dark" else "#ffffff"):
        for name, colour in colours(theme).items():
            ratio = light(colour) / light(page)
            assert max(ratio, 1 / ratio) >= 4.5, name


def test_pictures_fit_wide_and_narrow_pages_and_say_their_values():
    made = chart(points("a & <b>", [1.0, math.inf, 3.0], low=0.5, high=4.0), ticks=[1, 2, 4])
    for width in (WIDE, NARROW):
        svg = static_svg(specification(made, {}, width), f"s{width}")
        assert float(re.search(r'width="([\d.]+)"', svg)[1]) <= width + 10
        assert re.findall("<title>(.*?)</title>", svg) == [
            f"a &amp; &lt;b&gt;: {y} at {x} (0.5 to 4)" for x, y in ((1, 1), (4, 3))
        ]
        assert "role=" not in svg


OTHERS = {"analysis", "extend", "cpu", "gpu-nvidia-h200"}
"""Whose files are no results of tasks."""
PUBLISHED = sorted({x.name for x in RESULTS.iterdir() if x.is_dir()} - OTHERS)


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, PUBLISHED[::4]))
def test_a_published_study_shows_a_chart_first(name):
    first, *_ = sections_of(RESULTS / name)
    assert first.chart


def sections_of(folder):
    return page_sections(*parts_of(parsed(published(folder))))


def test_trials_of_a_study_are_read_with_words_for_their_letters():
    """Means over seeds, as results/verdict has them, without the runs that chose a rate."""
    assert "<h1>Verdict on collinearity</h1>" in build_report(published(RESULTS / "verdict"))
    section, *_ = sections_of(RESULTS / "verdict")
    means = section.chart.points.set_index(["line", "x"])
    assert means.loc[("PoPE", 256), "seeds"] == 10
    assert means.loc[("CoCA-Strict", 1024), "y"] == pytest.approx(32.9, abs=0.2)
    assert means.loc[("rotary", 1024), "y"] == pytest.approx(103, abs=2)
    assert means.loc[("rotary, limited distances", 1024), "y"] == pytest.approx(24.6, abs=0.1)
    recall = sections_of(RESULTS / "recall")[0]
    assert recall.title == "Associative recall, 4 pairs"
    smol = sections_of(RESULTS / "smollm2")[0]
    assert {"dynamic NTK", "YaRN", "limited distances"} <= set(smol.chart.points["line"])


@pytest.fixture(scope="module")
def figures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RESULTS.parent / "scripts")
        yield importlib.import_module("figures")


DRAWN = ["verdict", "native", "recall", "smollm2", "extension", "long-context"]


@pytest.mark.parametrize("name", DRAWN)
def test_the_words_of_a_committed_picture_are_those_of_its_figures(figures, name):
    """Written by hand: which lines are best at the end, their figure, and those of the others."""
    svg = (RESULTS / name / "chart.svg").read_text("utf-8")
    assert "var(" not in svg and "prefers-color-scheme" not in svg  # which few programs know
    picture = " ".join(re.sub(r"<[^>]+>", " ", svg).split())
    drawn = figures.report_charts(RESULTS / name, *figures.PAGES[name])
    for words, chart in drawn:
        *headings, title = words.split("\n")
        assert title in picture and all(heading in picture for heading in headings)
        assert all(line in picture for line in chart.points["line"])
        far = chart.points[chart.points["x"] == chart.points["x"].max()].set_index("line")["y"]
        form = figures.PASSKEYS.form if chart.shares else "{:.1f}".format
        first = form(far.max() if chart.shares else far.min())
        shown = far.map(form)
        others = far[shown != first]
        said = re.findall(r"\b\d+(?:\.\d+|%)", title)
        assert said == [first, form(others.min()), form(others.max())]
        assert f" at {chart.points['x'].max():,} tokens" in title
        who = title.partition(": ")[2].split(", the others")[0]
        assert all(name in who for name in {*far.index} - {*others.index})


def test_the_headings_of_a_picture_are_what_its_lines_show(figures):
    """None is below RoPE with the last 256 tokens; of passkeys none but roles find half."""
    drawn = figures.report_charts(RESULTS / "long-context", *figures.PAGES["long-context"])
    perplexity, passkeys = (
        chart.points[chart.points["x"] == 4096].set_index("line")["y"] for _, chart in drawn
    )
    headings = [words.partition("\n")[0] for words, _ in drawn]
    assert headings[0] == "At 4,096 tokens none beats the last 256 alone"
    assert perplexity.idxmin() == "RoPE, the last 256 alone"
    assert headings[1] == "At 4,096 tokens only roles find the passkeys"
    assert passkeys[passkeys > 0.5].index.tolist() == ["roles"]


@pytest.mark.parametrize("name", ["verdict", "native", "extension", "long-context"])
def test_the_alternative_text_has_both_ends_of_every_line_of_perplexity(figures, name):
    page = (RESULTS / name / "README.md").read_text("utf-8")
    (told,) = re.findall(r"!\[Perplexity ([^]]*)\]\(chart\.svg\)", page)
    said = set(re.findall(r"\d+(?:\.\d+)?", told))
    chart = figures.report_charts(RESULTS / name, *figures.PAGES[name])[0][1]
    for line, points in chart.points.groupby("line"):
        for y in points.sort_values("x")["y"].iloc[[0, -1]]:
            assert {f"{y:.0f}", f"{y:.1f}"} & said, (line, y)


def comparable(svg):
    """A picture without counted names and the digits that versions of numpy round differently."""
    rounded = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", svg)
    return re.sub(r"clip\d+|gradient_\d+", "", rounded)


def test_the_chart_of_smollm2_says_which_methods_are_level_and_where_lines_end(figures):
    folder = RESULTS / "smollm2"
    ((title, chart),) = figures.report_charts(folder, *figures.PAGES[folder.name])
    ends = chart.points.groupby("line")["x"].max()
    far = ends.max()
    assert all((f", at {end:,}" in line) == (end < far) for line, end in ends.items())
    read = pd.read_json(folder / "perplexity.jsonl", lines=True)
    nats = read[read["length"] == far].pivot_table(index="text", columns="method", values="nats")
    nats = nats.rename(columns=WORDS)[ends.index[ends == far]]
    behind = nats.sub(nats[nats.mean().idxmin()], axis=0)
    level = {name for name in nats if mean_interval([*behind[name]])[0] <= 0}
    assert {name for name in nats if name in title.split(", the others")[0]} == level


def test_the_picture_of_readme_has_the_figures_of_the_tables(figures):
    """Rows, nats, what loses and what is taken, as in results/extend; committed as drawn."""
    root = RESULTS.parent
    readme = (root / "README.md").read_text("utf-8")
    page = (RESULTS / "extend" / "README.md").read_text("utf-8")
    table = page.partition("| reading 12,288 tokens |")[2].partition("\n\n")[0]
    cells = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()[2:]]
    rows = {name.replace("(taken)", "").strip(): row for name, *row in cells}
    assert len(rows) == 7
    shown = {}
    drawn = figures.chart_of_digits()
    far, near = drawn.places
    for place in (near, far):
        for row in drawn.points[drawn.points["place"] == place].itertuples():
            assert row.low < row.y < row.high
            name = f"**{row.line}**" if row.line == drawn.bold else row.line
            shown.setdefault(name, []).append(f"{row.y:.0%}".replace("%", " %"))
            loses = drawn.notes.get(row.line) == "loses within L"
            assert loses == ("of perplexity" in rows[name][0])
            nats = float(rows[name][2 if place == near else 3])
            assert row.y == pytest.approx(math.exp(-nats), rel=0.006)
    assert shown.keys() == rows.keys()
    for narrow, theme in itertools.product((False, True), figures.INKS):
        svg = figures.picture_of_digits(figures.NARROW + 20 if narrow else figures.DIGITS_WIDE)
        path = root / "docs" / "images" / f"extend-{theme}{'-narrow' * narrow}.svg"
        assert comparable(path.read_text("utf-8")) == comparable(figures.of_theme(svg, theme))
    wide = figures.of_theme(figures.picture_of_digits(figures.DIGITS_WIDE), "light")
    assert comparable((RESULTS / "extend/chart.svg").read_text("utf-8")) == comparable(wide)
    (told,) = re.findall(r'alt="(Dots[^"]*)"', readme)
    assert all(" and ".join(said) in told for said in shown.values())
