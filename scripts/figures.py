"""The pictures of README and of the results' pages, from the results and in the reports' colours.

    PYTHONPATH=. python scripts/figures.py

draws README's, mean and range of a study's seeds for light and dark pages that are wide or narrow
(docs/images/long-context-{light,dark}{,-narrow}.svg), prints what it says for those who cannot see
it, and draws the first charts of studies' reports into their folders (results/NAME/chart.svg), each
one file that is light or dark as the reader's browser.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import vl_convert

from coca_lab.report.charts import COLOURS, LineChart, Palette
from coca_lab.report.drawing import NARROW, specification
from coca_lab.report.lengths import PASSKEYS, PERPLEXITY, frame_of
from coca_lab.report.page import page_sections, tasks_and_runs
from coca_lab.report.results import parsed
from studies.trials import published

ROOT = Path(__file__).parents[1]
README_RESULTS = "results/retrieval"
NAMES = {
    ("cohere 8 x 4000", "fold"): "roles",
    ("cohere rope 8 x 4000", "none"): "RoPE",
}
"""The models in README's picture with their scaling, the recommended one first, and their names."""
PAGES: dict[str, tuple[list[int], str]] = {
    "verdict": (
        [0],
        "roles; PoPE; CoCA-Strict; rotary; rotary, limited distances=limited distances; thin keys; "
        "thin keys, limited distances=thin keys, limited",
    ),
    "native": ([0, 1], "native; roles, decay; roles, decay × 12; roles, NeoX, decay"),
    "recall": (
        [2],
        "roles; roles-decay=roles, decay; native; rotary; strict; magnitude; pope=PoPE; "
        "thin=thin keys",
    ),
    "smollm2": (
        [0],
        "limited distances; YaRN; dynamic NTK; Self-Extend; leaky distances; base",
    ),
    "extension": (
        [0, 1],
        "limited distances; limited distances, trained=limited, trained; base + YaRN (16)=YaRN; "
        "base + dynamic NTK (16)=dynamic NTK; dropped positions, trained=dropped, trained; base",
    ),
}
"""By folder of results: which of its report's charts its page shows, and which lines of them, with
their names there."""
WIDE = 440
"""Pixels of a chart; README's are narrower on phones."""
INKS = {  # of the page, the text, softer text, axes and rules
    "light": ("#ffffff", "#24292f", "#57606a", "#888888", "#e4e4e4"),
    "dark": ("#1e2129", "#d7dde5", "#a9b1bb", "#888888", "#3a3f47"),
}
TITLES = {
    "perplexity": "At {far:,} tokens, layers with {best} have a perplexity of {mine:.0f}, "
    "{worst} {other:.0f}",
    "passkey": "At {far:,} tokens, layers with {best} find {mine:.0%} of the passkeys, "
    "{worst} {other:.0%}",
}
Titled = tuple[str, LineChart]
"""A finding, and the chart that shows it."""


def readme_charts() -> list[Titled]:
    """README's two charts with their findings."""
    tasks, _ = tasks_and_runs(parsed(published(ROOT / README_RESULTS)))
    made = []
    for (task, title), figure in zip(TITLES.items(), (PERPLEXITY, PASSKEYS), strict=True):
        (cells,) = tasks[task]
        chosen = [cell for cell in cells if (cell.model, cell.scaling) in NAMES]
        means = frame_of(chosen)
        names = [NAMES[place] for place in zip(means["model"], means["scaling"], strict=True)]
        means = means.assign(line=names, colour=names, dash="", first=True)
        lengths = sorted(means["x"].unique().tolist())
        far, (best, *_) = means["x"].max(), NAMES.values()
        last = means[means["x"] == far].set_index("line")["y"]
        worst = last.idxmin() if figure.top else last.idxmax()
        said = {"best": best, "mine": last[best], "worst": worst}
        trained = chosen[0].training_length
        chart = LineChart(
            means,
            "tokens read",
            "passkeys found" if figure.top else "perplexity (lower is better)",
            ticks=lengths,
            log_y=not figure.top,
            top=figure.top,
            mark=(trained, "training context"),
        )
        made.append((title.format(**said, other=last[worst], far=far), chart))
    return made


def report_charts(folder: Path, which: Sequence[int], lines: str) -> list[Titled]:
    """Charts of the report of a folder, by their places in it, with some of their lines."""
    sections = page_sections(*tasks_and_runs(parsed(published(folder))))
    drawn = [(section.lead, section.chart) for section in sections if section.chart]
    names = {old: new or old for old, _, new in (line.partition("=") for line in lines.split("; "))}

    def chosen(chart: LineChart) -> LineChart:
        points = chart.points[chart.points["line"].isin(names)]
        points = points.assign(place=points["line"].map([*names].index))
        points = points.sort_values(["place", "x"])
        line = points["line"].map(names)
        last = points.groupby("line")["x"].transform("max")
        short = last.map(", at {:,}".format).where(last < points["x"].max(), "")
        points = points.assign(line=line + short, colour=line, dash="")
        return replace(chart, points=points, every=True)

    return [(lead, chosen(chart)) for lead, chart in (drawn[place] for place in which)]


def picture(parts: Sequence[Titled], width: int, *, above: bool) -> str:
    """Charts as SVG, side by side or one above the other, with colours yet to be set."""
    palette: Palette = {}
    drawn: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    for title, chart in parts:
        part = specification(chart, palette, width, height=220)
        lines = [""]
        for word in title.split():
            fits = len(lines[-1]) + len(word) < width / 10
            lines[-1:] = [f"{lines[-1]} {word}"] if fits else [lines[-1], word]
        part["title"] = {"text": [line.strip() for line in lines], "anchor": "start"}
        data |= part.pop("datasets")
        config, _ = part.pop("config"), part.pop("padding")
        drawn.append(part)
    config["title"] = {"color": "var(--text)", "fontSize": 14, "fontWeight": "bold", "offset": 24}
    whole = {"vconcat" if above else "hconcat": drawn, "spacing": 40, "datasets": data}
    whole["resolve"] = {"scale": {"color": "independent", "strokeDash": "independent"}}
    whole |= {"config": config, "padding": {"top": 5, "right": 20, "left": 5, "bottom": 5}}
    return vl_convert.vegalite_to_svg(whole)


def colours(theme: str) -> dict[str, str]:
    """The colours of a theme by their names in pictures."""
    _, light, dark = zip(*COLOURS, strict=True)
    inks = zip(("page", "text", "soft", "axis", "rule"), INKS[theme], strict=True)
    return {f"c{i}": c for i, c in enumerate(light if theme == "light" else dark)} | dict(inks)


def of_theme(svg: str, theme: str) -> str:
    """The picture in the colours of one theme, without a background."""
    return re.sub(r"var\(--(\w+)\)", lambda found: colours(theme)[found[1]], svg)


def of_browser(svg: str) -> str:
    """The picture in the colours that the browser prefers, on a background."""
    used = set(re.findall(r"var\(--(\w+)\)", svg)) | {"page"}

    def rule(theme: str) -> str:
        of = colours(theme)
        return ";".join(f"--{name}:{of[name]}" for name in of if name in used)

    dark = f"@media (prefers-color-scheme: dark){{svg{{{rule('dark')}}}}}"
    style = f"<style>svg{{background:var(--page);{rule('light')}}}{dark}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda head: head[1] + style, svg, count=1)


def main() -> None:
    """Draw the pictures."""
    parts = readme_charts()
    for narrow in (False, True):
        svg = picture(parts, NARROW + 20 if narrow else WIDE, above=narrow)
        for theme in INKS:
            path = ROOT / "docs/images" / f"long-context-{theme}{'-narrow' * narrow}.svg"
            path.write_text(of_theme(svg, theme), encoding="utf-8")
    for title, chart in parts:
        print(f"{title}. {chart.words()}")
    for name, (which, lines) in PAGES.items():
        folder = ROOT / "results" / name
        parts = report_charts(folder, which, lines)
        svg = of_browser(picture(parts, WIDE, above=True))
        (folder / "chart.svg").write_text(svg, encoding="utf-8")
        print(name, *(f"{title} {chart.words()}" for title, chart in parts), sep="\n  ")


if __name__ == "__main__":
    main()
