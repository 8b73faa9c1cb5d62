"""Angles between queries and keys in the report, from the results of ``coca analyze``."""

from collections.abc import Sequence
from typing import Any

from coca_lab.report.charts import Ends, HeatMap, Line, LineChart
from coca_lab.report.results import Cell
from coca_lab.report.section import Section, Table, mean, signed

DASHES = ((), (6, 3), (2, 3), (9, 3, 2, 3))
ROUND_OFF = 1e-9
"""Relative change of float64 scores that round-off explains."""
SMALLEST = 1e-17
"""A logarithmic axis cannot show 0."""


def angle_sections(cells: Sequence[Cell]) -> list[Section]:
    """Histograms, anomalous tokens, decay and shifts."""
    # Without angles, all would be in one bin.
    sections = [_histogram_section(cell) for cell in cells if not without_angles(cell)]
    sections.append(_anomaly_section(cells, drawn=bool(sections)))
    for cell in cells:
        title = f"Score and bounds by distance: {cell['model']}"
        sections.append(Section(title, text=_decay_text(cell), chart=decay_chart(cell)))
    shifted = [cell for cell in cells if cell["shifts"]]
    if shifted:
        text, chart = _shift_text(shifted), shift_chart(shifted)
        sections.append(Section("All positions moved", text=text, chart=chart))
    return sections


def angle_table(cells: Sequence[Cell]) -> Table:
    """A column per model: a row would be too long for a terminal."""
    columns = [_measures(cell) for cell in cells]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return ["angles", *(cell["model"] for cell in cells)], rows


def seen_angles(layer: dict[str, Any]) -> dict[str, Any]:
    """The angles that a layer's scores have: in the slack form those at the key's position."""
    return layer["effective_angles"] or layer["angles"]


def form_label(cell: Cell) -> str:
    """The name of the cell's score form."""
    return "rotary attention" if cell["form"] == "vanilla" else f"CoCA, {cell['form']} form"


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
            share = [100 * value for value in _share(cell, index)]
            label = f"{cell['model']}, {length:,} tokens"
            dash = DASHES[index % len(DASHES)]
            x = list(range(len(share)))
            lines.append(Line(label, x, share, None, cell["model"], dash, dotted=False))
    x, y = "rotary pair, from fast to slow", "anomalous (query, key) pairs (%)"
    return LineChart(lines, x, y)


def decay_chart(cell: Cell) -> LineChart:
    """Scores and the bounds of Eq. 19 and 20 against the distance, averaged over layers."""
    lines = (
        ("score", "score", ()),
        ("eq19", "bound for any angles (Eq. 19)", (6, 3)),
        ("eq20", "bound for angles of 0 (Eq. 20)", (9, 3, 2, 3)),
    )
    drawn = []
    for key, label, dash in lines:
        found: dict[int, list[float]] = {}
        for layer in cell["layers"]:
            for row in layer["decay"]["by_distance"]:
                if row[key]:
                    found.setdefault(row["distance"], []).append(row[key])
        distances = sorted(found)
        drawn.append(Line(label, distances, [mean(found[d]) for d in distances], dash=dash))
    ticks = sorted({x for line in drawn for x in line.x}) or [1]
    y = "share of the sum of |q||k|"
    return LineChart(drawn, "distance m − n (tokens)", y, ticks=ticks, log_y=True)


def shift_chart(cells: Sequence[Cell]) -> LineChart:
    """Change of attention scores when all positions move: mean and range over the layers."""
    lines = []
    for cell in cells:
        found = {e["shift"]: _score_changes(cell, i) for i, e in enumerate(cell["shifts"])}
        found = {s: [max(c, SMALLEST) for c in changes] for s, changes in found.items() if changes}
        ends: list[Ends | None] = [(min(changes), max(changes)) for changes in found.values()]
        means = [mean(changes) for changes in found.values()]
        lines.append(Line(cell["model"], list(found), means, ends))
    ticks = sorted({entry["shift"] for cell in cells for entry in cell["shifts"]})
    x, y = "all positions moved by (tokens)", "change of scores over their spread"
    return LineChart(lines, x, y, ticks=ticks, log_y=True)


def _measures(cell: Cell) -> dict[str, str]:
    found = {
        "attention": form_label(cell),
        "Θ > π": _percent(mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])),
    }
    for index, length in shown_lengths(cell):
        found[f"anomalous at {length:,} tokens"] = _percent(mean(_share(cell, index)))
    for check, name in (("eq19", "Eq. 19"), ("eq20", "Eq. 20"), ("eq21", "Eq. 21")):
        found[f"violations of {name}"] = f"{_total(cell, check, 'violations'):,}"
    if cell["shifts"]:
        change, shift = max(
            (mean(_score_changes(cell, index)) or 0.0, entry["shift"])
            for index, entry in enumerate(cell["shifts"])
        )
        found["score change when moved"] = f"{change:.2g} (by {shift:,})"
        worst = max(cell["shifts"], key=lambda entry: abs(_nats_change(entry)))
        found["nats when moved"] = f"{_nats(_nats_change(worst))} (by {worst['shift']:,})"
    return found


def _histogram_section(cell: Cell) -> Section:
    above = mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])
    text = (
        f"{cell['model']} ({form_label(cell)}), {cell['tokens']:,} tokens of "
        f"{cell['documents']} documents: in {_percent(above)} of all (query, key, rotary pair) "
        "triples Θ > π, so that the score of the nearest tokens rises with distance."
    )
    if at_key_position(cell):
        text += (
            f" Before rotation all angles are 0 (largest measured: {_largest(cell)} radians); "
            f"the figure shows those that the {cell['form']} form gives to keys at their positions."
        )
    lead = f"{cell['model']}: {_percent(above)} of the angles between query and key exceed π."
    return Section(
        f"Angle between query and key: {cell['model']}", lead, text, chart=histogram(cell)
    )


def _anomaly_section(cells: Sequence[Cell], drawn: bool) -> Section:
    sentences = [
        "A (query, key) pair is anomalous in a rotary pair if Θ > π and the key is nearer than "
        "τ = (2π − Θ)/θ: its score then rises with distance."
    ]
    for cell in cells:
        if without_angles(cell):
            sentences.append(
                f"{cell['model']}: none, since all angles are 0 by construction (largest measured: "
                f"{_largest(cell)} radians)."
            )
            continue
        shares = [
            f"{_percent(mean(_share(cell, index)))} at {length:,} tokens"
            for index, length in shown_lengths(cell)
        ]
        sentences.append(f"{cell['model']}: {', '.join(shares)}, over all layers and pairs.")
    return Section(
        "Anomalous tokens by rotary pair",
        lead="" if drawn else sentences[1],
        text=" ".join(sentences),
        chart=anomaly_chart(cells) if drawn else None,
    )


def _decay_text(cell: Cell) -> str:
    sentences = []
    names = {"eq19": "Eq. 19", "eq20": "Eq. 20, at angles of 0", "eq21": "Eq. 21"}
    for key, what in names.items():
        count, violations = _total(cell, key, "checked"), _total(cell, key, "violations")
        ratios = (layer["decay"][key]["largest_ratio"] for layer in cell["layers"])
        ratio = max((value for value in ratios if value is not None), default=None)
        sentences.append(
            f"{what}: {violations:,} violations in {count:,} comparisons"
            + (f", the left side at most {ratio:.3g} of the right" if ratio is not None else "")
            + "."
        )
    if not without_angles(cell):
        count = _total(cell, "score_against_eq20", "checked")
        above = _total(cell, "score_against_eq20", "violations")
        sentences.append(
            f"The scores themselves, with angles other than 0, exceed the bound of Eq. 20 in "
            f"{above:,} of {count:,} comparisons."
        )
    sentences.append("A bound above a share of 1 is weaker than |cos| ≤ 1.")
    return " ".join(sentences)


def _shift_text(cells: Sequence[Cell]) -> str:
    sentences = []
    for cell in cells:
        last = cell["shifts"][-1]
        change = mean(_score_changes(cell, len(cell["shifts"]) - 1)) or 0.0
        how = (
            "scores do not change beyond round-off"
            if change < ROUND_OFF
            else f"scores change by {change:.2g} of their spread"
        )
        share = mean(layer.get("absolute_share") for layer in cell["layers"])
        sentences.append(
            f"{cell['model']}, moved by {last['shift']:,} tokens: {how}; loss "
            f"{_nats(_nats_change(last))} nats a token"
            + (f"; {_percent(share)} of its scores depends on m + n." if share else ".")
        )
    return " ".join(sentences)


def _layer_histogram(angles: dict[str, Any]) -> list[float]:
    """Shares of the bins over all pairs, each pair weighted by its number of angles."""
    weights = [1 - (share or 0.0) for share in angles["zero_share"]]
    rows = angles["histogram"]
    total = sum(weights) or 1.0
    return [
        sum(weight * (row[index] or 0.0) for weight, row in zip(weights, rows, strict=True)) / total
        for index in range(len(rows[0]))
    ]


def _share(cell: Cell, index: int) -> list[float]:
    """Anomalous share of every rotary pair at one of the lengths, averaged over layers."""
    layers = [seen_angles(layer)["lengths"][index]["anomalous_share"] for layer in cell["layers"]]
    pairs = max(len(layer) for layer in layers)
    columns = ([layer[pair] for layer in layers if pair < len(layer)] for pair in range(pairs))
    return [mean(column) or 0.0 for column in columns]


def _score_changes(cell: Cell, index: int) -> list[float]:
    found = (layer["shifts"][index]["score_change"] for layer in cell["layers"])
    return [value for value in found if value is not None]


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
