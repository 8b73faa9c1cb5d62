"""A suite: models × rotary scalings × tasks from one YAML file; finished items are not repeated."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from coca_attention.errors import UserError, error_prefix
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.engine import Engine, Item, Progress, Store, start_engine
from coca_lab.environment import describe_environment
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.task import (
    Cell,
    Part,
    Session,
    Subject,
    Task,
    free_weights,
    open_subject,
)
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.generation import rotary_scaling_for
from coca_lab.loading import usable_device
from coca_lab.settings import Scaling, check_scaling

RESULTS_FILE, STORE_FILE = "results.json", "values.sqlite"


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
    """cpu, cuda, …; by default the accelerator if there is one. auto spreads a model over all GPUs
    of its process, and what does not fit over the CPU's memory."""
    num_cpus: int = 1
    """With --ray: cores of a process."""
    num_gpus: float | None = None
    """With --ray: GPUs of a process; by default one if there are GPUs. A model that needs several
    has device auto."""

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
        unscaled = [
            name
            for name in self.models
            if all(s.models is not None and name not in s.models for s in self.scalings)
        ]
        if unscaled:
            raise UserError(
                f"no scaling applies to {', '.join(unscaled)}: add {{kind: none}} to the scalings"
            )
        for name, settings in self.tasks.items():
            TASKS[name].check(settings)


def task_sections() -> dict[str, tuple[type, str]]:
    """The sections of tasks in YAML files: their settings, and a line of help."""
    return {task.name: (task.settings, task.summary) for task in TASKS.values()}


def suite_parser() -> SettingsParser:
    """The parser of suite files and overrides; its help comes from the documented fields."""
    return settings_parser(Suite, "coca eval suite", "suite", task_sections())


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """A checked suite from a YAML file and command-line overrides.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
    """
    options: Any = {"kind": "suite", "program": "coca eval suite", "sections": task_sections()}
    return read_settings(Suite, path, overrides, **options)


def own_sections(theclass: type) -> list[str]:
    """Names of the fields of a dataclass other than ``tasks``."""
    return [item.name for item in fields(theclass) if item.name != "tasks"]


@dataclass(frozen=True)
class Job:
    """One task of one model with one rotary scaling."""

    task: Task
    subject: Subject
    parts: list[Part]

    @property
    def items(self) -> list[Item]:
        """The items of all parts."""
        return [item for part in self.parts for item in part.items]


def run_suite(
    suite: Suite, output: str | Path, *, progress: Progress | None = None, ray: str | None = None
) -> Path:
    """Evaluate what the output folder does not have yet and write all results.

    Args:
        suite: What to evaluate.
        output: Folder for ``results.json`` and the values of finished items.
        progress: As for `Engine`.
        ray: Compute on Ray: the address of a cluster, or empty for this machine.

    Returns:
        The result file.

    Raises:
        UserError: If a model cannot be loaded, or a task cannot be done.
    """
    suite.check()
    results = Path(output) / RESULTS_FILE
    check_results(results)
    with Store(Path(output) / STORE_FILE) as store:
        resources = {"num_cpus": suite.num_cpus, "num_gpus": suite.num_gpus}
        engine = start_engine(store, progress, ray, **resources)
        cells = evaluate(
            suite, [(TASKS[name], settings) for name, settings in suite.tasks.items()], engine
        )
    settings = {name: vars(suite)[name] for name in own_sections(Suite)}
    del settings["num_cpus"], settings["num_gpus"]  # nothing depends on them
    settings["scalings"] = [asdict(scaling) for scaling in suite.scalings]
    settings |= {name: asdict(task) for name, task in suite.tasks.items()}
    keep_other_results(results, "suite", settings)
    environment = describe_environment()
    write_json(results, {"results": cells, "suite": settings, "environment": environment})
    return results


def evaluate(suite: Suite, tasks: Sequence[tuple[Task, Any]], engine: Engine) -> list[Cell]:
    """The cells of tasks for the models and scalings of a suite.

    Args:
        suite: Its own tasks are not looked at.
        tasks: Tasks with their settings.
        engine: Computes what its store does not have.

    Raises:
        UserError: As `run_suite`.
    """
    jobs = plan(suite, tasks, engine)
    try:
        engine.run([item for job in jobs for item in job.items])
    finally:
        free_weights()
    return [
        cell
        for job in jobs
        for part in job.parts
        for cell in job.task.complete_cells(job.subject, part.finished(engine))
    ]


def plan(suite: Suite, tasks: Sequence[tuple[Task, Any]], engine: Engine) -> list[Job]:
    """The work of a suite. No weights are loaded.

    Raises:
        UserError: As `run_suite`.
    """
    jobs = []
    for subject in open_models(suite).values():
        seen: set[int] = set()  # what does not depend on the scaling is planned once
        for number, scaling in enumerate(_scalings(suite, subject.name)):
            session = Session(scaling.kind, scaling.factor, engine)
            for task, settings in tasks:
                if not task.scaled and number > 0:
                    continue
                parts = []
                with error_prefix(f"model {subject.name}: {task.name}: "):
                    planned = task.parts_of(subject, settings, session)
                for part in planned:
                    keys = {hash(repr(key)) for item in part.items for key in item.keys}
                    if not keys or not keys <= seen:
                        parts.append(part)
                    seen |= keys
                jobs.append(Job(task, subject, parts))
    return jobs


def open_models(suite: Suite) -> dict[str, Subject]:
    """The models by name, without weights, found to be there and to bear their scalings.

    What the tasks read for one (`Subject.cached`) is shared by models with the same tokenizer.

    Raises:
        UserError: If a model cannot be loaded or scaled.
    """
    if suite.device not in (None, "auto"):
        usable_device(str(suite.device))
    by_tokenizer: dict[str, dict[str, Any]] = {}
    subjects = {}
    for name, path in suite.models.items():
        with error_prefix(f"model {name}: "):
            subject = open_subject(path, name, suite.dtype, suite.device)
            tokenizer: Any = subject.tokenizer
            rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else path
            rules = f"{rules} {tokenizer.bos_token_id} {tokenizer.eos_token_id}"
            subject._cache = by_tokenizer.setdefault(rules, {})
            for scaling in _scalings(suite, name):
                with rotary_scaling_for(subject.model, scaling.kind, scaling.factor, 1):
                    pass
            subjects[name] = subject
    return subjects


def _scalings(suite: Suite, model: str) -> list[ScalingSettings]:
    """The scalings that apply to a model."""
    return [s for s in suite.scalings if s.models is None or model in s.models]
