"""Studies of several seeds or sizes: means and ranges by length, and trends over the sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from coca_lab.intervals import PowerLaw, fit_power_law
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.lengths import (
    every_cell,
    length_chart,
    length_table,
    lengths_of,
    short_rows,
    without_short,
)
from coca_lab.report.results import Cell, grouped
from coca_lab.report.section import Entry, Section, capital, enumeration, span


@dataclass(frozen=True)
class Figure:
    """What is shown of a task: the field with a cell's length, its figure, its name, digits."""

    length: str
    value: str
    name: str
    digits: str
    top: float | None = None


FIGURES = {
    "perplexity": Figure("window", "perplexity", "perplexity", ".1f"),
    "passkey": Figure("length", "accuracy", "share of passkeys found", ".2f", 1),
    "recall": Figure("length", "accuracy", "share of questions answered", ".2f", 1),
    "ruler": Figure("length", "score", "RULER score", ".2f", 1),
}
OVER_SEEDS = {"y": "mean", "low": "min", "high": "max", "seeds": "count"}
FAR = {350_000_000: "350M", 7_000_000_000: "7B"}
"""Parameters of the paper's models, to which trends are extended."""


def gather_seeds(cells: Sequence[Cell]) -> None:
    """Give cells of several seeds or sizes the task ``study``, and their own as ``of``."""
    runs: dict[Any, set[Any]] = {}
    for cell in cells:
        if "training_seed" in cell:
            runs.setdefault(cell["file"], set()).add((cell["training_seed"], cell["size"]))
    for cell in cells:
        if cell["task"] in FIGURES and len(runs.get(cell["file"], ())) > 1:
            cell["of"], cell["task"] = cell["task"], "study"


def _kind(cell: Cell) -> str | None:
    """The kind of prompts, or the number of pairs of recall."""
    return f"{cell['pairs']} pairs" if "pairs" in cell else cell.get("kind")


def study_sections(cells: Sequence[Cell]) -> list[Section]:
    """Trends over the sizes, then every figure by length."""
    sections = _trends(cells) if len({cell["size"] for cell in cells}) > 1 else []
    known = [cell for cell in cells if cell[FIGURES[cell["of"]].value] is not None]
    groups = grouped(known, lambda cell: (cell["size"], cell["of"], _kind(cell)))
    for (size, task, kind), group in groups.items():
        about = ", ".join(filter(None, (capital(FIGURES[task].name), kind, size)))
        sections.append(_by_length(about, FIGURES[task], group))
    return sections


def seed_means(cells: Sequence[Cell], figure: Figure) -> Frame:
    """Rows as of `every_cell`, of means over seeds, with ``low`` and ``high`` their range."""
    runs = every_cell(cells, figure.length, figure.value)
    means = runs.drop_duplicates(["line", "x"]).drop(columns=["y", "low", "high"])
    return means.join(runs.groupby(["line", "x"])["y"].agg(**OVER_SEEDS), on=["line", "x"])


def _by_length(title: str, figure: Figure, cells: Sequence[Cell]) -> Section:
    """Means over seeds with their ranges, against the length."""
    means = seed_means(cells, figure)
    better = " (lower is better)" if not figure.top else ""
    seeds = len({cell["training_seed"] for cell in cells})
    return Section(
        title,
        _lead(title, figure, without_short(means)),
        "",
        length_chart(means, "tokens read at once", figure.name + better, top=figure.top),
        *length_table(means, f"{title} at", lambda row: _entry(row, figure.digits)),
        f"Means of {seeds} seed{'s' * (seeds > 1)}, and their ranges.",
        muted=short_rows(means),
    )


def _lead(title: str, figure: Figure, means: Frame) -> str:
    """Who is best at the longest length, and what the others have."""
    length = lengths_of(means)[-1]
    far = means[means["x"] == length].set_index("line")["y"]
    shown = far.map(f"{{:{figure.digits}}}".format)
    best = shown[far.idxmax() if figure.top else far.idxmin()]
    names, others = shown.index[shown == best].tolist(), far[shown != best]
    who = enumeration(names) if len(names) < 4 else f"{len(names)} of {len(far)} models"
    lead = f"{title}: at {length:,} tokens {who} {'has' if len(names) == 1 else 'have'} {best}"
    if len(others):
        lead += f", the others {span(others, figure.digits)}"
    return f"{lead}."


def _trends(cells: Sequence[Cell]) -> list[Section]:
    """Perplexity over the sizes: against the first model's, and far against near."""
    chosen = (cell for cell in cells if cell["of"] == "perplexity" and cell["scaling"] == "none")
    runs: Frame = pd.DataFrame([cell for cell in chosen if cell["perplexity"]])
    if runs.empty:
        return []
    about = ["model", "size", "training_seed", "parameters"]
    table = runs.pivot_table("perplexity", about, "window", sort=False).dropna(axis=1)
    if table.empty:
        return []
    near, far, control = min(table), max(table), runs["model"].iloc[0]
    table = table.reset_index()
    base = table[table["model"] == control].set_index(["size", "training_seed"])[near]
    others = table[table["model"] != control].join(base.rename("base"), ["size", "training_seed"])
    costs = others.assign(y=others[near] / others["base"]).dropna(subset="y")
    title = f"Perplexity at {near:,} tokens against {control}’s, by size"
    sections = [_trend(title, f"× {control}’s perplexity at {near:,} tokens", costs)]
    if far > near:
        losses = table.assign(y=table[far] / table[near])
        title = f"Perplexity at {far:,} tokens against {near:,}, by size"
        label = f"× its perplexity at {near:,} tokens, when reading {far:,}"
        sections.append(_trend(title, label, losses))
    return [section for section in sections if section.rows]


def _trend(title: str, label: str, runs: Frame) -> Section:
    """A chart of all runs with their power laws, and what these say of larger models."""
    sizes = runs["size"].unique().tolist()
    means = runs.groupby(["model", "size"])["y"].agg(**OVER_SEEDS)
    points = [runs.rename(columns={"model": "line", "parameters": "x"}).assign(mark="points")]
    rows, lead = [], ""
    for name, of_model in runs.groupby("model", sort=False):
        x, y = of_model["parameters"].tolist(), of_model["y"].tolist()
        law = fit_power_law(x, y)
        if law:
            ends = [min(x), max(x)]
            drawn = {"line": name, "x": ends, "y": [law.at(end)[0] for end in ends], "mark": "line"}
            points.append(pd.DataFrame(drawn))
        entries = {row.Index: _entry(row, ".3f") for row in means.loc[name].itertuples()}
        rows.append([name, *(entries.get(size, "–") for size in sizes), *_extended(law)])
    if sizes:
        last = means["y"].xs(sizes[-1], level="size").reindex(runs["model"].unique())
        lead = f"Lowest with {sizes[-1]}: {last.idxmin()}, {last.min():.3f} {label}."
    return Section(
        title,
        lead,
        chart=LineChart(pd.concat(points), "parameters", label, log_x=True, log_y=True),
        header=[
            "model",
            *sizes,
            Entry("exponent", "95 % interval"),
            *(Entry(size, "if the trend holds") for size in FAR.values()),
        ],
        rows=rows,
        note="Pairs of runs of the same seed; means over seeds and their ranges. Lines are power "
        "laws of the number of parameters; their 95 % intervals say nothing about whether they "
        "hold beyond the sizes measured.",
    )


def _entry(row: Any, digits: str) -> Entry:
    """A mean over seeds, and below it the range."""
    ends = f"{row.low:{digits}} to {row.high:{digits}}"
    return Entry(f"{row.y:{digits}}", ends if row.seeds > 1 else "")


def _extended(law: PowerLaw | None) -> list[str | Entry]:
    """The exponent, and the trend at the sizes of the paper."""
    if law is None:
        return ["–"] * (1 + len(FAR))
    low, high = law.exponent - law.half, law.exponent + law.half
    trends = (law.at(size) for size in FAR)
    return [
        Entry(f"{law.exponent:+.3f}", f"{low:+.3f} to {high:+.3f}"),
        *(Entry(_plain(y, 3), f"{_plain(a, 2)} to {_plain(b, 2)}") for y, a, b in trends),
    ]


def _plain(value: float, digits: int) -> str:
    """Rounded to significant digits, and written without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"
