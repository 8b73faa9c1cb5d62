"""README's picture from a study's results: perplexity and passkeys, mean and range of its seeds.

    python scripts/long_context_figure.py results/long-context/results.json \\
        "Roles, rotary=layers with roles" ALiBi "CoCA-Strict=CoCA (strict)" "RoFormer=RoPE"

draws these models, the recommended one first, under these names, in the colours of the reports, for
light and dark pages that are wide or narrow: docs/images/long-context-{light,dark}{,-narrow}.svg.
It prints what they say, for those who cannot see them.
"""

import re
import sys
from pathlib import Path

import vl_convert

from coca_lab.report import read_results
from coca_lab.report.charts import METHODS, NARROW, LineChart, Palette
from coca_lab.report.lengths import PASSKEYS, PERPLEXITY, frame_of
from coca_lab.report.page import tasks_and_runs
from coca_lab.report.results import parsed

IMAGES = Path(__file__).parents[1] / "docs" / "images"
INKS = {  # of the text, softer text, axes and rules
    "light": ("#24292f", "#57606a", "#888888", "#e4e4e4"),
    "dark": ("#d7dde5", "#a9b1bb", "#888888", "#3a3f47"),
}
TITLES = {
    "perplexity": "At {far:,} tokens, {best} have a perplexity of {mine:.0f}, {worst} {other:.0f}",
    "passkey": "At {far:,} tokens, {best} find {mine:.0%} of the passkeys, {worst} {other:.0%}",
}


def charts(path: str, names: dict[str, str]) -> list[tuple[str, LineChart]]:
    """The two charts with their findings."""
    tasks, _ = tasks_and_runs(parsed(read_results([path])))
    made = []
    for (task, title), figure in zip(TITLES.items(), (PERPLEXITY, PASSKEYS), strict=True):
        (cells,) = tasks[task]
        chosen = [cell for cell in cells if cell.scaling == "none" and cell.model in names]
        means = frame_of(chosen)
        means["line"] = means["colour"] = means["line"].map(names)
        far, (best, *_) = means["x"].max(), names.values()
        last = means[means["x"] == far].set_index("line")["y"]
        worst = last.idxmin() if figure.top else last.idxmax()
        said = {"best": best, "mine": last[best], "worst": worst}
        trained = chosen[0].training_length
        chart = LineChart(
            means,
            "tokens read",
            "passkeys found" if figure.top else "perplexity (lower is better)",
            ticks=sorted(means["x"].unique().tolist()),
            log_y=not figure.top,
            top=figure.top,
            mark=(trained, "training context"),
        )
        made.append((title.format(**said, other=last[worst], far=far), chart))
    return made


def picture(parts: list[tuple[str, LineChart]], theme: str, narrow: bool) -> str:
    """Both charts as SVG, side by side or one above the other."""
    palette: Palette = {}
    width = NARROW + 20 if narrow else 440
    drawn, data = [], {}
    for title, chart in parts:
        part = chart.specification(palette, width, height=220)
        words, lines = title.split(), [""]
        for word in words:
            fits = len(lines[-1]) + len(word) < width / 9.5
            lines[-1:] = [f"{lines[-1]} {word}"] if fits else [lines[-1], word]
        part["title"] = {"text": [line.strip() for line in lines], "anchor": "start"}
        data |= part.pop("datasets")
        config, _ = part.pop("config"), part.pop("padding")
        drawn.append(part)
    config["title"] = {"color": "var(--text)", "fontSize": 14, "fontWeight": "bold", "offset": 24}
    whole = {"vconcat" if narrow else "hconcat": drawn, "spacing": 40, "datasets": data}
    whole |= {"config": config, "padding": {"right": 20, "left": 5, "bottom": 5}}
    svg = vl_convert.vegalite_to_svg(whole)
    _, light, dark = zip(*METHODS, strict=True)
    inks = dict(zip(("text", "soft", "axis", "rule"), INKS[theme], strict=True))
    colours = {f"c{i}": ink for i, ink in enumerate(light if theme == "light" else dark)} | inks
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], svg)


def main() -> None:
    """Draw the pictures."""
    path, *chosen = sys.argv[1:]
    pairs = (word.partition("=") for word in chosen)
    parts = charts(path, {name: label or name for name, _, label in pairs})
    for theme in INKS:
        for narrow in (False, True):
            name = f"long-context-{theme}{'-narrow' * narrow}.svg"
            (IMAGES / name).write_text(picture(parts, theme, narrow), encoding="utf-8")
    for title, chart in parts:
        print(f"{title}. {chart.words()}")


if __name__ == "__main__":
    main()
