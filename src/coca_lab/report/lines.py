"""Cells as lines of a chart and rows of a table: one for every model and rotary scaling."""

import math
from collections.abc import Callable, Iterable, Sequence

from coca_attention.errors import UserError
from coca_lab.report.charts import Ends, Line
from coca_lab.report.results import Cell, differ
from coca_lab.report.section import Entry, Section, signed

Key = tuple[str, str, float | None]
"""Model, scaling, factor; ``attend-last`` has its window as the factor."""
Lines = dict[Key, dict[int, Cell]]
"""Cells by line, then by window or prompt length."""
SCALING_NAMES = {"linear": "PI", "ntk": "NTK", "dynamic": "dynamic NTK", "yarn": "YaRN"}
PAIR = ("slack", "strict")  # the two forms of the paper's Table 3
DASHES = {"none": (), "ntk": (6, 3), "dynamic": (6, 3), "linear": (9, 3, 2, 3)}
DASHES |= {"yarn": (9, 3, 2, 3), "attend-last": (2, 3)}


def line_key(cell: Cell) -> Key:
    """The line that a cell belongs to."""
    last = cell["scaling"] == "attend-last"
    return cell["model"], cell["scaling"], cell["window"] if last else cell.get("factor")


def line_label(key: Key) -> str:
    """The name of a line."""
    model, kind, factor = key
    if kind == "none":
        return model
    if kind == "attend-last":
        return f"{model}, last {factor} tokens only"
    return f"{model} + {SCALING_NAMES.get(kind, kind)}" + (f" ({factor:g})" if factor else "")


def by_line(cells: Iterable[Cell], size: str = "length") -> Lines:
    """Cells by line and size; models in the order of their first appearance.

    Args:
        cells: Cells of one task.
        size: Field with the size in tokens.

    Raises:
        UserError: If two different cells have the same line and size.
    """
    lines: Lines = {}
    for cell in cells:
        key = line_key(cell)
        other = lines.setdefault(key, {}).setdefault(cell[size], cell)
        # Two evaluations of a model can share a cell, such as that of attend-last.
        if differ(cell, other):
            where = " and ".join(dict.fromkeys(c["file"] for c in (other, cell) if c.get("file")))
            raise UserError(
                f"{where or 'the results'}: {cell['model']} ({cell['scaling']}) at {cell[size]} "
                "tokens twice with different figures; give one of them, or evaluate with --name"
            )
    models = list(dict.fromkeys(model for model, _, _ in lines))
    kinds = dict.fromkeys((*DASHES, *(kind for _, kind, _ in lines)))
    kinds["attend-last"] = kinds.pop("attend-last")
    order = sorted(lines, key=lambda key: (models.index(key[0]), list(kinds).index(key[1])))
    return {key: dict(sorted(lines[key].items())) for key in order}


def curves(
    lines: Lines,
    value: Callable[[Cell], float | None],
    interval: Callable[[Cell], Ends | None] = lambda cell: None,
) -> list[Line]:
    """A line of a chart for every line of cells."""
    return [
        Line(
            line_label(key),
            list(line),
            [value(cell) for cell in line.values()],
            [interval(cell) for cell in line.values()],
            colour=key[0],
            dash=DASHES.get(key[1], (6, 3)),
            main=key[1] == "none",
        )
        for key, line in lines.items()
    ]


def length_table(
    lines: Lines, entry: Callable[[Cell], str | Entry]
) -> tuple[list[str], list[list[str | Entry]]]:
    """Columns and rows: one row per line with its label, one column per prompt length."""
    lengths = sorted({length for line in lines.values() for length in line})
    rows: list[list[str | Entry]] = []
    for key, line in lines.items():
        entries = [entry(line[length]) if length in line else "–" for length in lengths]
        rows.append([line_label(key), *entries])
    return [f"{length:,}" for length in lengths], rows


def training_length(lines: Lines) -> int | None:
    """The training length, if all models share one."""
    lengths = {cell.get("training_length") for line in lines.values() for cell in line.values()}
    return lengths.pop() if len(lengths) == 1 else None


def times_trained(lines: Lines, size: int) -> str:
    """`` (4 × the training length)``, if all models share one."""
    trained = training_length(lines)
    if not trained:
        return ""
    factor = "" if size == trained else f"{size / trained:g} × "
    return f" ({factor}the training length)"


def strict_minus_slack(cells: Sequence[Cell], value: str, size: str, title: str) -> list[Section]:
    """Strict against slack under the same scaling: the layout of the paper's Table 3.

    Args:
        cells: Cells of one task.
        value: Field to compare.
        size: Field with the size in tokens, one column each.
        title: Heading of the section.

    Returns:
        One section, or none unless exactly one model of each form was evaluated alike.
    """
    cells = [cell for cell in cells if cell["scaling"] != "attend-last"]
    models = {form: {c["model"] for c in cells if c.get("attention") == form} for form in PAIR}
    if any(len(names) != 1 for names in models.values()):
        return []
    slack, strict = (models[form].pop() for form in PAIR)
    found = {(*line_key(c), c[size]): c[value] for c in cells}
    sizes = sorted({n for *_, n in found})
    rows = []
    for kind, factor in dict.fromkeys((k, f) for model, k, f, _ in found if model == slack):
        pairs = [tuple(found.get((m, kind, factor, n)) for m in (slack, strict)) for n in sizes]
        if all(None in pair for pair in pairs):
            continue
        name = "no scaling" if kind == "none" else f"{kind}-{factor:g}"
        rows.append([f"{slack}, {name}", *("–" if a is None else f"{a:.2f}" for a, _ in pairs)])
        rows.append([f"{strict}, {name}", *(_difference(a, b) for a, b in pairs)])
    if not rows:
        return []
    columns = "tokens read at once" if size == "window" else "prompt length in tokens"
    text = (
        "The layout of the paper’s Table 3: the figures of slack, and below them the difference of "
        "strict from each."
    )
    header = [columns, *(f"{n:,}" for n in sizes)]
    return [Section(title, text=text, header=header, rows=rows)]


def _difference(slack: float | None, strict: float | None) -> str:
    if slack is None or strict is None or not math.isfinite(strict - slack):
        return "–"
    return signed(strict - slack, ".2f")
