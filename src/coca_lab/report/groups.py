"""Which results may stand side by side, and what tells models of one name apart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
Facts = dict[Any, Any]
"""What the figures of a cell depend on besides the model, such as its documents."""
PLACE = ("scaling", "factor", "window", "length", "kind", "name", "sinks", "piece")
"""Fields that tell a model's cells of one task apart."""


def comparable(cells: Sequence[Cell], facts: Callable[[Cell], Facts]) -> list[list[Cell]]:
    """Cells in groups that no fact tells apart.

    The cells of one file and model stay together, unless they differ in a fact themselves.

    Args:
        cells: Cells of one task.
        facts: The facts of a cell; those that it does not know are left out.
    """
    units: dict[tuple[Any, Any], list[Cell]] = {}
    for cell in cells:
        units.setdefault((cell.get("file"), cell.get("model")), []).append(cell)
    parts = [part for unit in units.values() for part in _merged([[c] for c in unit], facts)]
    groups = _merged(parts, facts)
    order = {id(cell): number for number, cell in enumerate(cells)}
    return [sorted(group, key=lambda cell: order[id(cell)]) for group in groups]


def _merged(parts: Sequence[list[Cell]], facts: Callable[[Cell], Facts]) -> list[list[Cell]]:
    """Every part joins the first group that it does not contradict."""
    groups: list[tuple[Facts, list[Cell]]] = []
    for part in parts:
        own = {name: value for cell in part for name, value in facts(cell).items()}
        for known, group in groups:
            if all(known[name] == own[name] for name in known.keys() & own.keys()):
                known.update(own)
                group.extend(part)
                break
        else:
            groups.append((own, list(part)))
    return [group for _, group in groups]


def claimed_twice(cells: Sequence[Cell]) -> set[str]:
    """Names of models that different files measure differently, from comparable cells."""
    found: dict[Any, Cell] = {}
    names = set()
    for cell in cells:
        if "model" not in cell:
            continue
        # A name also belongs to two models if these differ where their cells do not meet.
        about = {n: cell.get(n) for n in ("model", "attention", "training_length", "file")}
        for place, content in (
            (tuple(str(cell.get(name)) for name in PLACE), cell),
            (None, about),
        ):
            other = found.setdefault((cell["model"], place), content)
            if other.get("file") != content.get("file") and differ(other, content):
                names.add(cell["model"])
    return names


def differ(one: Cell, other: Cell) -> bool:
    """Whether two cells, or runs, say different things about one; time does not count."""
    shared = one.keys() & other.keys() - {"seconds", "throughput", "file", "machine"}
    return any(one[name] != other[name] for name in shared)


def short_names(files: Sequence[str]) -> dict[str, str]:
    """The folder of a ``results.json`` or ``training.json``, else the file's stem, if unique."""
    paths = {file: Path(file) for file in dict.fromkeys(files)}
    generic = ("results", "training")
    short = {f: p.parent.name if p.stem in generic else p.stem for f, p in paths.items()}
    unique = len(set(short.values())) == len(short)
    return {f: name if unique and name else f for f, name in short.items()}


def without_copies(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs, each once where several files have it."""
    kept: list[dict[str, Any]] = []
    for run in runs:
        if all(other["name"] != run["name"] or differ(other, run) for other in kept):
            kept.append(run)
    return kept
