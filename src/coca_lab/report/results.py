"""Reading result files, and which of their results may stand side by side."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from coca_attention.errors import UserError
from coca_lab.report.cells import Cell, Figure, Part, ResultFile, Run, checked, unlike
from coca_lab.report.trials import read_trials, trial_files

IN_FOLDERS = ("training.json", "results.json")
"""Of a run; of a study. Read first, and an error if damaged."""
KINDS = {"results", "training", "curve"}
PLACE = ("task", "scaling", "factor", "length", "kind", "name", "training_seed", "size")
"""Fields that tell a model's cells apart."""
Item = TypeVar("Item")


class HarnessFile(Part):
    """A result file of lm-evaluation-harness."""

    lm_eval_version: str
    model_name: str
    results: dict[str, dict[str, Any]]
    config: dict[str, Any] = {}


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read result files.

    Args:
        paths: Result files; or folders: of a run or a study, or with result
            files or trials in them. A file that is named twice is read once. Numbered files beside
            ``results.json`` and ``training.json``, of earlier measurements, are left out.

    Returns:
        The contents, each with the path of its file as ``file``.

    Raises:
        UserError: If a file is missing, is not JSON, or has no results.
    """
    paths = [Path(path) for path in paths]
    trials = {path: [] if any(path.glob("*.json")) else trial_files(path) for path in paths}
    files = {f.resolve(): f for path in paths if not trials[path] for f in _files(path)}
    studies = [(path, of) for path, of in trials.items() if of]
    return [_read(file) for file in files.values()] + [_read_study(*each) for each in studies]


def _read_study(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """The trials of a folder."""
    try:
        return {**read_trials(files), "study": {"title": _heading(folder)}, "file": str(folder)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: a file of its trials cannot be read: {error!r}") from error


def _heading(folder: Path) -> str:
    """What the folder's README is called."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    return text.partition("\n")[0].lstrip("# ")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [path / name for name in IN_FOLDERS if (path / name).is_file()]
    # Not those that were kept beside them: of a shorter run, or of another measurement.
    names = "|".join(file.stem for file in files)
    for file in sorted(path.glob("*.json")):
        if not re.fullmatch(rf"({names})(-\d+)?", file.stem) and _is_result_file(file):
            files.append(file)
    if not files:
        raise UserError(
            f"{path}: this folder has neither results.json nor training.json nor other result "
            "files; give what coca train, eval, analyze or study has written"
        )
    return files


def _is_result_file(file: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_bytes())
        return isinstance(content, dict) and bool(KINDS & set(content))
    return False


def _refuse(number: str) -> None:
    raise ValueError(f"it has {number} in place of a number")


def _read(path: Path) -> dict[str, Any]:
    try:
        # Bytes, which may begin with a byte order mark.
        content = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a result file, no valid JSON ({error})") from error
    if not isinstance(content, dict) or not KINDS & set(content):
        raise UserError(
            f"{path}: not a result file: expected an object with results (from coca eval) or "
            "a curve (training.json of a run)"
        )
    if "lm_eval_version" in content:
        content = {"results": _harness_cells(checked(HarnessFile, content, str(path)))}
    if "curve" in content:
        # A copy of a run's training.json takes the run's name from the name of the file.
        name = path.resolve().parent.name if path.name == "training.json" else path.stem
        content = {**content, "training": [{"name": name, **content}]}
    return {**content, "file": str(path)}


def _harness_cells(content: HarnessFile) -> list[dict[str, Any]]:
    """The cells of a result file of lm-evaluation-harness, one a task."""
    about = {
        "task": "harness",
        "model": Path(content.model_name).name,
        "harness": content.lm_eval_version,
        "limit": content.config.get("limit"),
    }
    return [
        {**about, "name": name, "metrics": {n: v for n, v in metrics.items() if "," in n}}
        for name, metrics in content.results.items()
    ]


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items by a key, the keys in the order of their first items."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def comparable(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one task in groups that no fact tells apart; a cell's unknown facts are left out.

    The models of a study, of several seeds or sizes, are compared with one another alone.
    """
    trials = grouped(cells, lambda cell: cell.file)
    seeds = {
        file
        for file, of in trials.items()
        if len({(c.training_seed, c.size) for c in of if isinstance(c, Figure)}) > 1
    }

    def facts(cell: Cell) -> dict[Any, Any]:
        return {"study": cell.file} if cell.file in seeds else {"study": "", **cell.facts}

    # The cells of one file and model stay together, unless they differ in a fact themselves.
    units = grouped(cells, lambda cell: (cell.file, cell.model)).values()
    known = {id(cell): facts(cell) for cell in cells}
    parts = [part for unit in units for part in _merged([[cell] for cell in unit], known)]
    order = {id(cell): number for number, cell in enumerate(cells)}
    return [sorted(group, key=lambda c: order[id(c)]) for group in _merged(parts, known)]


def _merged(parts: Sequence[list[Cell]], facts: dict[int, dict[Any, Any]]) -> list[list[Cell]]:
    """Every part joins the first group that it does not contradict."""
    groups: list[tuple[dict[Any, Any], list[Cell]]] = []
    for part in parts:
        said = {name: value for cell in part for name, value in facts[id(cell)].items()}
        for known, group in groups:
            if all(known.get(name, value) == value for name, value in said.items()):
                known.update(said)
                group.extend(part)
                break
        else:
            groups.append((said, list(part)))
    return [group for _, group in groups]


def tell_apart(groups: Sequence[Sequence[Cell]], runs: Sequence[Run]) -> None:
    """Add its file to the name of every model, and run, that several files measure differently."""
    names = set().union(*map(_claimed_twice, groups))
    names |= {name for name, count in Counter(run.name for run in runs).items() if count > 1}
    named = [(cell, "model") for group in groups for cell in group] + [(r, "name") for r in runs]
    named = [(item, key) for item, key in named if getattr(item, key) in names and item.file]
    paths = {item.file: Path(item.file) for item, _ in named}
    # The folder of a results.json or training.json, else the file's stem, if these tell all apart.
    generic = ("results", "training")
    short = {f: p.parent.name if p.stem in generic else p.stem for f, p in paths.items()}
    unique = len(set(short.values())) == len(short)
    for item, key in named:
        name = short[item.file] if unique else ""
        setattr(item, key, f"{getattr(item, key)} ({name or item.file})")


def _claimed_twice(cells: Sequence[Cell]) -> set[str]:
    """Names of models that different files measure differently, from comparable cells."""
    first: dict[Any, Cell] = {}
    names = set()
    for cell in cells:
        other = first.setdefault((cell.model, *(getattr(cell, n, None) for n in PLACE)), cell)
        # A name also belongs to two models if these differ where their cells do not meet.
        any_other = first.setdefault(cell.model, cell)
        one, two = ((each.attention, each.training_length) for each in (any_other, cell))
        if other.file != cell.file and unlike(other, cell):
            names.add(cell.model)
        if any_other.file != cell.file and one != two:
            names.add(cell.model)
    return names - {""}


def without_copies(runs: Sequence[Run]) -> list[Run]:
    """Runs, each once where several files have it; of a model with several seeds the first."""
    unique: list[Run] = []
    for run in runs:
        others = [other for other in unique if other.name == run.name]
        seeds = [other for other in others if other.file == run.file and run.seed is not None]
        if not seeds and all(unlike(other, run) for other in others):
            unique.append(run)
    return unique


def parsed(contents: Sequence[dict[str, Any]]) -> list[ResultFile]:
    """The contents of result files, checked but for their cells; runs with their files."""
    files = [checked(ResultFile, content, str(content.get("file", ""))) for content in contents]
    for file in files:
        for run in file.training:
            run.file = file.file
    return files
