"""Angles between queries and keys in the report, from the results of ``coca analyze``."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field

from coca_lab.cells import (
    CheckedCell,
    Facts,
    Fraction,
    Natural,
    Number,
    Record,
    Whole,
    having,
)
from coca_lab.report.charts import DASHES, Frame, LineChart
from coca_lab.report.section import Section, signed

NEGLIGIBLE = 1e-9
"""Relative change of float64 scores that round-off explains."""
SMALLEST = 1e-17
"""A logarithmic axis cannot show 0."""
EQUATIONS = {"eq19": "Eq. 19", "eq20": "Eq. 20, at angles of 0", "eq21": "Eq. 21"}
EQUATIONS |= {"score_against_eq20": "Eq. 20 by the scores, at other angles"}
"""The last is no inequality of the paper: it says how far scores leave the bound."""
BOUNDS = {
    "score": ("", "1 0"),
    "eq19": ("bound for any angles (Eq. 19)", "6 3"),
    "eq20": ("bound for angles of 0 (Eq. 20)", "9 3 2 3"),
}


Shares = list[Fraction | None]
Violations = Annotated[dict[str, Number | None], having("checked", "violations", "largest_ratio")]
"""How often an inequality was looked at, and violated."""
AtDistance = Annotated[dict[str, Number | None], having("distance", *BOUNDS)]
"""A mean score and its bounds."""
Shift = Annotated[dict[str, Number], having("shift", "nats", "nats_shifted")]
"""The loss when all positions are moved."""


class AnomalousShares(Record):
    """By rotary pair, in texts of one length."""

    length: Whole
    anomalous_share: Shares


class AngleRecord(Record):
    """Angles of a layer; the histogram has a row for every rotary pair."""

    cases: Annotated[dict[str, Fraction | None], having("d")]
    largest: Number | None
    zero_share: Shares
    histogram: list[list[Number | None]]
    lengths: Annotated[list[AnomalousShares], Field(min_length=1)]


class DecayRecord(Record):
    """Scores by distance, and the paper's bounds of them."""

    by_distance: list[AtDistance]
    eq19: Violations
    eq20: Violations
    eq21: Violations
    score_against_eq20: Violations


class Layer(Record):
    """A layer's angles."""

    layer: Natural
    form: str = ""
    angles: AngleRecord
    effective_angles: AngleRecord | None
    decay: DecayRecord
    shifts: list[Annotated[dict[str, Number | None], having("score_change")]]
    absolute_share: Fraction | None = None

    @property
    def seen(self) -> AngleRecord:
        """The angles that its scores have: in the slack form those at the key's position."""
        return self.effective_angles or self.angles


class AngleCell(CheckedCell):
    """Angles between queries and keys."""

    form: str
    documents: Whole
    tokens: Whole
    longest: Whole
    shifts: list[Shift]
    layers: Annotated[list[Layer], Field(min_length=1)]

    @property
    def facts(self) -> Facts:
        """The texts."""
        return self._known("documents", "tokens", "longest")

    @property
    def at_key_position(self) -> bool:
        """Whether the angles depend on the key's position, as in the slack form."""
        return any(layer.effective_angles for layer in self.layers)

    @property
    def without_angles(self) -> bool:
        """Whether all angles are 0 by construction, as in the strict form."""
        forms = {layer.form or self.form for layer in self.layers}
        return "vanilla" not in forms and not self.at_key_position

    def anomalous(self) -> Frame:
        """Anomalous shares, averaged over layers: a row a length, a column a rotary pair."""
        shares: Frame = pd.DataFrame(
            {
                (layer.layer, each.length): pd.Series(each.anomalous_share, dtype=float)
                for layer in self.layers
                for each in layer.seen.lengths
            }
        )
        mean = shares.T.groupby(level=1).mean().fillna(0.0)
        # Angles that depend on positions are those of what was read.
        read = mean[mean.index <= self.longest] if self.at_key_position else mean
        return mean.head(1) if read.empty else read

    def score_changes(self) -> Frame:
        """A row for every layer, a column for every shift."""
        rows = [[each["score_change"] for each in layer.shifts] for layer in self.layers]
        return pd.DataFrame(rows, dtype=float).reindex(columns=range(len(self.shifts)))

    def above(self) -> str:
        """The share of angles above π."""
        return _percent(_mean([layer.seen.cases["d"] for layer in self.layers]))


def angle_sections(cells: Sequence[AngleCell]) -> list[Section]:
    """Histograms, anomalous tokens, decay and shifts, and a table of all figures."""
    # Without angles, all would be in one bin.
    turned = [cell for cell in cells if not cell.without_angles]
    sections = [_histogram(turned), _anomalous(turned)] if turned else []
    sections.append(_decay(cells))
    if shifted := [cell for cell in cells if cell.shifts]:
        sections.append(_shifts(shifted))
    # A column per model: a row would be too long for a terminal.
    models = [cell.model for cell in cells]
    rows = pd.DataFrame(map(_measures, cells), models).T.fillna("–").itertuples()
    note = (
        "Means over layers, heads and pairs. A bound above a share of 1 is weaker than |cos| ≤ 1. "
        "Without Θ, all angles are 0 by construction."
    )
    table = Section("Figures of every model", "", "", None, ["angles", *models], [*rows], note)
    return [*sections, table]


def _measures(cell: AngleCell) -> dict[str, str]:
    """What the table says of a model."""
    largest = max(layer.angles.largest or 0.0 for layer in cell.layers)
    measures = {
        "attention": "rotary attention" if cell.form == "vanilla" else f"CoCA, {cell.form} form",
        "documents": f"{cell.documents:,}",
        "tokens": f"{cell.tokens:,}",
        "Θ > π": cell.above(),
        "largest angle before rotation": f"{largest:.2g}",
    }
    for length, shares in cell.anomalous().iterrows():
        measures[f"anomalous at {length:,} tokens"] = _percent(shares.mean())
    for check, name in EQUATIONS.items():
        if check == "score_against_eq20" and cell.without_angles:
            continue
        checks = [getattr(layer.decay, check) for layer in cell.layers]
        count, wrong = (sum(c[of] or 0 for c in checks) for of in ("checked", "violations"))
        measures[f"violations of {name}"] = f"{wrong:,.0f} of {count:,.0f}"
        ratios = [each["largest_ratio"] for each in checks if each["largest_ratio"] is not None]
        if ratios:
            measures[f"largest ratio in {name}"] = f"{max(ratios):.3g}"
    if cell.shifts:
        changes = cell.score_changes().mean().fillna(0.0)
        most = cell.shifts[int(changes.idxmax())]
        measures["score change when moved"] = f"{changes.max():.2g} (by {most['shift']:,.0f})"
        moved = [(each["nats_shifted"] - each["nats"], each["shift"]) for each in cell.shifts]
        nats, shift = max(moved, key=lambda each: abs(each[0]))
        # Adding 0.0 to the rounded value turns -0.0 into 0.0.
        measures["nats when moved"] = f"{signed(round(nats, 3) + 0.0, '.3f')} (by {shift:,.0f})"
        share = _mean([layer.absolute_share for layer in cell.layers])
        if share > 0:
            measures["scores that depend on m + n"] = _percent(share)
    return measures


def _line(cell: AngleCell, name: str, x: object, y: object, **look: object) -> Frame:
    """The points of a line in the colour of its model."""
    line = ", ".join(filter(None, (cell.model, name)))
    return pd.DataFrame({"line": line, "x": x, "y": y, "colour": cell.model, **look})


def _histogram(cells: Sequence[AngleCell]) -> Section:
    """Density of Θ over all pairs, relative to a uniform one; by layer in the folded chart."""
    lines = []
    for cell in cells:
        layers = {f"layer {each.layer}": _density(each.seen) for each in cell.layers}
        mean = pd.DataFrame(layers).mean(axis=1)
        for name, density in {"": mean, **layers}.items():
            x = 360 * (density.index + 0.5) / len(density)
            lines.append(_line(cell, name, x, density, first=not name, mark="line"))
    x = "angle Θ from key to query (degrees)"
    chart = LineChart(pd.concat(lines), x, "density (1: uniform)", level=1.0)
    said = ", ".join(f"{cell.above()} ({cell.model})" for cell in cells)
    text = "Where Θ > π, the score of the nearest tokens rises with distance."
    if any(cell.at_key_position for cell in cells):
        text += " In the slack form, Θ is the angle of keys at their positions; before, it is 0."
    lead = f"Angles between query and key that exceed π: {said}."
    return Section("Angle between query and key", lead, text, chart)


def _density(angles: AngleRecord) -> Frame:
    """Density by bin over all pairs, each pair weighted by its number of angles."""
    rows: Frame = pd.DataFrame(angles.histogram, dtype=float).fillna(0.0)
    weights = 1 - pd.Series(angles.zero_share, dtype=float).reindex(rows.index).fillna(1.0)
    return rows.mul(weights, axis=0).sum() / (weights.sum() or 1.0) * rows.shape[1]


def _anomalous(cells: Sequence[AngleCell]) -> Section:
    """Share of causal (m, n) pairs in the anomalous zone by rotary pair, averaged over layers."""
    lines, said = [], []
    for cell in cells:
        shares = cell.anomalous().iloc[::-1]  # the longest first
        said.append(f"{cell.model} {_percent(shares.iloc[0].mean())} at {shares.index[0]:,} tokens")
        for index, (length, share) in enumerate(shares.iterrows()):
            dash = DASHES[index % len(DASHES)]
            look = {"dash": dash, "mark": "line", "first": not index}
            lines.append(_line(cell, f"{length:,} tokens", share.index, 100 * share, **look))
    text = (
        "A (query, key) pair is anomalous in a rotary pair if Θ > π and the key is nearer than "
        "τ = (2π − Θ)/θ: its score then rises with distance."
    )
    x, y = "rotary pair, from fast to slow", "anomalous (query, key) pairs (%)"
    lead = f"Anomalous pairs: {', '.join(said)}."
    return Section("Anomalous tokens by rotary pair", lead, text, LineChart(pd.concat(lines), x, y))


def _decay(cells: Sequence[AngleCell]) -> Section:
    """Scores against the distance, averaged over layers; in the folded chart with their bounds."""
    lines, said = [], []
    for cell in cells:
        rows = [each for layer in cell.layers for each in layer.decay.by_distance]
        frame: Frame = pd.DataFrame(rows, columns=["distance", *BOUNDS]).astype(float)
        # 0 counts as unknown.
        means = frame.replace(0.0, np.nan).groupby("distance").mean().dropna(how="all")
        for name, (label, dash) in BOUNDS.items():
            lines.append(_line(cell, label, means.index, means[name], dash=dash, first=not label))
        score = means["score"].dropna()
        if len(score):
            said.append(f"{cell.model} {score.iloc[0]:.2g} to {score.iloc[-1]:.2g}")
    points: Frame = pd.concat(lines)
    ticks = sorted(map(int, points["x"].unique())) or [1]
    x, y = "distance m − n (tokens)", "share of the sum of |q||k|"
    chart = LineChart(points, x, y, ticks=ticks, log_y=True)
    lead = f"Mean scores from the nearest tokens to the farthest: {', '.join(said) or 'unknown'}."
    text = "Scores, and the paper’s bounds of them, as a share of |q||k|."
    return Section("Score and bounds by distance", lead, text, chart)


def _shifts(cells: Sequence[AngleCell]) -> Section:
    """Change of attention scores when all positions move: mean and range over the layers."""
    lines, said = [], []
    for cell in cells:
        changes = cell.score_changes().clip(lower=SMALLEST)
        moved = [each["shift"] for each in cell.shifts]
        ends = {"low": changes.min(), "high": changes.max()}
        lines.append(_line(cell, "", moved, changes.mean(), **ends))
        most = changes.mean().max()
        said.append(f"{cell.model} {'within round-off' if most < NEGLIGIBLE else f'{most:.2g}'}")
    points: Frame = pd.concat(lines)
    x, y = "all positions moved by (tokens)", "change of scores over their spread"
    chart = LineChart(points, x, y, ticks=sorted(points["x"].unique().tolist()), log_y=True)
    lead = f"Scores change, when all positions move, by at most: {', '.join(said)}."
    return Section("All positions moved", lead, "", chart)


def _mean(values: Sequence[float | None]) -> float:
    """Mean of the values that are known, NaN without any."""
    return float(pd.Series(values, dtype=float).mean())


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"
