"""Figures against the tokens read: cells as a frame for charts, tables and sentences.

A frame has a row for every model, rotary scaling and length, with the columns of a chart's points:
``line`` (the name), ``x`` (tokens), ``y`` (the figure), ``low``, ``high`` and how it is drawn; and
``model``, ``scaling`` and ``cell``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from coca_attention.errors import UserError
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.results import Cell, differ
from coca_lab.report.section import Entry, Section, Table, signed

SCALING_NAMES = {"linear": "PI", "ntk": "NTK", "dynamic": "dynamic NTK", "yarn": "YaRN"}
DASHES = {"none": "", "ntk": "6 3", "dynamic": "6 3", "linear": "9 3 2 3", "yarn": "9 3 2 3"}
SHORT = "attend-last"
"""The scaling of cells without any text before the last tokens; they have one window alone."""


def line_label(cell: Cell) -> str:
    """The name of the line that a cell belongs to."""
    model, kind, factor = cell["model"], cell["scaling"], cell.get("factor")
    if kind == "none":
        return model
    if kind == SHORT:
        return f"{model}, last {cell['window']} tokens only"
    return f"{model} + {SCALING_NAMES.get(kind, kind)}" + (f" ({factor:g})" if factor else "")


def every_cell(cells: Sequence[Cell], size: str, value: str, interval: str = "") -> Frame:
    """A frame of all cells, in the order of the page; the last tokens alone for every length."""
    plain = [cell[size] for cell in cells if cell["scaling"] != SHORT]
    sizes = sorted(set(plain or (cell[size] for cell in cells)))
    rows = []
    for cell in cells:
        kind, last = cell["scaling"], cell["scaling"] == SHORT
        low, high = cell.get(interval) or (math.nan, math.nan)
        row = {
            "line": line_label(cell),
            "model": cell["model"],
            "scaling": kind,
            "y": math.inf if cell[value] is None else cell[value],
            "low": low,
            "high": high,
            "colour": cell["model"],
            "dash": "2 3" if last else DASHES.get(kind, "6 3"),
            "mark": "line" if last else "both",
            "first": kind == "none",
            "cell": cell,
        }
        rows += [row | {"x": x} for x in (sizes if last else [cell[size]])]
    frame: Frame = pd.DataFrame(rows)
    kinds = list(dict.fromkeys((*DASHES, *frame["scaling"])))
    place = frame["scaling"].map(lambda kind: (kind == SHORT) * len(kinds) + kinds.index(kind))
    model, line = (frame[name].factorize()[0] for name in ("model", "line"))
    return frame.iloc[np.lexsort((frame["x"], line, place, model))]


def by_length(cells: Sequence[Cell], size: str, value: str, interval: str = "") -> Frame:
    """As `every_cell`; UserError if two different cells have the same line and size."""
    frame = every_cell(cells, size, value, interval)
    first = frame.drop_duplicates(["line", "x"])
    # Two evaluations of a model can share a cell, such as that of the last tokens.
    for pair in frame.merge(first[["line", "x", "cell"]], on=["line", "x"]).itertuples():
        if differ(pair.cell_x, pair.cell_y):
            files = dict.fromkeys(c["file"] for c in (pair.cell_y, pair.cell_x) if c.get("file"))
            raise UserError(
                f"{' and '.join(files) or 'the results'}: {pair.model} ({pair.scaling}) at "
                f"{pair.x} tokens twice with different figures; give one of them, or evaluate "
                "with --name"
            )
    return first


def without_short(frame: Frame) -> Frame:
    """The rows of all texts read, and not of the last tokens alone."""
    return frame[frame["scaling"] != SHORT]


def short_rows(frame: Frame) -> list[int]:
    """The rows of a table that show the last tokens alone."""
    kinds = frame.drop_duplicates("line")["scaling"]
    return [place for place, kind in enumerate(kinds) if kind == SHORT]


def length_chart(
    frame: Frame, x: str, y: str, *, top: float | None = None, bars: bool = True
) -> LineChart:
    """Figures against the length; without an upper end on a logarithmic axis."""
    trained = training_length(frame)
    return LineChart(
        frame,
        x,
        y,
        ticks=lengths_of(frame),
        log_y=not top,
        top=top,
        mark=(trained, "training context") if trained else None,
        bars=bars,
    )


def length_table(frame: Frame, what: str, entry: Callable[[Any], Any]) -> Table:
    """`table_of` entries from the rows of the frame, with the lengths in training lengths."""
    frame = frame.assign(entry=[entry(row) for row in frame.itertuples()])
    trained, ((_, *names), rows) = training_length(frame), table_of(frame, what)
    small = [f"{n / trained:g} ×" if trained else "" for n in lengths_of(frame)]
    return [what, *map(Entry, names, small)], rows


def table_of(frame: Frame, what: str) -> tuple[list[str], list[list[Any]]]:
    """A row for every line, a column for every length, of the column ``entry``."""
    lengths = lengths_of(frame)
    table = frame.pivot(index="line", columns="x", values="entry")[lengths].fillna("–")
    rows = [[name, *table.loc[name]] for name in frame["line"].unique()]
    return [what, *(f"{length:,}" for length in lengths)], rows


def lengths_of(frame: Frame) -> list[int]:
    """The lengths of a frame, the shortest first."""
    return sorted(frame["x"].unique().tolist())


def training_length(frame: Frame) -> int | None:
    """The training length, if all models share one."""
    lengths = {cell.get("training_length") for cell in frame["cell"]}
    return lengths.pop() if len(lengths) == 1 else None


def at_tokens(frame: Frame, size: int) -> str:
    """``At 512 tokens (4 × the training context)``, if all models share one."""
    trained = training_length(frame)
    if not trained:
        return f"At {size:,} tokens"
    factor = "" if size == trained else f"{size / trained:g} × "
    return f"At {size:,} tokens ({factor}the training context)"


def best_of_models(frame: Frame, size: int, sign: int) -> Frame:
    """The best row of every model at a length, the lowest first; ``sign`` -1: the highest first."""
    # As shown: at its training length, scaling does not make a model better.
    shown = sign * frame["y"].map("{:.4g}".format).astype(float)
    rows = frame.assign(shown=shown)[frame["x"] == size].sort_values("shown", kind="stable")
    return rows.drop_duplicates("model")


def strict_minus_slack(frame: Frame, title: str, columns: str) -> list[Section]:
    """The layout of the paper's Table 3, if one model of each form was evaluated alike."""
    frame = without_short(frame)
    cells, lengths = frame["cell"].tolist(), lengths_of(frame)
    names = [
        "no scaling" if c["scaling"] == "none" else f"{c['scaling']}-{c['factor']:g}" for c in cells
    ]
    frame = frame.assign(form=[cell.get("attention") for cell in cells], name=names)
    slack, strict = forms = [frame[frame["form"] == form] for form in ("slack", "strict")]
    if any(form["model"].nunique() != 1 for form in forms):
        return []
    tables = [form.pivot(index="name", columns="x", values="y") for form in forms]
    before, after = (table.reindex(slack["name"].unique(), columns=lengths) for table in tables)
    rows = []
    for name, change in (after - before).dropna(how="all").iterrows():
        shown = [f"{y:.2f}" if math.isfinite(y) else "–" for y in before.loc[name]]
        rows.append([f"{slack['model'].iloc[0]}, {name}", *shown])
        shown = [signed(y, ".2f") if math.isfinite(y) else "–" for y in change]
        rows.append([f"{strict['model'].iloc[0]}, {name}", *shown])
    text = (
        "The layout of the paper’s Table 3: the figures of slack, and below them the difference of "
        "strict from each."
    )
    header = [columns, *(f"{n:,}" for n in lengths)]
    return [Section(title, text=text, header=header, rows=rows, printed=False)]
