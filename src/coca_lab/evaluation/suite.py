"""A suite: models × rotary scalings × tasks from one YAML file; finished parts are not repeated."""

import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from coca_attention.errors import UserError, error_prefix
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.environment import (
    check_results,
    describe_environment,
    keep_other_results,
    write_json,
)
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.journal import Journal
from coca_lab.evaluation.pieces import (
    Claims,
    Piece,
    Progress,
    join,
    local_device,
    processes,
    rank,
    work,
)
from coca_lab.evaluation.task import Part, Session, Subject, identity_of, load_subject
from coca_lab.settings import CONTEXT_PARALLEL, TENSOR_PARALLEL, Scaling, check_scaling

JOINT_DEVICES = (TENSOR_PARALLEL, CONTEXT_PARALLEL)
"""Those of a model that all processes of a launch run together."""
RESULTS_FILE, JOURNAL_FILE, CLAIMS_FILE = "results.json", "journal.jsonl", ".claims"


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
    of one process, tensor-parallel over all processes of a launch; context-parallel has each of
    them read a part of every text (perplexity only)."""

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
        check_device(self.device, self.tasks)
        for name, settings in self.tasks.items():
            TASKS[name].check(settings)


def check_device(device: str | None, tasks: Iterable[str]) -> None:
    """Raise UserError if one of the named tasks cannot be done on a device."""
    others = [name for name in tasks if name != "perplexity"]
    if device == CONTEXT_PARALLEL and others:
        raise UserError(
            f"device {device} reads whole texts without a cache, for perplexity alone; got "
            f"{', '.join(others)}"
        )


def suite_parser() -> SettingsParser:
    """The parser of suite files and overrides; its help comes from the documented fields."""
    return settings_parser(Suite, "coca eval suite", "suite", task_sections())


def load_suite(path: str | Path, overrides: list[str] | None = None) -> Suite:
    """A checked suite from a YAML file and command-line overrides.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
    """
    options = overrides or []
    sections = task_sections()
    return read_settings(
        Suite, path, options, kind="suite", program="coca eval suite", sections=sections
    )


def task_sections() -> dict[str, tuple[type, str]]:
    """Settings and summary of every task: optional sections of suite and search files."""
    return {task.name: (task.settings, task.summary) for task in TASKS.values()}


def own_sections(theclass: type) -> list[str]:
    """Names of the fields of a dataclass other than ``tasks``."""
    return [item.name for item in fields(theclass) if item.name != "tasks"]


@dataclass(frozen=True)
class Job:
    """One task of one model with one rotary scaling."""

    scaling: str
    task: str
    subject: Subject
    parts: list[Part]


def run_suite(suite: Suite, output: str | Path, *, progress: Progress | None = None) -> Path:
    """Evaluate what the journal does not have yet and write all results.

    Any number of processes with the same output folder share the work. Those of a launch by
    torchrun or Accelerate return when nothing is left that nobody works on, except the first, which
    waits for the others and writes the results.

    Args:
        suite: What to evaluate.
        output: Folder for ``results.json`` and the journal of finished parts.
        progress: Called with a label, the tokens read so far, by all processes, and the tokens to
            read in all.

    Returns:
        The result file.

    Raises:
        UserError: If a model cannot be loaded, or a task cannot be done.
    """
    suite.check()
    output = Path(output)
    results = output / RESULTS_FILE
    check_results(results)
    if suite.device in JOINT_DEVICES:
        journal, claims = join(output / JOURNAL_FILE), None
        first = 0
    else:
        journal = Journal(output / JOURNAL_FILE)
        claims = Claims(output / CLAIMS_FILE, alone=processes() == 1)
        # Processes begin with models of their own, so that few have to load several.
        first = rank() % len(suite.models)
    with closing(claims) if claims else nullcontext():
        jobs = plan_suite(suite, journal, claims)
        names = [*suite.models][first:] + [*suite.models][:first]
        pieces = [piece for job in jobs for part in job.parts for piece in part.pieces]
        longest_first = sorted(pieces, key=lambda piece: -piece.cost)
        by_model = {name: [p for p in longest_first if p.model == name] for name in names}
        work(
            [piece for name in names for piece in by_model[name]],
            journal,
            progress or (lambda label, done, total: None),
            claims,
            wait=rank() == 0,
        )
        if rank() == 0:
            with claims.hold(RESULTS_FILE) if claims else nullcontext():
                _write(suite, jobs, results)
    return results


def plan_suite(suite: Suite, journal: Journal, claims: Claims | None = None) -> list[Job]:
    """The work of a suite; a model is loaded when its first piece is computed.

    Raises:
        UserError: As `check_models`.
    """
    subjects, weights = check_models(suite), _Weights(suite)
    jobs = []
    for name, subject in subjects.items():
        seen: set[str] = set()  # what does not depend on the scaling is planned once
        scalings = [s for s in suite.scalings if s.models is None or name in s.models]
        for number, scaling in enumerate(scalings):
            session = Session(scaling.kind, scaling.factor, journal, claims=claims)
            for task, settings in suite.tasks.items():
                if TASKS[task].scaled or number == 0:
                    parts = []
                    for part in TASKS[task].parts_of(subject, settings, session):
                        texts = {text for piece in part.pieces for text in piece.texts}
                        if not texts or not texts <= seen:
                            pieces = [weights.before(subject, piece) for piece in part.pieces]
                            parts.append(replace(part, pieces=pieces))
                        seen |= texts
                    jobs.append(Job(scaling.kind, task, subject, parts))
    return jobs


class _Weights:
    """Keeps the weights of one model at a time."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.subject: Subject | None = None
        self.without: Any = None

    def before(self, subject: Subject, piece: Piece) -> Piece:
        """A piece that loads its model before it is computed."""

        def compute(missing: list[int], advance: Callable[[int], Any]) -> list[Any]:
            self.load(subject)
            return piece.compute(missing, advance)

        return replace(piece, model=subject.name, compute=compute)

    def load(self, subject: Subject) -> None:
        if self.subject is subject:
            return
        if self.subject is not None:
            self.subject.model = self.without  # frees the weights before the next ones are loaded
        self.subject, self.without = subject, subject.model
        subject.model = load_subject(
            self.suite.models[subject.name],
            subject.name,
            dtype=self.suite.dtype,
            device=subject.device,
        ).model


def check_models(suite: Suite) -> dict[str, Subject]:
    """Find out, before hours of work, whether every model, scaling and task can be done.

    Returns:
        The models by name, without their weights. What the tasks have read for one
        (`Subject.cached`) is shared by models with the same tokenizer.

    Raises:
        UserError: If a model cannot be loaded or scaled, or a text or prompt does not fit.
    """
    from coca_lab.data import load_tokenizer
    from coca_lab.generation import rotary_scaling_for
    from coca_lab.loading import (
        check_vocabulary,
        model_without_weights,
        usable_device,
    )

    by_tokenizer: dict[str, dict[str, Any]] = {}
    found = {}
    for name, path in suite.models.items():
        with error_prefix(f"model {name}: "):
            tokenizer = load_tokenizer(path)
            backend: Any = getattr(tokenizer, "backend_tokenizer", None)
            rules = backend.to_str() if tokenizer.is_fast else path
            rules = f"{rules} {tokenizer.bos_token_id} {tokenizer.eos_token_id}"
            if suite.device not in (None, "auto", *JOINT_DEVICES):
                usable_device(str(suite.device))
            subject = Subject(
                model_without_weights(path, suite.dtype),
                tokenizer,
                name,
                identity_of(path, suite.dtype),
                local_device(suite.device),
                by_tokenizer.setdefault(rules, {}),
            )
            check_vocabulary(subject.model, tokenizer)
            for scaling in suite.scalings:
                if scaling.models is None or name in scaling.models:
                    with rotary_scaling_for(subject.model, scaling.kind, scaling.factor, 1):
                        pass
            for task, settings in suite.tasks.items():
                with error_prefix(f"{task}: "):
                    TASKS[task].prepare(subject, settings)
            found[name] = subject
    return found


def _write(suite: Suite, jobs: list[Job], results: Path) -> None:
    """Write the results of finished jobs."""
    cells = [
        cell
        for job in jobs
        for part in job.parts
        for cell in TASKS[job.task].complete_cells(job.subject, part.cells())
    ]
    settings = {name: vars(suite)[name] for name in own_sections(Suite)}
    settings["scalings"] = [asdict(scaling) for scaling in suite.scalings]
    settings |= {name: asdict(task) for name, task in suite.tasks.items()}
    keep_other_results(results, "suite", settings)
    write_json(
        results, {"results": cells, "suite": settings, "environment": describe_environment()}
    )


@dataclass(frozen=True)
class Estimate:
    """What a job takes.

    Attributes:
        job: The job.
        cells: Cells to compute; a task that is one piece counts as one.
        tokens: Tokens to read.
        left: Those whose results the journal does not have.
        seconds: Time for what is left, of one process; None if it cannot be measured.
    """

    job: Job
    cells: int
    tokens: int
    left: int
    seconds: float | None


def estimate_suite(suite: Suite, output: str | Path) -> list[Estimate]:
    """How long a suite will take, from a few measured batches; nothing is written.

    For every model and task, a batch of the shortest texts and one of the longest are timed. The
    time of attention per token is linear in the length, so what lies between is interpolated.

    Args:
        suite: What to evaluate.
        output: Folder of `run_suite`; what its journal has is not counted again.

    Raises:
        UserError: As `run_suite`.
    """
    suite.check()
    journal = Journal(Path(output) / JOURNAL_FILE)
    journal.path = None
    estimates, rates = [], {}
    for job in plan_suite(suite, journal):
        pieces = [piece for part in job.parts for piece in part.pieces]
        left = [piece for piece in pieces if piece.missing(journal)]
        rate = (job.subject.name, job.task)
        seconds = 0.0 if not left else None
        if left and TASKS[job.task].parts is not None:
            if rate not in rates:
                rates[rate] = _seconds_per_token(left)
            seconds = sum(piece.cost * rates[rate](piece.length) for piece in left)
        cells = sum(any(p.missing(journal) for p in part.pieces) for part in job.parts)
        tokens, missing = (sum(piece.cost for piece in each) for each in (pieces, left))
        estimates.append(Estimate(job, cells, tokens, missing, seconds))
    return estimates


def _seconds_per_token(pieces: list[Piece]) -> Callable[[int], float]:
    """Measured seconds per token as a function of the length that is read at once."""
    shortest, longest = (end(pieces, key=lambda piece: piece.length) for end in (min, max))
    _time_a_batch(shortest)  # the first pass loads the weights
    near, far = (_time_a_batch(piece) for piece in (shortest, longest))
    slope = max(0.0, far - near) / max(1, longest.length - shortest.length)
    return lambda length: near + slope * (length - shortest.length)


class _Enough(Exception):
    """A batch has been timed."""


def _time_a_batch(piece: Piece) -> float:
    """Seconds per token of a piece's first batch."""
    read = 0

    def stop(tokens: int) -> None:
        nonlocal read
        read = tokens
        raise _Enough

    started = time.perf_counter()
    with suppress(_Enough):
        piece.compute([0], stop)
    return (time.perf_counter() - started) / (read or piece.cost / len(piece.keys))
