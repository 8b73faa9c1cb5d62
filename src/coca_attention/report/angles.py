"""Sections of the report about angles, made from the results of ``coca analyze`` alone."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator

from coca_attention.report.figures import COLOURS, draw

FORMS = {
    "vanilla": "rotary attention",
    "slack": "CoCA, slack form",
    "strict": "CoCA, strict form",
    "linear": "CoCA, linear form",
}
# Forms whose angles are all 0 by construction.
WITHOUT_ANGLES = ("strict", "linear")
DASHES = ("-", "--", ":", "-.")
LEVELS = 10
ROUND_OFF = 1e-9
"""Relative change of float64 scores below which nothing has changed."""


def angle_cells(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that are analyses of angles."""
    return [cell for cell in results if cell.get("task") == "angles"]


def angle_sections(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Title, text and figure of every section.

    Args:
        cells: Results, those of other tasks among them left aside.

    Returns:
        ``{"title": str, "text": str, "figure": {"wide": svg, "narrow": svg}}`` each; the text is
        plain. None for results without angles.
    """
    cells = angle_cells(cells)
    if not cells:
        return []
    sections = [
        (
            f"Angle between query and key: {cell['model']}",
            _angle_text(cell),
            angle_figure(cell, f"angles-{index}"),
        )
        for index, cell in enumerate(cells)
        if cell["form"] not in WITHOUT_ANGLES  # one bin would hold all
    ]
    sections.append(
        ("Anomalous tokens by rotary pair", _anomaly_text(cells), anomaly_figure(cells))
    )
    sections += [
        (
            f"Score and bounds by distance: {cell['model']}",
            _decay_text(cell),
            decay_figure(cell, f"decay-{index}"),
        )
        for index, cell in enumerate(cells)
    ]
    shifted = [cell for cell in cells if cell["shifts"]]
    if shifted:
        sections.append(("All positions moved", _shift_text(shifted), shift_figure(shifted)))
    return [{"title": title, "text": text, "figure": figure} for title, text, figure in sections]


def angle_table(cells: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table, one row a model."""
    header = ["model", "attention", "Θ > π", "anomalous at", "violations of Eq. 19, 20, 21"]
    header += ["score change when moved", "nats when moved"]
    rows = []
    for cell in angle_cells(cells):
        shares = [
            f"{length:,}: {_percent(_mean(_share(cell, index)))}"
            for index, length in shown_lengths(cell)
        ]
        violations = [_total(cell, name, "violations") for name in ("eq19", "eq20", "eq21")]
        moved = nats = "–"
        if cell["shifts"]:
            change, shift = max(
                (_mean(_score_changes(cell, index)) or 0.0, entry["shift"])
                for index, entry in enumerate(cell["shifts"])
            )
            moved = f"{change:.2g} (by {shift:,})"
            worst = max(cell["shifts"], key=lambda entry: abs(_nats_change(entry)))
            nats = f"{_signed(_nats_change(worst))} (by {worst['shift']:,})"
        rows.append(
            [
                cell["model"],
                FORMS[cell["form"]],
                _percent(_mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])),
                "; ".join(shares),
                ", ".join(f"{count:,}" for count in violations),
                moved,
                nats,
            ]
        )
    return header, rows


def seen_angles(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer's angles as its scores have them: of the slack form, those at the key's position."""
    return layer["effective_angles"] or layer["angles"]


def shown_lengths(cell: dict[str, Any]) -> list[tuple[int, int]]:
    """Index and tokens of the lengths to show.

    Angles of the slack form depend on the position, so longer texts than were read have others.
    """
    lengths = list(enumerate(cell["settings"]["lengths"]))
    if cell["form"] != "slack":
        return lengths
    return [item for item in lengths if item[1] <= cell["longest"]] or lengths[:1]


def angle_figure(cell: dict[str, Any], name: str) -> dict[str, str]:
    """Histogram of Θ of every layer, over all pairs: layers upwards, the angle to the right."""
    rows = [_layer_histogram(seen_angles(layer)) for layer in cell["layers"]]
    bins = len(rows[0])
    # As a multiple of what equally likely angles would give.
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
        )
        axes.grid(False)
        axes.axvline(180, color="white", lw=1, ls="--")
        axes.set_xticks([0, 90, 180, 270, 360], ["0", "π/2", "π", "3π/2", "2π"])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("angle Θ from key to query before rotation")
        axes.set_ylabel("layer")
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(mesh, ax=axes, label="density (1: all angles alike)")

    return draw(name, plot)


def anomaly_figure(cells: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Share of causal (m, n) pairs in the anomalous zone by rotary pair, mean of the layers."""

    def plot(axes: Axes) -> None:
        for cell, colour in zip(cells, _colours(cells), strict=True):
            for index, length in shown_lengths(cell):
                axes.plot(
                    [100 * value for value in _share(cell, index)],
                    label=f"{cell['model']}, {length:,} tokens",
                    color=colour,
                    ls=DASHES[index % len(DASHES)],
                    lw=1.6,
                )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rotary pair, from fast to slow")
        axes.set_ylabel("anomalous (query, key) pairs (%)")

    return draw("anomalous", plot)


def decay_figure(cell: dict[str, Any], name: str) -> dict[str, str]:
    """Scores and the bounds of Eq. 19 and 20 against the distance, mean of the layers."""
    lines = (
        ("score", "score", COLOURS[2], "-"),
        ("eq19", "bound for any angles (Eq. 19)", COLOURS[1], "--"),
        ("eq20", "bound for angles of 0 (Eq. 20)", COLOURS[3], "-."),
    )
    found: dict[str, dict[int, list[float]]] = {key: {} for key, *_ in lines}
    for layer in cell["layers"]:
        for row in layer["decay"]["by_distance"]:
            for key, *_ in lines:
                if row[key]:
                    found[key].setdefault(row["distance"], []).append(row[key])

    def plot(axes: Axes) -> None:
        for key, label, colour, dash in lines:
            points = sorted(found[key].items())
            axes.plot(
                [distance for distance, _ in points],
                [sum(values) / len(values) for _, values in points],
                label=label,
                color=colour,
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
    """Change of attention scores when all positions move; lines are means, bands all layers."""

    def plot(axes: Axes) -> None:
        for cell, colour in zip(cells, _colours(cells), strict=True):
            shifts, means, lows, highs = [], [], [], []
            for index, entry in enumerate(cell["shifts"]):
                changes = _score_changes(cell, index)
                if changes:
                    shifts.append(entry["shift"])
                    # A change of exactly nothing has no place on a logarithmic axis.
                    means.append(max(sum(changes) / len(changes), 1e-17))
                    lows.append(max(min(changes), 1e-17))
                    highs.append(max(max(changes), 1e-17))
            axes.plot(shifts, means, label=cell["model"], color=colour, marker="o", ms=4, lw=1.8)
            axes.fill_between(shifts, lows, highs, color=colour, alpha=0.12, lw=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_yscale("log")
        axes.set_xlabel("all positions moved by (tokens)")
        axes.set_ylabel("change of scores over their spread")

    return draw("shift", plot)


def _angle_text(cell: dict[str, Any]) -> str:
    above = _mean(seen_angles(layer)["cases"]["d"] for layer in cell["layers"])
    text = (
        f"{cell['model']} ({FORMS[cell['form']]}), {cell['tokens']:,} tokens of "
        f"{cell['documents']} documents: Θ > π, so that the score of the nearest tokens rises with "
        f"distance, in {_percent(above)} of all (query, key, rotary pair) triples."
    )
    if cell["form"] == "slack":
        text += (
            f" Before rotation all angles are 0 (largest measured: {_largest(cell)} radians); "
            "shown are the angles that the slack form gives to keys at their positions."
        )
    return text


def _anomaly_text(cells: Sequence[dict[str, Any]]) -> str:
    sentences = [
        "A (query, key) pair is anomalous in a rotary pair when the key is nearer than "
        "τ = (2π − Θ)/θ and Θ > π: there the pair's score rises with distance."
    ]
    for cell in cells:
        if cell["form"] in WITHOUT_ANGLES:
            sentences.append(
                f"{cell['model']}: none, for all angles are 0 by construction (largest measured: "
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
            + (f", largest left side {ratio:.3g} of the right" if ratio is not None else "")
            + "."
        )
    if cell["form"] not in WITHOUT_ANGLES:
        count = _total(cell, "score_against_eq20", "checked")
        above = _total(cell, "score_against_eq20", "violations")
        sentences.append(
            f"The scores themselves, whose angles are not 0, exceed the bound of Eq. 20 in "
            f"{above:,} of {count:,}."
        )
    sentences.append("Above a share of 1 a bound says nothing that |cos| ≤ 1 does not.")
    return " ".join(sentences)


def _shift_text(cells: Sequence[dict[str, Any]]) -> str:
    sentences = []
    for cell in cells:
        last = cell["shifts"][-1]
        change = _mean(_score_changes(cell, len(cell["shifts"]) - 1)) or 0.0
        how = (
            "scores do not change but for round-off"
            if change < ROUND_OFF
            else f"scores change by {change:.2g} of their spread"
        )
        sentences.append(
            f"{cell['model']}, moved by {last['shift']:,} tokens: {how}; loss "
            f"{_signed(_nats_change(last))} nats a token."
        )
    return " ".join(sentences)


def _layer_histogram(angles: dict[str, Any]) -> list[float]:
    """Shares of the bins over all pairs, each pair weighing as many angles as it has."""
    weights = [1 - (share or 0.0) for share in angles["zero_share"]]
    rows = angles["histogram"]
    total = sum(weights) or 1.0
    return [
        sum(weight * (row[index] or 0.0) for weight, row in zip(weights, rows, strict=True)) / total
        for index in range(len(rows[0]))
    ]


def _share(cell: dict[str, Any], index: int) -> list[float]:
    """Anomalous share of every rotary pair at one of the lengths, mean of the layers."""
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


def _signed(value: float) -> str:
    # Adding zero to what was rounded takes the minus from a zero.
    return f"{round(value, 3) + 0.0:+.3f}".replace("-", "−")


def _colours(cells: Sequence[Any]) -> list[str]:
    return [COLOURS[(index + 1) % len(COLOURS)] for index in range(len(cells))]
