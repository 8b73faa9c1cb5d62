"""Result files: what they hold besides cells, and reading them."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import Field, ValidationError

from coca_attention.errors import UserError
from coca_lab.cells import (
    AboveZero,
    CheckRecord,
    Content,
    Integer,
    Name,
    Natural,
    Number,
    Record,
    Whole,
)

IN_FOLDERS = ("training.json", "results.json")
"""Of a run; of a study. Read first, and an error if damaged."""
KINDS = {"results", "training", "curve"}
PAPER = "paper.yaml"
PAPER_LENGTHS = [512 * 2**n for n in range(7)]


class CurvePoint(Record):
    """A loss in training."""

    step: Natural
    loss: Number


class Start(Record):
    """What validation measured of the model that training started from."""

    name: Name
    perplexity: AboveZero


class Validation(Record):
    """A measurement in training."""

    step: Natural
    perplexity: AboveZero


class TrainingRun(Record):
    """The ``training.json`` of a run."""

    model: str = Field(validation_alias="name")
    file: str = ""
    parameters: Whole
    steps: Whole
    tokens: Whole
    seconds: AboveZero | None = None
    seed: Integer | None = None
    curve: list[CurvePoint]
    validation: list[Validation] = []
    start: Start | None = None
    recipe: Any = None


class Environment(Record):
    """The machine and the versions of a measurement."""

    command: str
    processor: str
    cores: Whole
    threads: Whole
    gpus: list[str]
    system: str
    versions: dict[str, str]


class StudyRecord(Record):
    """The study that results are from."""

    title: str = ""


class ResultFile(Record):
    """A result file as a whole; its cells are looked at by their tasks.

    ``check`` is of ``coca extend --check``; ``failures`` says of a study's models that have no
    results, why.
    """

    file: str = ""
    check: CheckRecord | None = None
    failures: dict[str, str] = {}
    results: list[Content] = []
    training: list[TrainingRun] = []
    environment: Environment | None = None
    study: StudyRecord | None = None


class HarnessFile(Record):
    """A result file of lm-evaluation-harness."""

    lm_eval_version: str
    model_name: str
    results: dict[str, Content]
    config: Content = {}


Kind = TypeVar("Kind", bound=Record)


def read_as(kind: type[Kind], content: object, file: str, *place: str | int) -> Kind:
    """A part of a file of its kind; a UserError names the field where it is not."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        said = problem["msg"]
        if problem["type"] != "missing":
            said += f", got {problem['input']!r}"[:200]
        field = ".".join(map(str, (*place, *problem["loc"])))
        raise UserError(f"{file or 'results'}: not a result file: {field}: {said}") from error


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
    """The file, or the result files of a folder; or what a check kept that wrote no folder."""
    kept_by_check = Path(f"{path}.results.json")
    if not path.exists() and kept_by_check.is_file():
        return [kept_by_check]
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
            "files; give what coca train, eval, study or extend --check has written"
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
        raise UserError(
            f"{path}: cannot be read: {error.strerror} (here: {Path.cwd()}); give a result file, "
            "or a folder with some"
        ) from error
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
