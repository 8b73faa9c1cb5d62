"""Reading result files, and which of their results may stand side by side."""

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml

from coca_attention.errors import UserError
from coca_lab.report.cells import (
    CheckedCell,
    Content,
    Facts,
    Figure,
    Record,
    ResultFile,
    TrainingRun,
    read_as,
)

IN_FOLDERS = ("training.json", "results.json")
"""Of a run; of a study. Read first, and an error if damaged."""
KINDS = {"results", "training", "curve"}
PLACE = ("task", "scaling", "factor", "length", "kind", "name", "training_seed", "size")
"""Fields that tell a model's cells apart."""
PAPER = "paper.yaml"
PAPER_LENGTHS = [512 * 2**n for n in range(7)]
Cells = list[CheckedCell]
T = TypeVar("T")


class HarnessFile(Record):
    """A result file of lm-evaluation-harness."""

    lm_eval_version: str
    model_name: str
    results: dict[str, Content]
    config: Content = {}


def read_results(paths: Sequence[str | Path]) -> list[Content]:
    """Read result files.

    Args:
        paths: Result files; or folders: of a run or a study, or with result files in them. A file
            that is named twice is read once. Numbered files beside ``results.json`` and
            ``training.json``, of earlier measurements, are left out.

    Returns:
        The contents, each with the path of its file as ``file``.

    Raises:
        UserError: If a file is missing, is not JSON, or has no results.
    """
    found = {file.resolve(): file for path in paths for file in _files(Path(path))}
    return [_read(file) for file in found.values()]


def _files(path: Path) -> list[Path]:
    """The file, or the result files of a folder."""
    if not path.is_dir():
        return [path]
    found = [path / name for name in IN_FOLDERS if (path / name).is_file()]
    # Not those that were kept beside them: of a shorter run, or of another measurement.
    kept = re.compile(rf"({'|'.join(file.stem for file in found)})(-\d+)?")
    others = [file for file in sorted(path.glob("*.json")) if not kept.fullmatch(file.stem)]
    found += filter(_is_result_file, others)
    if not found:
        raise UserError(
            f"{path}: this folder has neither results.json nor training.json nor other result "
            "files; give what coca train, eval or study has written"
        )
    return found


def _is_result_file(file: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_bytes())
        return isinstance(content, dict) and bool(KINDS & set(content))
    return False


def _read(path: Path) -> Content:
    """The content of a result file, a run's and the harness's in the shape of a study's."""
    no_numbers = list[str]()

    def named(constant: str) -> str:
        no_numbers.append(constant)
        return constant

    try:
        # Bytes, which may begin with a byte order mark.
        content = json.loads(path.read_bytes(), parse_constant=named)
        if no_numbers and "lm_eval_version" not in content:  # whose metrics may be undefined
            raise ValueError(f"it has {no_numbers[0]} in place of a number")
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
        content = {"results": _harness_cells(read_as(HarnessFile, content, str(path)))}
    if "curve" in content:
        # A copy of a run's training.json takes the run's name from the name of the file.
        name = path.resolve().parent.name if path.name == "training.json" else path.stem
        content = {**content, "training": [{"name": name, **content}]}
    return {**content, "file": str(path)}


def _harness_cells(content: HarnessFile) -> list[Content]:
    """The cells of a result file of lm-evaluation-harness, one a task.

    Metrics have names such as ``exact_match,strict-match``, with the filter of the answers.
    """
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


def paper_figures() -> list[Content]:
    """The paper's figures as the contents of result files, one for each of its tables."""
    text = files("coca_lab.report").joinpath(PAPER).read_text(encoding="utf-8")
    contents = []
    for table in yaml.safe_load(text):
        passkeys = table["about"]["task"] == "passkey"
        length, figure = ("length", "accuracy") if passkeys else ("window", "perplexity")
        cells = [
            {**table["about"], "model": f"Paper’s {model}", length: n, figure: value}
            for model, values in table["rows"].items()
            for n, value in zip(PAPER_LENGTHS, values, strict=True)
            if value != "OOM"
        ]
        contents.append({"file": table["title"], "results": cells})
    return contents


def parsed(contents: Sequence[Content]) -> list[ResultFile]:
    """The contents of result files, checked but for their cells; runs with their files."""
    found = [read_as(ResultFile, content, str(content.get("file", ""))) for content in contents]
    for file in found:
        for run in file.training:
            run.file = file.file
    return found


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Items by a key, the keys in the order of their first items."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def comparable(cells: Sequence[CheckedCell]) -> list[Cells]:
    """Cells of one task in groups that no fact tells apart; a cell's unknown facts are left out.

    The models of a study, of several seeds or sizes, are compared with one another alone.
    """
    figures = grouped((cell for cell in cells if isinstance(cell, Figure)), lambda cell: cell.file)
    studies = {
        file
        for file, trials in figures.items()
        if len({(cell.training_seed, cell.size) for cell in trials}) > 1
    }

    def alone(cell: CheckedCell) -> tuple[Cells, Facts]:
        facts = {"study": cell.file} if cell.file in studies else {"study": "", **cell.facts}
        return [cell], facts

    # The cells of one file and model stay together, unless they differ in a fact themselves.
    units = grouped(cells, lambda cell: (cell.file, cell.model)).values()
    parts = chain.from_iterable(_merged(map(alone, unit)) for unit in units)
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
