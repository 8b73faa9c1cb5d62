"""A suite: models × rotary scalings × tasks from one YAML file; finished parts are not repeated."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from coca_attention.environment import (
    check_writable,
    describe_environment,
    hold,
    keep_other_results,
    write_json,
)
from coca_attention.errors import UserError, error_prefix
from coca_attention.evaluation import TASKS
from coca_attention.evaluation.journal import Journal
from coca_attention.evaluation.task import Cell, Progress, Session, Subject, load_subject
from coca_attention.options import OptionParser, check_sections, from_file
from coca_attention.settings import Scaling, check_scaling

RESULTS_FILE, JOURNAL_FILE, LOCK_FILE = "results.json", "journal.jsonl", ".lock"


@dataclass
class ScalingSettings:
    """A rotary scaling that the models are evaluated with."""

    kind: Scaling = "none"
    """none is the model as it was saved; ntk computes the base from each window or prompt."""
    factor: float = 4.0
    """Factor of the scaling."""
    models: list[str] | None = None
    """Names of the models to apply it to; by default all."""


@dataclass
class Suite:
    """What to evaluate; a suite file also has one section per task, named after it."""

    models: dict[str, str] = field(default_factory=dict)
    """Names for the results, and the folder (or hub name) of each."""
    scalings: list[ScalingSettings] = field(default_factory=lambda: [ScalingSettings()])
    """Rotary scalings."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Settings of every task to run, by its name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator if there is one."""

    def check(self) -> None:
        """Raise UserError where settings contradict each other or are out of range."""
        if not self.models:
            raise UserError("a suite needs models: a name and a folder each")
        for name, path in self.models.items():
            if not isinstance(name, str) or not isinstance(path, str):
                raise UserError(
                    f"models: a name and a folder each, as text; got {name!r}: {path!r} (put "
                    "numbers in quotes)"
                )
        if not self.scalings:
            raise UserError("a suite needs scalings; kind: none is the model as it was saved")
        if not self.tasks:
            raise UserError(f"a suite needs a task: one or more of {', '.join(TASKS)}")
        for scaling in self.scalings:
            check_scaling(scaling.kind, scaling.factor)
            unknown = sorted(set(scaling.models or []) - set(self.models))
            if unknown:
                raise UserError(
                    f"scaling {scaling.kind} names models that the suite does not have: "
                    f"{', '.join(unknown)}"
                )
        for name, settings in self.tasks.items():
            TASKS[name].check(settings)


def suite_parser() -> OptionParser:
    """The parser of suite files and overrides; its help comes from the documented fields."""
    return task_parser(Suite, "suite", "coca eval suite")


def load_suite(path: str | Path, overrides: list[str] | None = None) -> Suite:
    """A checked suite from a YAML file and command-line overrides.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
    """
    return load_with_tasks(Suite, "suite", "suites", suite_parser(), path, overrides)


def task_parser(theclass: type, kind: str, program: str) -> OptionParser:
    """The parser of YAML files with the fields of a dataclass and one section per task.

    Args:
        theclass: A documented dataclass with a field ``tasks``, the settings by task.
        kind: What such a file is called.
        program: The command, for messages and help.
    """
    parser = OptionParser(program)
    parser.add_argument(f"--{kind}", action="config", help="YAML file; also the first argument.")
    parser.add_class_arguments(theclass, skip={"tasks"})
    for task in TASKS.values():
        parser.add_section(task.name, task.settings, task.summary)
    return parser


def load_with_tasks(
    theclass: type,
    kind: str,
    folder: str,
    parser: OptionParser,
    path: str | Path,
    overrides: list[str] | None,
) -> Any:
    """A checked instance of the dataclass of a `task_parser`, from a YAML file and overrides.

    Args:
        theclass: As for `task_parser`; ``check`` raises UserError for invalid settings.
        kind: As for `task_parser`.
        folder: Where the project keeps its own files of this kind.
        parser: From `task_parser`.
        path: YAML file.
        overrides: Command-line words.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such {kind}; the project's own are in the folder {folder}/")
    own = own_sections(theclass)
    check_sections(Path(path), kind, [*own, *TASKS])

    def make(words: list[str]) -> Any:
        read = parser.read(words)
        tasks = {name: read[name] for name in TASKS if read[name] is not None}
        loaded = theclass(**{name: read[name] for name in own}, tasks=tasks)
        loaded.check()
        return loaded

    return from_file(path, [f"--{kind}={path}"], overrides or [], make)


def own_sections(theclass: type) -> list[str]:
    """Names of the fields of a dataclass other than ``tasks``."""
    return [item.name for item in fields(theclass) if item.name != "tasks"]


def run_suite(suite: Suite, output: str | Path, *, progress: Progress | None = None) -> Path:
    """Evaluate what the journal does not have yet and write all results.

    Args:
        suite: What to evaluate.
        output: Folder for ``results.json`` and the journal of finished parts.
        progress: Called with a label, the tokens read so far and the tokens to read in all.

    Returns:
        The result file.

    Raises:
        UserError: If a model cannot be loaded, or a task cannot be done.
    """
    suite.check()
    output = Path(output)
    results = output / RESULTS_FILE
    check_writable(results)
    with hold(output / LOCK_FILE):
        return _run(suite, results, Journal(output / JOURNAL_FILE), progress)


def check_models(suite: Suite) -> dict[str, dict[str, Any]]:
    """Find out, before hours of work, whether every model, scaling and task can be done.

    Returns:
        By model, what the tasks have read for it (`Subject.cached`): the same object for models
        with the same tokenizer.

    Raises:
        UserError: If a model cannot be loaded or scaled, or a text or prompt does not fit.
    """
    from coca_attention.data import load_tokenizer
    from coca_attention.evaluation.generation import rotary_scaling_for
    from coca_attention.models.loading import check_vocabulary, model_without_weights

    by_tokenizer: dict[str, dict[str, Any]] = {}
    found = {}
    for name, path in suite.models.items():
        with error_prefix(f"model {name}: "):
            tokenizer = load_tokenizer(path)
            backend: Any = getattr(tokenizer, "backend_tokenizer", None)
            rules = backend.to_str() if tokenizer.is_fast else path
            found[name] = by_tokenizer.setdefault(rules, {})
            subject = Subject(model_without_weights(path), tokenizer, name, _cache=found[name])
            check_vocabulary(subject.model, tokenizer)
            for scaling in suite.scalings:
                if scaling.models is None or name in scaling.models:
                    with rotary_scaling_for(subject.model, scaling.kind, scaling.factor, 1):
                        pass
            for task, settings in suite.tasks.items():
                with error_prefix(f"{task}: "):
                    TASKS[task].prepare(subject, settings)
    return found


def _run(suite: Suite, results: Path, journal: Journal, progress: Progress | None) -> Path:
    prepared = check_models(suite)
    jobs = []
    for name in suite.models:
        scalings = [s for s in suite.scalings if s.models is None or name in s.models]
        for number, scaling in enumerate(scalings):
            jobs += [(name, scaling, t) for t in suite.tasks if TASKS[t].scaled or number == 0]
    costs = [[max(1, c) for c in TASKS[task].cost(suite.tasks[task])] for _, _, task in jobs]
    before = [0, *accumulate(map(sum, costs))]
    cells: list[Cell] = []
    subject: Subject | None = None
    for number, (name, scaling, task) in enumerate(jobs):
        if subject is None or subject.name != name:
            subject = None  # frees the previous model before the next one is loaded
            path = suite.models[name]
            subject = load_subject(path, name, dtype=suite.dtype, device=suite.device)
            subject._cache = prepared[name]
        session = Session(scaling.kind, scaling.factor, journal)
        if progress is not None:
            session.progress = _within(progress, costs[number], before[number], before[-1])
        cells += TASKS[task].run(subject, suite.tasks[task], session)
        if progress is not None:
            progress(f"{name} {scaling.kind} {task}", before[number + 1], before[-1])
    settings = {name: vars(suite)[name] for name in own_sections(Suite)}
    settings["scalings"] = [asdict(scaling) for scaling in suite.scalings]
    settings |= {name: asdict(task) for name, task in suite.tasks.items()}
    keep_other_results(results, "suite", settings)
    write_json(
        results, {"results": cells, "suite": settings, "environment": describe_environment()}
    )
    return results


def _within(progress: Progress, costs: list[int], before: int, whole: int) -> Callable[..., None]:
    """Maps the progress of one task, with its costs per cell, to that of the suite in tokens."""
    labels: list[str] = []

    def advance(label: str, done: int, total: int) -> None:
        # Every cell reports when it is finished, so the order of the labels is that of the cells.
        if label not in labels:
            labels.append(label)
        cell = min(len(labels), len(costs)) - 1
        progress(label, before + sum(costs[:cell]) + costs[cell] * done // max(total, 1), whole)

    return advance
