"""Angles between queries and keys in the report, from the results of ``coca analyze``."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator

from coca_lab.report.figures import colours, draw
from coca_lab.report.lines import signed
from coca_lab.report.section import Section, Table

DASHES = ("-", "--", ":", "-.")
LEVELS = 10
ROUND_OFF = 1e-9
"""Relative change of float64 scores that round-off explains."""


def angle_sections(cells: Sequence[dict[str, Any]]) -> list[Section]:
    """Histograms, anomalous tokens, decay and shifts."""
    sections = [
        Section(
            f"Angle between query and key: {cell['model']}",
            _angle_text(cell),
            angle_figure(cell, f"angles-{index}"),
        )
        for index, cell in enumerate(cells)
        if not without_angles(cell)  # all would be in one bin
    ]
    has_anomalies = not all(without_angles(cell) for cell in cells)
    sections.append(
        Section(
            "Anomalous tokens by rotary pair",
            _anomaly_text(cells),
            anomaly_figure(cells) if has_anomalies else None,
        )
    )
    sections += [
        Section(
            f"Score and bounds by distance: {cell['model']}",
            _decay_text(cell),
            decay_figure(cell, f"decay-{index}"),
        )
        for index, cell in enumerate(cells)
    ]
    shifted = [cell for cell in cells if cell["shifts"]]
    if shifted:
        sections.append(Section("All positions moved", _shift_text(shifted), shift_figure(shifted)))
    return sections


def angle_table(cells: Sequence[dict[str, Any]]) -> Table:
    """A column per model: a row would be too long for a terminal."""
    columns = [_measures(cell) for cell in cells]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return ["angles", *(cell["model"] for cell in cells)], rows


def _measures(cell: dict[str, Any]) -> dict[str, str]:
    found = {
        "attention": form_label(cell),
        "Θ > π": _percent(_mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])),
    }
    for index, length in shown_lengths(cell):
        found[f"anomalous at {length:,} tokens"] = _percent(_mean(_share(cell, index)))
    for check, name in (("eq19", "Eq. 19"), ("eq20", "Eq. 20"), ("eq21", "Eq. 21")):
        found[f"violations of {name}"] = f"{_total(cell, check, 'violations'):,}"
    if cell["shifts"]:
        change, shift = max(
            (_mean(_score_changes(cell, index)) or 0.0, entry["shift"])
            for index, entry in enumerate(cell["shifts"])
        )
        found["score change when moved"] = f"{change:.2g} (by {shift:,})"
        worst = max(cell["shifts"], key=lambda entry: abs(_nats_change(entry)))
        found["nats when moved"] = f"{_nats(_nats_change(worst))} (by {worst['shift']:,})"
    return found


def seen_angles(layer: dict[str, Any]) -> dict[str, Any]:
    """The angles that a layer's scores have: in the slack form those at the key's position."""
    return layer["effective_angles"] or layer["angles"]


def form_label(cell: dict[str, Any]) -> str:
    """The name of the cell's score form."""
    return "rotary attention" if cell["form"] == "vanilla" else f"CoCA, {cell['form']} form"


def at_key_position(cell: dict[str, Any]) -> bool:
    """Whether the angles depend on the key's position, as in the slack form."""
    return any(layer["effective_angles"] for layer in cell["layers"])


def without_angles(cell: dict[str, Any]) -> bool:
    """Whether all angles are 0 by construction, as in the strict form."""
    forms = {layer.get("form", cell["form"]) for layer in cell["layers"]}
    return "vanilla" not in forms and not at_key_position(cell)


def shown_lengths(cell: dict[str, Any]) -> list[tuple[int, int]]:
    """Index and tokens of the lengths to show.

    Angles that depend on the position are known up to the longest text that was read.
    """
    lengths = list(enumerate(cell["settings"]["lengths"]))
    if not at_key_position(cell):
        return lengths
    return [item for item in lengths if item[1] <= cell["longest"]] or lengths[:1]


def angle_figure(cell: dict[str, Any], name: str) -> dict[str, str]:
    """Histograms of Θ over all pairs: the angle on the horizontal axis, the layer on the other."""
    rows = [_layer_histogram(seen_angles(layer)) for layer in cell["layers"]]
    bins = len(rows[0])
    # Relative to a uniform distribution.
    scaled = [[value * bins for value in row] for row in rows]
    top = max(max(row) for row in scaled) or 1.0

    def plot(axes: Axes) -> None:
        levels = MaxNLocator(LEVELS).tick_values(0.0, top)
        mesh = axes.pcolormesh(
            [360 * edge / bins for edge in range(bins + 1)],
            [index - 0.5 for index in range(len(rows) + 1)],
            scaled,
            cmap=colormaps["cividis"],
            norm=BoundaryNorm(levels, 256),
            edgecolor="face",
            lw=0.3,
        )
        axes.grid(False)
        axes.axvline(180, color="white", lw=1, ls="--")
        axes.set_xticks([0, 90, 180, 270, 360], ["0", "π/2", "π", "3π/2", "2π"])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("angle Θ from key to query before rotation")
        axes.set_ylabel("layer")
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(mesh, ax=axes, label="density (1: uniform)")

    return draw(name, plot)


def anomaly_figure(cells: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Share of causal (m, n) pairs in the anomalous zone by rotary pair, averaged over layers."""

    def plot(axes: Axes) -> None:
        colour = colours(cell["model"] for cell in cells)
        for cell in cells:
            for index, length in shown_lengths(cell):
                axes.plot(
                    [100 * value for value in _share(cell, index)],
                    label=f"{cell['model']}, {length:,} tokens",
                    color=colour[cell["model"]],
                    ls=DASHES[index % len(DASHES)],
                    lw=1.6,
                )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rotary pair, from fast to slow")
        axes.set_ylabel("anomalous (query, key) pairs (%)")

    return draw("anomalous", plot)


def decay_figure(cell: dict[str, Any], name: str) -> dict[str, str]:
    """Scores and the bounds of Eq. 19 and 20 against the distance, averaged over layers."""
    lines = (
        ("score", "score", "-"),
        ("eq19", "bound for any angles (Eq. 19)", "--"),
        ("eq20", "bound for angles of 0 (Eq. 20)", "-."),
    )
    found: dict[str, dict[int, list[float]]] = {key: {} for key, *_ in lines}
    for layer in cell["layers"]:
        for row in layer["decay"]["by_distance"]:
            for key, *_ in lines:
                if row[key]:
                    found[key].setdefault(row["distance"], []).append(row[key])

    colour = colours(label for _, label, _ in lines)

    def plot(axes: Axes) -> None:
        for key, label, dash in lines:
            points = sorted(found[key].items())
            axes.plot(
                [distance for distance, _ in points],
                [sum(values) / len(values) for _, values in points],
                label=label,
                color=colour[label],
                ls=dash,
                marker="o",
                ms=3,
                lw=1.6,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_yscale("log")
        axes.set_xlabel("distance m − n (tokens)")
        axes.set_ylabel("share of the sum of |q||k|")

    return draw(name, plot)


def shift_figure(cells: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Change of attention scores when all positions move: mean and range over the layers."""

    def plot(axes: Axes) -> None:
        colour = colours(cell["model"] for cell in cells)
        for cell in cells:
            shifts, means, lows, highs = [], [], [], []
            for index, entry in enumerate(cell["shifts"]):
                changes = _score_changes(cell, index)
                if changes:
                    shifts.append(entry["shift"])
                    # A logarithmic axis cannot show 0.
                    means.append(max(sum(changes) / len(changes), 1e-17))
                    lows.append(max(min(changes), 1e-17))
                    highs.append(max(max(changes), 1e-17))
            style: dict[str, Any] = {"color": colour[cell["model"]]}
            axes.plot(shifts, means, label=cell["model"], marker="o", ms=4, lw=1.8, **style)
            axes.fill_between(shifts, lows, highs, alpha=0.12, lw=0, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_yscale("log")
        axes.set_xlabel("all positions moved by (tokens)")
        axes.set_ylabel("change of scores over their spread")

    return draw("shift", plot)


def _angle_text(cell: dict[str, Any]) -> str:
    above = _mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])
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
    return text


def _anomaly_text(cells: Sequence[dict[str, Any]]) -> str:
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
            f"{_percent(_mean(_share(cell, index)))} at {length:,} tokens"
            for index, length in shown_lengths(cell)
        ]
        sentences.append(f"{cell['model']}: {', '.join(shares)}, over all layers and pairs.")
    return " ".join(sentences)


def _decay_text(cell: dict[str, Any]) -> str:
    sentences = []
    names = {"eq19": "Eq. 19", "eq20": "Eq. 20, at angles of 0", "eq21": "Eq. 21"}
    for key, what in names.items():
        count, violations = _total(cell, key, "checked"), _total(cell, key, "violations")
        ratio = _ratio(cell, key)
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


def _shift_text(cells: Sequence[dict[str, Any]]) -> str:
    sentences = []
    for cell in cells:
        last = cell["shifts"][-1]
        change = _mean(_score_changes(cell, len(cell["shifts"]) - 1)) or 0.0
        how = (
            "scores do not change beyond round-off"
            if change < ROUND_OFF
            else f"scores change by {change:.2g} of their spread"
        )
        share = _mean(layer.get("absolute_share") for layer in cell["layers"])
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


def _share(cell: dict[str, Any], index: int) -> list[float]:
    """Anomalous share of every rotary pair at one of the lengths, averaged over layers."""
    layers = [seen_angles(layer)["lengths"][index]["anomalous_share"] for layer in cell["layers"]]
    pairs = max(len(layer) for layer in layers)
    columns = ([layer[pair] for layer in layers if pair < len(layer)] for pair in range(pairs))
    return [_mean(column) or 0.0 for column in columns]


def _score_changes(cell: dict[str, Any], index: int) -> list[float]:
    found = (layer["shifts"][index]["score_change"] for layer in cell["layers"])
    return [value for value in found if value is not None]


def _nats_change(entry: dict[str, Any]) -> float:
    return entry["nats_shifted"] - entry["nats"]


def _total(cell: dict[str, Any], check: str, field: str) -> int:
    return sum(layer["decay"][check][field] for layer in cell["layers"])


def _ratio(cell: dict[str, Any], check: str) -> float | None:
    found = [layer["decay"][check]["largest_ratio"] for layer in cell["layers"]]
    return max((value for value in found if value is not None), default=None)


def _largest(cell: dict[str, Any]) -> str:
    largest = max(layer["angles"]["largest"] for layer in cell["layers"])
    return f"{largest:.2g}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _nats(value: float) -> str:
    # Adding 0.0 to the rounded value turns -0.0 into 0.0.
    return signed(round(value, 3) + 0.0, ".3f")
