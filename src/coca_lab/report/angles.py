"""Angles between queries and keys in the report, from the results of ``coca analyze``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from coca_lab.report.charts import HeatMap, Line, LineChart
from coca_lab.report.results import Cell
from coca_lab.report.section import Section, Table, mean, signed

DASHES = ((), (6, 3), (2, 3), (9, 3, 2, 3))
ROUND_OFF = 1e-9
"""Relative change of float64 scores that round-off explains."""
SMALLEST = 1e-17
"""A logarithmic axis cannot show 0."""
CHECKS = {"eq19": "Eq. 19", "eq20": "Eq. 20, at angles of 0", "eq21": "Eq. 21"}
BOUNDS = {
    "score": ("score", ()),
    "eq19": ("bound for any angles (Eq. 19)", (6, 3)),
    "eq20": ("bound for angles of 0 (Eq. 20)", (9, 3, 2, 3)),
}


def angle_sections(cells: Sequence[Cell]) -> list[Section]:
    """Histograms, anomalous tokens, decay and shifts."""
    # Without angles, all would be in one bin.
    sections = [_histogram_section(cell) for cell in cells if not without_angles(cell)]
    sections.append(_anomaly_section(cells, drawn=bool(sections)))
    sections += map(_decay_section, cells)
    shifted = [cell for cell in cells if cell["shifts"]]
    if shifted:
        lead, *others = map(_shift_sentence, shifted)
        text = " ".join([lead, *others])
        sections.append(Section("All positions moved", lead, text, shift_chart(shifted)))
    return sections


def angle_table(cells: Sequence[Cell]) -> Table:
    """A column per model: a row would be too long for a terminal."""
    measures = pd.DataFrame({cell["model"]: pd.Series(_measures(cell)) for cell in cells})
    measures = measures.reindex(dict.fromkeys(n for cell in cells for n in _measures(cell)))
    rows = [[*row] for row in measures.fillna("–").itertuples()]
    return ["angles", *measures.columns], rows


def seen_angles(layer: dict[str, Any]) -> dict[str, Any]:
    """The angles that a layer's scores have: in the slack form those at the key's position."""
    return layer["effective_angles"] or layer["angles"]


def at_key_position(cell: Cell) -> bool:
    """Whether the angles depend on the key's position, as in the slack form."""
    return any(layer["effective_angles"] for layer in cell["layers"])


def without_angles(cell: Cell) -> bool:
    """Whether all angles are 0 by construction, as in the strict form."""
    forms = {layer.get("form", cell["form"]) for layer in cell["layers"]}
    return "vanilla" not in forms and not at_key_position(cell)


def shown_lengths(cell: Cell) -> list[tuple[int, int]]:
    """Index and tokens of the lengths to show.

    Angles that depend on the position are known up to the longest text that was read.
    """
    lengths = list(enumerate(cell["settings"]["lengths"]))
    if not at_key_position(cell):
        return lengths
    return [item for item in lengths if item[1] <= cell["longest"]] or lengths[:1]


def histogram(cell: Cell) -> HeatMap:
    """Density of Θ over all pairs by layer, relative to a uniform distribution."""
    rows = [_layer_histogram(seen_angles(layer)) for layer in cell["layers"]]
    bins = len(rows[0])
    return HeatMap(
        (
            "angle Θ from key to query before rotation, in degrees",
            [f"{360 * edge / bins:g}" for edge in range(bins)],
        ),
        ("layer", [str(layer["layer"]) for layer in cell["layers"]]),
        [[value * bins for value in row] for row in rows],
        "density (1: uniform)",
        labels=[f"{degrees}" for degrees in (0, 90, 180, 270)],
    )


def anomaly_chart(cells: Sequence[Cell]) -> LineChart:
    """Share of causal (m, n) pairs in the anomalous zone by rotary pair, averaged over layers."""
    lines = []
    for cell in cells:
        for index, length in shown_lengths(cell):
            share = 100 * _shares(cell, index)
            label, dash = f"{cell['model']}, {length:,} tokens", DASHES[index % len(DASHES)]
            main = index == len(shown_lengths(cell)) - 1
            line = Line(label, [*range(len(share))], [*share], None, cell["model"], dash)
            lines.append(replace(line, dotted=False, main=main))
    x, y = "rotary pair, from fast to slow", "anomalous (query, key) pairs (%)"
    return LineChart(lines, x, y)


def decay_chart(cell: Cell) -> LineChart:
    """Scores and the bounds of Eq. 19 and 20 against the distance, averaged over layers."""
    means = _decay(cell)
    lines = []
    for name, (label, dash) in BOUNDS.items():
        known = means[name].dropna()
        lines.append(Line(label, [*known.index], [*known], dash=dash))
    y = "share of the sum of |q||k|"
    return LineChart(lines, "distance m − n (tokens)", y, ticks=[*means.index] or [1], log_y=True)


def shift_chart(cells: Sequence[Cell]) -> LineChart:
    """Change of attention scores when all positions move: mean and range over the layers."""
    lines = []
    for cell in cells:
        changes = _score_changes(cell).clip(lower=SMALLEST)
        ends = [*zip(changes.min(), changes.max(), strict=True)]
        lines.append(Line(cell["model"], [*changes.columns], [*changes.mean()], ends))
    ticks = sorted({entry["shift"] for cell in cells for entry in cell["shifts"]})
    x, y = "all positions moved by (tokens)", "change of scores over their spread"
    return LineChart(lines, x, y, ticks=ticks, log_y=True)


def _measures(cell: Cell) -> dict[str, str]:
    found = {"attention": _form(cell), "Θ > π": _percent(_above(cell))}
    for index, length in shown_lengths(cell):
        found[f"anomalous at {length:,} tokens"] = _percent(_shares(cell, index).mean())
    for check in CHECKS:
        name = CHECKS[check].partition(",")[0]
        found[f"violations of {name}"] = f"{_total(cell, check, 'violations'):,}"
    if cell["shifts"]:
        changes = _score_changes(cell).mean().fillna(0.0)
        found["score change when moved"] = f"{changes.max():.2g} (by {changes.idxmax():,})"
        worst = max(cell["shifts"], key=lambda entry: abs(_nats_change(entry)))
        found["nats when moved"] = f"{_nats(_nats_change(worst))} (by {worst['shift']:,})"
    return found


def _histogram_section(cell: Cell) -> Section:
    above = _percent(_above(cell))
    text = (
        f"{cell['model']} ({_form(cell)}), {cell['tokens']:,} tokens of {cell['documents']} "
        f"documents: in {above} of all (query, key, rotary pair) triples Θ > π, so that the score "
        "of the nearest tokens rises with distance."
    )
    if at_key_position(cell):
        text += (
            f" Before rotation all angles are 0 (largest measured: {_largest(cell)} radians); "
            f"the figure shows those that the {cell['form']} form gives to keys at their positions."
        )
    lead = f"{cell['model']}: {above} of the angles between query and key exceed π."
    title = f"Angle between query and key: {cell['model']}"
    return Section(title, lead, text, chart=histogram(cell))


def _anomaly_section(cells: Sequence[Cell], drawn: bool) -> Section:
    sentences = []
    for cell in cells:
        if without_angles(cell):
            sentences.append(
                f"{cell['model']}: none, since all angles are 0 by construction (largest measured: "
                f"{_largest(cell)} radians)."
            )
            continue
        shares = [
            f"{_percent(_shares(cell, index).mean())} at {length:,} tokens"
            for index, length in shown_lengths(cell)
        ]
        sentences.append(f"{cell['model']}: {', '.join(shares)}, over all layers and pairs.")
    text = (
        "A (query, key) pair is anomalous in a rotary pair if Θ > π and the key is nearer than "
        f"τ = (2π − Θ)/θ: its score then rises with distance. {' '.join(sentences)}"
    )
    lead = f"Anomalous tokens of {sentences[0]}"
    chart = anomaly_chart(cells) if drawn else None
    return Section("Anomalous tokens by rotary pair", lead, text, chart)


def _decay_section(cell: Cell) -> Section:
    """The inequalities that were checked, and how scores fall with distance."""
    sentences = []
    for key, what in CHECKS.items():
        count, violations = _total(cell, key, "checked"), _total(cell, key, "violations")
        ratios = [layer["decay"][key]["largest_ratio"] for layer in cell["layers"]]
        known = [ratio for ratio in ratios if ratio is not None]
        most = f", the left side at most {max(known):.3g} of the right" if known else ""
        sentences.append(f"{what}: {violations:,} violations in {count:,} comparisons{most}.")
    if not without_angles(cell):
        count = _total(cell, "score_against_eq20", "checked")
        above = _total(cell, "score_against_eq20", "violations")
        sentences.append(
            f"The scores themselves, with angles other than 0, exceed the bound of Eq. 20 in "
            f"{above:,} of {count:,} comparisons."
        )
    sentences.append("A bound above a share of 1 is weaker than |cos| ≤ 1.")
    score, lead = _decay(cell)["score"].dropna(), ""
    if len(score):
        ends = [f"{score[d]:.2g} at distance {d:,}" for d in (score.index[0], score.index[-1])]
        lead = f"{cell['model']}: the mean score is {' and '.join(ends)}, as a share of |q||k|."
    title = f"Score and bounds by distance: {cell['model']}"
    return Section(title, lead, " ".join(sentences), decay_chart(cell))


def _shift_sentence(cell: Cell) -> str:
    last = cell["shifts"][-1]
    change = _score_changes(cell).mean().fillna(0.0).iloc[-1]
    how = f"scores change by {change:.2g} of their spread"
    if change < ROUND_OFF:
        how = "scores do not change beyond round-off"
    share = mean(layer.get("absolute_share") for layer in cell["layers"])
    depends = f"; {_percent(share)} of its scores depends on m + n." if share else "."
    return (
        f"{cell['model']}, moved by {last['shift']:,} tokens: {how}; loss "
        f"{_nats(_nats_change(last))} nats a token{depends}"
    )


def _form(cell: Cell) -> str:
    return "rotary attention" if cell["form"] == "vanilla" else f"CoCA, {cell['form']} form"


def _above(cell: Cell) -> float | None:
    """Share of angles above π."""
    return mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])


def _layer_histogram(angles: dict[str, Any]) -> list[float]:
    """Shares of the bins over all pairs, each pair weighted by its number of angles."""
    weights = 1 - np.array(angles["zero_share"], dtype=float)
    rows = np.nan_to_num(np.array(angles["histogram"], dtype=float))
    return (weights @ rows / (weights.sum() or 1.0)).tolist()


def _shares(cell: Cell, index: int) -> pd.Series:
    """Anomalous share of every rotary pair at one of the lengths, averaged over layers."""
    layers = [seen_angles(layer)["lengths"][index]["anomalous_share"] for layer in cell["layers"]]
    return pd.DataFrame(layers, dtype=float).mean().fillna(0.0)


def _decay(cell: Cell) -> pd.DataFrame:
    """Score and bounds by distance, averaged over layers; 0 counts as unknown."""
    rows = [row for layer in cell["layers"] for row in layer["decay"]["by_distance"]]
    frame: Any = (
        pd.DataFrame(rows, columns=["distance", *BOUNDS]).set_index("distance").astype(float)
    )
    means = frame.replace(0.0, np.nan).groupby("distance").mean()
    return means.dropna(how="all")


def _score_changes(cell: Cell) -> pd.DataFrame:
    """A row for every layer, a column for every shift."""
    rows = [[entry["score_change"] for entry in layer["shifts"]] for layer in cell["layers"]]
    return pd.DataFrame(rows, columns=[entry["shift"] for entry in cell["shifts"]], dtype=float)


def _nats_change(entry: dict[str, Any]) -> float:
    return entry["nats_shifted"] - entry["nats"]


def _total(cell: Cell, check: str, field: str) -> int:
    return sum(layer["decay"][check][field] for layer in cell["layers"])


def _largest(cell: Cell) -> str:
    return f"{max(layer['angles']['largest'] for layer in cell['layers']):.2g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _nats(value: float) -> str:
    # Adding 0.0 to the rounded value turns -0.0 into 0.0.
    return signed(round(value, 3) + 0.0, ".3f")
