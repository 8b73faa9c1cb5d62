"""Reading result files, and which of their results may stand side by side."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError
from coca_lab.report.schema import HarnessFile, ResultFile, check_cells, check_part
from coca_lab.report.trials import read_trials, trial_files

IN_FOLDERS = ("training.json", "results.json")
"""Of a run; of a suite or a study. Read first, and an error if damaged."""
KINDS = {"results", "training", "curve"}
PLACE = ("scaling", "factor", "window", "length", "kind", "name")
"""Fields that tell a model's cells of one task apart."""

Cell = dict[str, Any]
Facts = dict[Any, Any]
"""What the figures of a cell depend on besides the model, such as its documents."""


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read result files.

    Args:
        paths: Result files; or folders: of a run, a suite or a study, or with result
            files in them. A file that is named twice is read once. Numbered files beside
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
        return {**read_trials(files), "file": str(folder)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: a file of its trials cannot be read: {error!r}") from error


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
        check_part(HarnessFile, content, path)
        content = {"results": _harness_cells(content)}
    if "curve" in content:
        # A copy of a run's training.json takes the run's name from the name of the file.
        name = path.resolve().parent.name if path.name == "training.json" else path.stem
        content = {**content, "training": [{"name": name, **content}]}
    check_part(ResultFile, content, path)
    check_cells(content.get("results", []), path)
    return {**content, "file": str(path)}


def _harness_cells(content: dict[str, Any]) -> list[Cell]:
    """The cells of a result file of lm-evaluation-harness, one a task."""
    about = {
        "task": "harness",
        "model": Path(content["model_name"]).name,
        "harness": content["lm_eval_version"],
        "limit": content.get("config", {}).get("limit"),
    }
    return [
        {**about, "name": name, "metrics": {n: v for n, v in metrics.items() if "," in n}}
        for name, metrics in content["results"].items()
    ]


@contextmanager
def naming_files(cells: Sequence[Cell]) -> Iterator[None]:
    """Turn a missing field of cells, or runs, into a UserError that names their files."""
    try:
        yield
    except KeyError as error:
        files = [cell.get("file") for cell in cells if error.args[0] not in cell]
        named = ", ".join(dict.fromkeys(file for file in files if file))
        raise UserError(
            f"{named or 'the results'}: a result lacks the field {error}; write the file again "
            "with this version of the command"
        ) from error


def all_cells(contents: Sequence[dict[str, Any]]) -> list[Cell]:
    """The cells of all result files, each with its file and the machine it was measured on."""
    return [
        {"machine": _machine(content), "file": content.get("file"), **cell}
        for content in contents
        for cell in content.get("results", [])
    ]


def _machine(content: dict[str, Any]) -> str | None:
    """What times depend on."""
    about = content.get("environment")
    if not about:
        return None
    processors = about.get("gpus") or [about.get("processor")]
    torch = about.get("versions", {}).get("torch")
    threads = about.get("threads")
    plural = "" if threads == 1 else "s"
    return f"{', '.join(map(str, processors))}, {threads} thread{plural}, PyTorch {torch}"


def grouped(cells: Iterable[Cell], key: Callable[[Cell], Any]) -> dict[Any, list[Cell]]:
    """Cells by a key, the keys in the order of their first cells."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def comparable(cells: Sequence[Cell], facts: Callable[[Cell], Facts]) -> list[list[Cell]]:
    """Cells of one task in groups that no fact tells apart; a cell's unknown facts are left out."""
    # The cells of one file and model stay together, unless they differ in a fact themselves.
    units = grouped(cells, lambda cell: (cell.get("file"), cell.get("model"))).values()
    parts = [part for unit in units for part in _merged([[cell] for cell in unit], facts)]
    order = {id(cell): number for number, cell in enumerate(cells)}
    return [sorted(group, key=lambda c: order[id(c)]) for group in _merged(parts, facts)]


def _merged(parts: Sequence[list[Cell]], facts: Callable[[Cell], Facts]) -> list[list[Cell]]:
    """Every part joins the first group that it does not contradict."""
    groups: list[tuple[Facts, list[Cell]]] = []
    for part in parts:
        said = {name: value for cell in part for name, value in facts(cell).items()}
        for known, group in groups:
            if all(known.get(name, value) == value for name, value in said.items()):
                known.update(said)
                group.extend(part)
                break
        else:
            groups.append((said, list(part)))
    return [group for _, group in groups]


def differ(one: Cell, other: Cell) -> bool:
    """Whether two cells, or runs, say different things about one; time does not count."""
    shared = one.keys() & other.keys() - {"seconds", "throughput", "file", "machine"}
    return any(one[name] != other[name] for name in shared)


def tell_apart(
    groups: Sequence[Sequence[Cell]], cells: Sequence[Cell], runs: Sequence[Cell]
) -> None:
    """Add its file to the name of every model, and run, that several files measure differently."""
    names = set().union(*map(_claimed_twice, groups))
    names |= {name for name, count in Counter(run["name"] for run in runs).items() if count > 1}
    named = [(cell, "model") for cell in cells] + [(run, "name") for run in runs]
    named = [(item, key) for item, key in named if item.get(key) in names and item["file"]]
    paths = {item["file"]: Path(item["file"]) for item, _ in named}
    # The folder of a results.json or training.json, else the file's stem, if these tell all apart.
    generic = ("results", "training")
    short = {f: p.parent.name if p.stem in generic else p.stem for f, p in paths.items()}
    unique = len(set(short.values())) == len(short)
    for item, key in named:
        name = short[item["file"]] if unique else ""
        item[key] = f"{item[key]} ({name or item['file']})"


def _claimed_twice(cells: Sequence[Cell]) -> set[str]:
    """Names of models that different files measure differently, from comparable cells."""
    first: dict[Any, Cell] = {}
    names = set()
    for cell in cells:
        if "model" not in cell:
            continue
        # A name also belongs to two models if these differ where their cells do not meet.
        about = {n: cell[n] for n in ("model", "attention", "training_length", "file") if n in cell}
        place = tuple(str(cell.get(name)) for name in PLACE)
        for where, content in ((place, cell), (None, about)):
            other = first.setdefault((cell["model"], where), content)
            if other.get("file") != content.get("file") and differ(other, content):
                names.add(cell["model"])
    return names


def without_copies(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs, each once where several files have it; of a model with several seeds the first."""
    unique: list[dict[str, Any]] = []
    for run in runs:
        others = [other for other in unique if other["name"] == run["name"]]
        seeds = [other for other in others if other["file"] == run["file"] and "seed" in run]
        if not seeds and all(differ(other, run) for other in others):
            unique.append(run)
    return unique
