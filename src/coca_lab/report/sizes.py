"""Studies of several sizes: power laws of perplexity over the number of parameters."""

from collections.abc import Sequence

import pandas as pd

from coca_lab.intervals import PowerLaw, fit_power_law
from coca_lab.report.cells import Perplexity
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.section import Entry, Section

FAR = {350_000_000: "350M", 7_000_000_000: "7B"}
"""Parameters of the paper's models, to which trends are extended."""
ABOUT = ["model", "size", "training_seed", "parameters"]


def size_sections(cells: Sequence[Perplexity]) -> list[Section]:
    """Perplexity over the sizes: against the first model's, and far against near."""
    plain = (cell for cell in cells if cell.scaling == "none" and cell.value and cell.parameters)
    runs: Frame = pd.DataFrame([vars(cell) for cell in plain])
    if runs.empty or runs["size"].nunique() < 2 or runs["training_seed"].isna().any():
        return []
    table = runs.pivot_table("value", ABOUT, "length", sort=False).dropna(axis=1)
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
    means = runs.groupby(["model", "size"])["y"].agg(["mean", "min", "max"])
    points = [runs.rename(columns={"model": "line", "parameters": "x"}).assign(mark="points")]
    rows, lead = [], ""
    for name, of_model in runs.groupby("model", sort=False):
        x, y = of_model["parameters"].tolist(), of_model["y"].tolist()
        law = fit_power_law(x, y)
        if law:
            ends = [min(x), max(x)]
            drawn = {"line": name, "x": ends, "y": [law.at(end)[0] for end in ends], "mark": "line"}
            points.append(pd.DataFrame(drawn))
        entries = {
            size: Entry(f"{mean:.3f}", f"{low:.3f} to {high:.3f}" if low < high else "")
            for size, mean, low, high in means.loc[name].itertuples(name=None)
        }
        rows.append([name, *(entries.get(size, "–") for size in sizes), *_extended(law)])
    if sizes:
        last = means["mean"].xs(sizes[-1], level="size").reindex(runs["model"].unique())
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
