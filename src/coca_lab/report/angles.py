"""Angles between queries and keys in the report, from the results of ``coca analyze``."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from coca_lab.report.charts import DASHES, Frame, HeatMap, LineChart
from coca_lab.report.results import Cell
from coca_lab.report.section import Section, signed

ROUND_OFF = 1e-9
"""Relative change of float64 scores that round-off explains."""
SMALLEST = 1e-17
"""A logarithmic axis cannot show 0."""
CHECKS = {"eq19": "Eq. 19", "eq20": "Eq. 20, at angles of 0", "eq21": "Eq. 21"}
CHECKS |= {"score_against_eq20": "Eq. 20 by the scores, at other angles"}
"""The last is no inequality of the paper: it says how far scores leave the bound."""
BOUNDS = {
    "score": ("score", "1 0"),
    "eq19": ("bound for any angles (Eq. 19)", "6 3"),
    "eq20": ("bound for angles of 0 (Eq. 20)", "9 3 2 3"),
}


def angle_sections(cells: Sequence[Cell]) -> list[Section]:
    """Histograms, anomalous tokens, decay and shifts, and a table of all figures."""
    # Without angles, all would be in one bin.
    sections = [_histogram_section(cell) for cell in cells if not without_angles(cell)]
    sections.append(_anomaly_section(cells, drawn=bool(sections)))
    sections += map(_decay_section, cells)
    if shifted := [cell for cell in cells if cell["shifts"]]:
        sections.append(_shift_section(shifted))
    # A column per model: a row would be too long for a terminal.
    models = [cell["model"] for cell in cells]
    rows = pd.DataFrame(map(_measures, cells), models).T.fillna("–").itertuples()
    note = (
        "Means over layers, heads and pairs. A bound above a share of 1 is weaker than |cos| ≤ 1."
    )
    header = ["angles", *models]
    return [*sections, Section("Figures of every model", "", "", None, header, [*rows], note)]


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
    """Index and tokens of the lengths to show; of angles that depend on positions those read."""
    lengths = list(enumerate(cell["settings"]["lengths"]))
    if not at_key_position(cell):
        return lengths
    return [item for item in lengths if item[1] <= cell["longest"]] or lengths[:1]


def _measures(cell: Cell) -> dict[str, str]:
    """What the table says of a model."""
    measures = {
        "attention": _form(cell),
        "documents": f"{cell['documents']:,}",
        "tokens": f"{cell['tokens']:,}",
        "Θ > π": _percent(_above(cell)),
        "largest angle before rotation": _largest(cell),
    }
    for index, length in shown_lengths(cell):
        measures[f"anomalous at {length:,} tokens"] = _percent(_shares(cell, index).mean())
    for check, name in CHECKS.items():
        if check == "score_against_eq20" and without_angles(cell):
            continue
        checks = [layer["decay"][check] for layer in cell["layers"]]
        count, wrong = (sum(each[field] for each in checks) for field in ("checked", "violations"))
        measures[f"violations of {name}"] = f"{wrong:,} of {count:,}"
        ratios = [each["largest_ratio"] for each in checks if each["largest_ratio"] is not None]
        if ratios:
            measures[f"largest ratio in {name}"] = f"{max(ratios):.3g}"
    if cell["shifts"]:
        changes = _score_changes(cell).mean().fillna(0.0)
        measures["score change when moved"] = f"{changes.max():.2g} (by {changes.idxmax():,})"
        worst = max(cell["shifts"], key=lambda entry: abs(entry["nats_shifted"] - entry["nats"]))
        measures["nats when moved"] = f"{_nats(worst)} (by {worst['shift']:,})"
    return measures


def _histogram_section(cell: Cell) -> Section:
    """Density of Θ over all pairs by layer, relative to a uniform distribution."""
    above, model = _percent(_above(cell)), cell["model"]
    text = (
        f"{model} ({_form(cell)}): in {above} of all (query, key, rotary pair) triples Θ > π, so "
        "that the score of the nearest tokens rises with distance."
    )
    if at_key_position(cell):
        text += (
            f" Before rotation all angles are 0 (largest measured: {_largest(cell)} radians); "
            f"the figure shows those that the {cell['form']} form gives to keys at their positions."
        )
    rows = {str(layer["layer"]): _layer_histogram(seen_angles(layer)) for layer in cell["layers"]}
    values = pd.DataFrame(rows).T * len(next(iter(rows.values())))
    values.columns = [f"{360 * edge / values.shape[1]:g}" for edge in range(values.shape[1])]
    x = "angle Θ from key to query before rotation, in degrees"
    chart = HeatMap(values, x, "layer", "density (1: uniform)", ["0", "90", "180", "270"])
    lead = f"{model}: {above} of the angles between query and key exceed π."
    return Section(f"Angle between query and key: {model}", lead, text, chart)


def _anomaly_section(cells: Sequence[Cell], drawn: bool) -> Section:
    """Share of causal (m, n) pairs in the anomalous zone by rotary pair, averaged over layers."""
    said, lines, most = [], [], []
    for cell in cells:
        shares = {length: _shares(cell, index) for index, length in shown_lengths(cell)}
        parts = [
            f"{_percent(share.mean())} at {length:,} tokens" for length, share in shares.items()
        ]
        none = "none, since all angles are 0 by construction"
        said.append(f"{cell['model']}: {none if without_angles(cell) else ', '.join(parts)}.")
        most.append(max(share.mean() for share in shares.values()))
        for index, (length, share) in enumerate(reversed(shares.items())):
            line = {"line": f"{cell['model']}, {length:,} tokens", "x": share.index}
            look = {"colour": cell["model"], "dash": DASHES[index % len(DASHES)], "mark": "line"}
            look["first"] = length == max(shares)
            lines.append(pd.DataFrame(line | {"y": 100 * share} | look))
    text = (
        "A (query, key) pair is anomalous in a rotary pair if Θ > π and the key is nearer than "
        f"τ = (2π − Θ)/θ: its score then rises with distance. {' '.join(said)}"
    )
    x, y = "rotary pair, from fast to slow", "anomalous (query, key) pairs (%)"
    chart = LineChart(pd.concat(lines), x, y) if drawn else None
    lead = f"Anomalous tokens of {said[most.index(max(most))]}"
    return Section("Anomalous tokens by rotary pair", lead, text, chart)


def _decay_section(cell: Cell) -> Section:
    """Scores and the bounds of Eq. 19 and 20 against the distance, averaged over layers."""
    rows = [row for layer in cell["layers"] for row in layer["decay"]["by_distance"]]
    frame: Frame = pd.DataFrame(rows, columns=["distance", *BOUNDS]).astype(float)
    # 0 counts as unknown.
    means = frame.replace(0.0, np.nan).groupby("distance").mean().dropna(how="all")
    points = [
        pd.DataFrame({"line": label, "x": means.index, "y": means[name], "dash": dash})
        for name, (label, dash) in BOUNDS.items()
    ]
    score, lead = means["score"].dropna(), ""
    if len(score):
        ends = [f"{score[d]:.2g} at distance {d:,.0f}" for d in (score.index[0], score.index[-1])]
        lead = f"{cell['model']}: the mean score is {' and '.join(ends)}, as a share of |q||k|."
    ticks = [int(distance) for distance in means.index] or [1]
    y = "share of the sum of |q||k|"
    chart = LineChart(pd.concat(points), "distance m − n (tokens)", y, ticks=ticks, log_y=True)
    return Section(f"Score and bounds by distance: {cell['model']}", lead, chart=chart)


def _shift_section(cells: Sequence[Cell]) -> Section:
    """Change of attention scores when all positions move: mean and range over the layers."""
    lines = []
    for cell in cells:
        changes = _score_changes(cell).clip(lower=SMALLEST)
        points = {"x": changes.columns, "y": changes.mean(), "low": changes.min()}
        lines.append(pd.DataFrame({"line": cell["model"], **points, "high": changes.max()}))
    ticks = sorted({entry["shift"] for cell in cells for entry in cell["shifts"]})
    x, y = "all positions moved by (tokens)", "change of scores over their spread"
    chart = LineChart(pd.concat(lines), x, y, ticks=ticks, log_y=True)
    said = [_shift_sentence(cell) for cell in cells]
    return Section("All positions moved", said[0], " ".join(said), chart)


def _shift_sentence(cell: Cell) -> str:
    last = cell["shifts"][-1]
    change = _score_changes(cell).mean().fillna(0.0).iloc[-1]
    how = f"scores change by {change:.2g} of their spread"
    if change < ROUND_OFF:
        how = "scores do not change beyond round-off"
    share = _mean([layer.get("absolute_share") for layer in cell["layers"]])
    depends = f"; {share:.1%} of its scores depends on m + n." if share > 0 else "."
    return (
        f"{cell['model']}, moved by {last['shift']:,} tokens: {how}; loss "
        f"{_nats(last)} nats a token{depends}"
    )


def _form(cell: Cell) -> str:
    return "rotary attention" if cell["form"] == "vanilla" else f"CoCA, {cell['form']} form"


def _above(cell: Cell) -> float:
    """Share of angles above π."""
    return _mean([seen_angles(layer)["cases"]["d"] for layer in cell["layers"]])


def _layer_histogram(angles: dict[str, Any]) -> list[float]:
    """Shares of the bins over all pairs, each pair weighted by its number of angles."""
    weights = 1 - np.array(angles["zero_share"], dtype=float)
    rows = np.nan_to_num(np.array(angles["histogram"], dtype=float))
    return (weights @ rows / (weights.sum() or 1.0)).tolist()


def _shares(cell: Cell, index: int) -> Frame:
    """Anomalous share of every rotary pair at one of the lengths, averaged over layers."""
    layers = [seen_angles(layer)["lengths"][index]["anomalous_share"] for layer in cell["layers"]]
    return pd.DataFrame(layers, dtype=float).mean().fillna(0.0)


def _score_changes(cell: Cell) -> Frame:
    """A row for every layer, a column for every shift."""
    rows = [[entry["score_change"] for entry in layer["shifts"]] for layer in cell["layers"]]
    return pd.DataFrame(rows, columns=[entry["shift"] for entry in cell["shifts"]], dtype=float)


def _largest(cell: Cell) -> str:
    return f"{max(layer['angles']['largest'] for layer in cell['layers']):.2g}"


def _mean(values: Sequence[float | None]) -> float:
    """Mean of the values that are known, NaN without any."""
    return float(pd.Series(values, dtype=float).mean())


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _nats(entry: dict[str, Any]) -> str:
    """The change of the loss by a shift."""
    # Adding 0.0 to the rounded value turns -0.0 into 0.0.
    return signed(round(entry["nats_shifted"] - entry["nats"], 3) + 0.0, ".3f")
