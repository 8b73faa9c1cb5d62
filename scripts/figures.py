"""The pictures of README and of the results' pages, from the results and in the reports' colours.

    PYTHONPATH=. python scripts/figures.py

draws the first charts of studies' reports into their folders (results/NAME/chart.svg, in the
colours of a light page), README's also for light and dark pages that are wide or narrow
(docs/images/extend-{light,dark}{,-narrow}.svg), and prints what they say for those who cannot see
them.
"""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import vl_convert

import studies.recall  # noqa: F401 (registers its task and section)
from coca_lab.files import read_json
from coca_lab.report.charts import DotChart, LineChart, Palette
from coca_lab.report.checks import check_chart
from coca_lab.report.drawing import INKS, NARROW, of_theme, specification
from coca_lab.report.lengths import PASSKEYS, PERPLEXITY, ends
from coca_lab.report.page import page_sections, parts_of
from coca_lab.report.result_files import parsed, read_results
from studies.pages import published

ROOT = Path(__file__).parents[1]
LENGTHS, KEYS = PERPLEXITY.title, PASSKEYS.title
PAGES: dict[str, tuple[dict[str, str], str]] = {
    "long-context": (
        {LENGTHS: "At 4,096 tokens none beats the last 256 alone\n"
         "Perplexity at 4,096 tokens (16 × the training context): “RoPE, the last 256 "
         "alone” 20.3, the others 21.0 to 88.5.",
         f"{KEYS} (texts 1 of 2)": "At 4,096 tokens only roles find the passkeys\n"
         "Passkeys found at 4,096 tokens (16 × the training context): "
         "roles 100%, the others 0% to 8%."},
        "Roles, rotary, no decay=roles; RoFormer + limited to 16 L=RoPE, limited distances; "
        "ALiBi; RoFormer + YaRN to 16 L=RoPE, YaRN; CoCA-Strict; RoFormer + NTK to 16 L=RoPE, NTK; "
        "RoFormer=RoPE; RoFormer, the last 256 tokens alone=RoPE, the last 256 alone",
    ),
    "verdict": (
        {LENGTHS: "Perplexity at 1,024 tokens (4 × the training context): roles 22.0, the others "
         "24.6 to 136.5."},
        "roles; PoPE; CoCA-Strict; rotary; rotary, limited distances=limited distances; thin keys; "
        "thin keys, limited distances=thin keys, limited",
    ),
    "native": (
        {LENGTHS: "Perplexity at 4,096 tokens (16 × the training context): “GPT-NeoX, decay” "
         "16.4, the others 20.7 to 22.9.",
         KEYS: "Passkeys found at 16,384 tokens (64 × the training context): “Llama × 12, decay” "
         "100%, the others 19% to 98%."},
        "native=GraniteSWA (native); roles, decay=Llama, decay; "
        "roles, decay × 12=Llama × 12, decay; roles, NeoX, decay=GPT-NeoX, decay",
    ),
    "recall": (
        {"Associative recall, 16 pairs": "Questions answered at 1,024 tokens (16 × the training "
         "context): roles 99%, the others 9% to 86%."},
        "roles; roles-decay=roles, decay; native; rotary; strict; magnitude; pope=PoPE; "
        "thin=thin keys",
    ),
    "smollm2": (
        {LENGTHS: "Perplexity at 16,384 tokens (2 × the training context): leaky distances "
         "and Self-Extend 21.7, the others 22.2 to 666.5."},
        "limited distances; YaRN; dynamic NTK; Self-Extend; leaky distances; base",
    ),
    "extension": (
        {LENGTHS: "Perplexity at 4,096 tokens (16 × the training context): limited distances "
         "23.0, the others 27.4 to 101.4.",
         KEYS: "Passkeys found at 4,096 tokens (16 × the training context): “limited, trained” 5%, "
         "the others 0% to 2%."},
        "limited distances; limited distances, trained=limited, trained; base + YaRN to 16 L=YaRN; "
        "base + dynamic NTK to 16 L=dynamic NTK; dropped positions, trained=dropped, trained; base",
    ),
}  # fmt: skip
"""By folder of results: the sections of its report whose charts its page shows with these words,
and their lines: name=name there. Words of two lines have a heading first. Tests compare them with
the figures.
"""
STRONG = {
    "long-context": ("roles", "RoPE", "RoPE, the last 256 alone"),
}
"""By folder, the lines that its words are about, if there are others that matter less."""
WITHOUT_RANGES = ("native",)
"""Folders whose ranges of seeds lie over each other; the tables have every seed."""
UNLABELLED = {"native": (512,)}
"""By folder, lengths whose labels would touch the next one's."""
WIDE, DIGITS_WIDE = 440, 620
"""Pixels of a line chart, and of README's dots, which are narrower on phones."""
HEADINGS = {"color": "var(--text)", "fontSize": 14, "fontWeight": "bold", "offset": 24} | {
    "subtitleColor": "var(--soft)", "subtitleFontSize": 12
}  # fmt: skip
"""How titles look."""
PADDING = {"top": 5, "right": 20, "left": 5, "bottom": 5}
"""Pixels around a picture."""
NAMES = {
    "as it is": "as it is",
    "last 8,192 tokens alone": "the last 8,192 tokens alone",
    "limited": "limited distances",
    "ntk": "NTK",
    "yarn": "YaRN",
    "leaky": "leaky distances",
    "shifted": "shifted distances",
}
"""What pages call the methods of the check of eight books."""
BOOKS = (
    "SmolLM2-135M (4-bit weights) reading 12,288 tokens of eight books; "
    "horizontal lines are 95% intervals over the books"
)
"""What the figures of that check are of."""
Titled = tuple[str, LineChart]
"""A finding, and the chart that shows it."""


def report_charts(folder: Path, said: dict[str, str], lines: str) -> list[Titled]:
    """Charts of the report of a folder, by the titles of sections, with some of their lines."""
    contents = published(folder)
    measured_later = folder / "methods" / "results.json"
    if measured_later.exists():  # of the same models, trained again: other methods and lengths
        (study,) = (content for content in contents if "study" in content)
        places = {place_of(cell) for cell in study["results"]}
        more = read_json(measured_later)["results"]
        study["results"] += [cell for cell in more if place_of(cell) not in places]
    sections = page_sections(*parts_of(parsed(contents)))
    charts = {section.title: section.chart for section in sections}
    shown = {}
    for entry in lines.split("; "):
        line, _, words = entry.partition("=")
        shown[line] = words or line

    def chosen(chart: LineChart) -> LineChart:
        points = chart.points[chart.points["line"].isin(shown)]
        points = points.assign(place=points["line"].map([*shown].index))
        points = points.sort_values(["place", "x"])
        line = points["line"].map(shown)
        last = points.groupby("line")["x"].transform("max")
        short = last.map(", at {:,}".format).where(last < points["x"].max(), "")
        points = points.assign(line=line + short)
        bars = chart.bars and folder.name not in WITHOUT_RANGES
        ticks = [tick for tick in chart.ticks if tick not in UNLABELLED.get(folder.name, ())]
        strong = STRONG.get(folder.name, ())
        return replace(chart, points=points, ticks=ticks, bars=bars, strong=strong)

    drawn = []
    for title, words in said.items():
        chart = charts[title]
        assert isinstance(chart, LineChart)
        drawn.append((words, chosen(chart)))
    return drawn


def place_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What a cell is a figure of."""
    fields = ("task", "model", "training_seed", "scaling", "window", "length")
    return tuple(cell.get(name) for name in fields)


def picture(parts: Sequence[Titled]) -> str:
    """Charts as SVG, one above the other, with colours yet to be set."""
    palette: Palette = {}
    drawn: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    for words, chart in parts:
        title, _, said = words.partition("\n")
        part = specification(chart, palette, WIDE, height=220)
        part["title"] = {
            "text": textwrap.wrap(title, (WIDE - 40) // 10, break_on_hyphens=False),
            "anchor": "start",
            "frame": "group",  # above the axis, so that headings of charts begin at one place
        }
        seeds = chart.points["seeds"]
        if seeds.max() > 1:
            said += f" Lines are means of {ends(seeds)} seeds{', bands their range' * chart.bars}"
        if said:
            part["title"]["subtitle"] = textwrap.wrap(said.strip(), (WIDE - 40) // 7)
        data |= part.pop("datasets")
        config, _ = part.pop("config"), part.pop("padding")
        drawn.append(part)
    config["title"] = HEADINGS
    whole = {"vconcat": drawn, "spacing": 40, "datasets": data}
    whole["resolve"] = {"scale": {"color": "independent", "strokeDash": "independent"}}
    whole |= {"config": config, "padding": PADDING}
    whole["background"] = "var(--page)"
    return vl_convert.vegalite_to_svg(whole)


def picture_of_digits(width: int) -> str:
    """The check of eight books as SVG with colours yet to be set: a row a method, of two dots each.

    Args:
        width: In pixels.
    """
    chart = chart_of_digits()
    far = chart.points[chart.points["place"] == chart.places[0]].set_index("line")["y"]
    made = specification(chart, {}, width)
    others = far.drop(chart.bold)
    said = (
        f"Probability of a digit farther back than L = 8,192 tokens: {far[chart.bold]:.0%} "
        f"with {chart.bold}, {others.max():.0%} with {others.idxmax()}, the next best"
    )
    made["title"] = {"text": textwrap.wrap(said, width // 9), "anchor": "start"}
    made["title"] |= {"frame": "bounds", "subtitle": textwrap.wrap(BOOKS, width // 7)}
    made["config"]["title"] = HEADINGS
    return vl_convert.vegalite_to_svg(made | {"padding": PADDING, "background": "var(--page)"})


def chart_of_digits() -> DotChart:
    """The chart of the check of eight books, with the names that pages have."""
    (content,) = read_results([ROOT / "results/extend"])
    (file,) = parsed([content])
    assert file.check is not None
    chart = check_chart(file.check)
    assert chart is not None
    points = chart.points.assign(line=chart.points["line"].map(NAMES))
    notes = {NAMES[method]: note for method, note in chart.notes.items()}
    return replace(chart, points=points, notes=notes, bold=NAMES[chart.bold])


def main() -> None:
    """Draw the pictures."""
    for name, (said, lines) in PAGES.items():
        folder = ROOT / "results" / name
        parts = report_charts(folder, said, lines)
        svg = picture(parts)
        (folder / "chart.svg").write_text(of_theme(svg, "light"), encoding="utf-8")
        print(name, *(f"{title} {chart.words()}" for title, chart in parts), sep="\n  ")
    for narrow, theme in itertools.product((False, True), INKS):
        svg = picture_of_digits(NARROW + 20 if narrow else DIGITS_WIDE)
        path = ROOT / "docs/images" / f"extend-{theme}{'-narrow' * narrow}.svg"
        path.write_text(of_theme(svg, theme), encoding="utf-8")
    wide = of_theme(picture_of_digits(DIGITS_WIDE), "light")
    (ROOT / "results/extend/chart.svg").write_text(wide, encoding="utf-8")


if __name__ == "__main__":
    main()
