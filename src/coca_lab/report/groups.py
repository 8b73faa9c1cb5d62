"""Which results may be compared: those on the same text, prompts and questions."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from coca_lab.cells import CheckedCell, Facts, Figure, Record
from coca_lab.report.result_files import IN_FOLDERS, TrainingRun

PLACE = (
    "task", "scaling", "factor", "window", "length", "kind", "pairs", "name",
    "training_seed", "size",
)  # fmt: skip
"""Fields that tell a model's cells apart."""
Cells = list[CheckedCell]


def comparable(cells: Sequence[CheckedCell]) -> list[Cells]:
    """Cells of one task in groups that no fact tells apart; a cell's unknown facts are left out.

    The models of a study, of several seeds or sizes, are compared with one another alone.
    """
    trials: defaultdict[str, set[tuple[int | None, str]]] = defaultdict(set)
    for cell in cells:
        if isinstance(cell, Figure):
            trials[cell.file].add((cell.training_seed, cell.size))
    # The cells of one file and model stay together, unless they differ in a fact themselves.
    units: defaultdict[tuple[str, str], list[tuple[Cells, Facts]]] = defaultdict(list)
    for cell in cells:
        is_of_study = len(trials[cell.file]) > 1
        facts = {"study": cell.file} if is_of_study else {"study": "", **cell.facts}
        units[cell.file, cell.model].append(([cell], facts))
    parts = chain.from_iterable(map(_merged, units.values()))
    return [group for group, _ in _merged(parts)]


def _merged(parts: Iterable[tuple[Cells, Facts]]) -> list[tuple[Cells, Facts]]:
    """Cells and their facts: every part joins the first group that it does not contradict."""
    groups: list[tuple[Cells, Facts]] = []
    for cells, facts in parts:
        for group, known in groups:
            if all(known.get(name, value) == value for name, value in facts.items()):
                group.extend(cells)
                known.update(facts)
                break
        else:
            groups.append((cells, facts))
    return groups


def tell_apart(groups: Sequence[Cells], runs: Sequence[TrainingRun]) -> None:
    """Add its file to the name of every model, and run, that several files measure differently."""
    names = set().union(*map(_claimed_twice, groups))
    names |= {name for name, count in Counter(run.model for run in runs).items() if count > 1}
    items = [x for x in (*chain(*groups), *runs) if x.model in names and x.file]
    # The folder of a results.json or training.json, else the file's stem, if these tell all apart.
    paths = {item.file: Path(item.file) for item in items}
    short = {f: p.parent.name if p.name in IN_FOLDERS else p.stem for f, p in paths.items()}
    unique = len(set(short.values())) == len(short)
    for item in items:
        item.model += f" ({(unique and short[item.file]) or item.file})"


def _claimed_twice(cells: Cells) -> set[str]:
    """Names of models that different files measure differently, from comparable cells."""
    first: dict[Hashable, CheckedCell] = {}
    names = set()
    for cell in cells:
        place = tuple(getattr(cell, name, None) for name in PLACE)
        same = first.setdefault((cell.model, place), cell)
        if same.file != cell.file and unlike(same, cell):
            names.add(cell.model)
        # A name also belongs to two models if these differ where their cells do not meet.
        other = first.setdefault(cell.model, cell)
        one, two = ((each.attention, each.training_length) for each in (other, cell))
        if other.file != cell.file and one != two:
            names.add(cell.model)
    return names - {""}


def without_copies(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    """Runs, each once where several files have it; of a model with several seeds the first."""
    unique: list[TrainingRun] = []
    for run in runs:
        others = [other for other in unique if other.model == run.model]
        seeds = [other for other in others if other.file == run.file and run.seed is not None]
        if not seeds and all(unlike(other, run) for other in others):
            unique.append(run)
    return unique


def unlike(one: Record, other: Record) -> bool:
    """Whether two cells, or runs, say different things about one; time does not count."""
    timed = {"seconds", "file", "machine", "throughput"}
    first, second = (part.model_dump(exclude=timed) for part in (one, other))
    return any(first[name] != second[name] for name in first.keys() & second.keys())
