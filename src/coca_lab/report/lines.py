"""Cells as lines of a figure and rows of a table: one for every model and rotary scaling."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

from coca_attention.errors import UserError
from coca_lab.report.figures import MARKERS, draw, turns
from coca_lab.report.groups import differ
from coca_lab.report.section import Entry, Section

Cell = dict[str, Any]
Key = tuple[str, str, float | None]
"""Model, scaling, factor; ``attend-last`` has its window as the factor."""
Lines = dict[Key, dict[int, Cell]]
"""Cells by line, then by window or prompt length."""
SCALING_NAMES = {"linear": "PI", "ntk": "NTK", "dynamic": "dynamic NTK", "yarn": "YaRN"}
PAIR = ("slack", "strict")  # the two forms of the paper's Table 3
DASHES = {
    "none": "-",
    "ntk": "--",
    "dynamic": "--",
    "linear": "-.",
    "yarn": "-.",
    "attend-last": ":",
}


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
    return f"{model} + {SCALING_NAMES.get(kind, kind)} ({factor:g})"


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
    order = sorted(lines, key=lambda key: (models.index(key[0]), list(DASHES).index(key[1])))
    return {key: dict(sorted(lines[key].items())) for key in order}


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


def prompt_counts(lines: Lines) -> str:
    """``, 50 prompts each``: how many prompts the cells of all lines have."""
    counts = {len(cell["samples"]) for line in lines.values() for cell in line.values()}
    return f", {' to '.join(map(str, sorted({min(counts), max(counts)})))} prompts each"


def prompt_facts(cell: Cell) -> dict[Any, Any]:
    """What the figures of prompts depend on; the tokenizer shows in the distances."""
    named = ("key", "expected", "depth", "depths", "distance", "distances")
    facts = {n: cell[n] for n in ("seed", "depths", "count", "max_new_tokens") if n in cell}
    prompts = [[sample.get(name) for name in named] for sample in cell.get("samples", [])]
    return {**facts, (cell.get("kind"), cell.get("length")): prompts}


def share_figure(
    name: str, points: dict[Key, dict[int, tuple[float, Any]]], label: str
) -> dict[str, str]:
    """Shares against the prompt length, with interval bands for the lines without scaling.

    Args:
        name: Name of the figure, unique on the page.
        points: By line and prompt length, the share and its interval or None.
        label: Label of the vertical axis.
    """
    style = turns(model for model, _, _ in points)
    lengths = sorted({length for line in points.values() for length in line})

    def plot(axes: Axes) -> None:
        for key, line in points.items():
            x = list(line)
            colour, turn = style[key[0]]
            axes.plot(
                x,
                [line[length][0] for length in x],
                label=line_label(key),
                color=colour,
                ls=DASHES[key[1]],
                marker=MARKERS[turn % len(MARKERS)],
                ms=4,
                lw=1.8,
            )
            intervals = [line[length][1] for length in x]
            if key[1] == "none" and all(intervals):
                low, high = ([interval[end] for interval in intervals] for end in (0, 1))
                axes.fill_between(x, low, high, color=colour, alpha=0.08, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("prompt length in tokens")
        axes.set_ylabel(label)

    return draw(name, plot)


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
    models = {form: {c["model"] for c in cells if c["attention"] == form} for form in PAIR}
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
    return [
        Section(
            title,
            text="The layout of the paper’s Table 3: the figures of slack, and below them the "
            "difference of strict from each.",
            header=[
                "tokens read at once" if size == "window" else "prompt length in tokens",
                *(f"{n:,}" for n in sizes),
            ],
            rows=rows,
        )
    ]


def _difference(slack: float | None, strict: float | None) -> str:
    if slack is None or strict is None or not math.isfinite(strict - slack):
        return "–"
    return signed(strict - slack, ".2f")


def signed(value: float, digits: str) -> str:
    """A number with its sign, a minus sign for negative ones; format such as ``.2f`` or ``.1%``."""
    return f"{value:+{digits}}".replace("-", "−")


def enumeration(names: Sequence[str]) -> str:
    """Names as in a sentence: a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def times_trained(lines: Lines, size: int) -> str:
    """`` (4 × the training length)``, if all models share one."""
    lengths = {cell.get("training_length") for line in lines.values() for cell in line.values()}
    trained = lengths.pop() if len(lengths) == 1 else None
    if not trained:
        return ""
    return (
        " (the training length)"
        if size == trained
        else f" ({size / trained:g} × the training length)"
    )
