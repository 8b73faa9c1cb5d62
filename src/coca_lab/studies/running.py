"""Running a study: what is missing is trained and evaluated, and one page shows all."""

import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from coca_attention.errors import UserError
from coca_lab.cluster import OnRay
from coca_lab.engine import Engine, ItemExecutor, Job, Progress, problem
from coca_lab.environment import available_cores, describe_environment
from coca_lab.evaluation.plan import Texts, measurements_of
from coca_lab.evaluation.task import Cell, Measurement, cells_of, free_weights, in_turn
from coca_lab.files import check_results, keep_other_results, read_json, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.processes import Workers
from coca_lab.report import REPORTS, read_results, write_report
from coca_lab.store import Store
from coca_lab.studies.study import REPORT_FILE, RESULTS_FILE, STORE_FILE, TOKENIZERS, Study
from coca_lab.studies.trial import LOGS, TRAINING, Trial, Value
from coca_lab.training.folder import TOKENIZER
from coca_lab.training.texts import load_run_tokenizer, tokenizer_key
from coca_lab.training.trainer import Interrupted

log = logging.getLogger(__name__)


def run_study(
    study: Study,
    output: str | Path,
    *,
    progress: Progress = lambda line, done, total: None,
    ray: str | None = None,
    workers: int | None = None,
) -> Path:
    """Train and evaluate what has not been finished before, draw the page, return the results.

    ``results.json`` is written whenever a trial ends. A trial that fails ends alone, and nothing is
    recorded of it, so the next start continues it. ``ray`` is the address of a cluster, or empty
    for this machine; otherwise ``workers`` processes share the work, 0 for this one alone, which is
    the default where nothing is trained or converted.
    """
    study.check()
    output = Path(output)
    check_results(output / RESULTS_FILE)
    trials = study.trials(output)
    ready = all(trial.is_ready for trial in trials) and not workers
    if study.endpoint and not ready:
        raise UserError("an endpoint answers for models with path: no training, no workers")
    workers = 0 if ready else workers
    with (
        Store(output / STORE_FILE) as store,
        nullcontext() if ready else _threads(study.num_cpus),
        _executor(study, output, len(trials), ray, workers) as executor,
        _interrupted_by_sigterm(),
    ):
        engine = Engine(store, executor=executor)
        while True:
            best = study.best_rates(trials, store)
            trials = study.trials(output, best)
            by_label = {trial.label: _with_tokenizer(trial, output) for trial in trials}
            run = _Run(study, by_label, engine, output, progress)
            run.compute()
            if study.best_rates(trials, store) == best:  # no further learning rate is chosen now
                break
        if study.endpoint and not run.failed:  # it may serve other models next time
            store.forget([*engine.used, *(trial.key for trial in trials)])
    found = read_json(output / RESULTS_FILE)
    if found["training"] or (found["results"] and REPORTS.keys() & study.tasks):
        write_report(read_results([output / RESULTS_FILE]), output / REPORT_FILE)
    else:  # a page that is there is of the results before
        (output / REPORT_FILE).unlink(missing_ok=True)
    for label, error in run.failed.items():
        count = f"{len(run.failed):,} of {len(trials):,} trials failed, first {label}"
        raise UserError(f"{count}: {error}. The same command runs them again")
    return output / RESULTS_FILE


@dataclass
class _Run:
    """The trials of a study, and how far they are."""

    study: Study
    trials: dict[str, Trial]  # by their labels, as what follows
    engine: Engine
    output: Path
    progress: Progress
    failed: dict[str, str] = field(default_factory=dict)  # why
    shares: dict[str, float] = field(default_factory=dict)  # of those that are not finished
    texts: Texts = field(default_factory=dict)
    needed: list[Trial] = field(default_factory=list)  # those without results, after their starts
    opened: dict[str, list[Measurement]] = field(default_factory=dict)  # of models that are there

    @property
    def store(self) -> Store:
        """What is known."""
        return self.engine.store

    def compute(self) -> None:
        """Compute what the store lacks."""
        for trial in self.trials.values():
            trial.check_folder()
        self.store.forget(key for each in self.trials.values() for key in each.making.keys)
        missing = [trial for trial in self.trials.values() if trial.key not in self.store]
        # What is wrong with a model that is there is said before anything is computed.
        there = [trial for trial in missing if trial.is_ready and not trial.bases]
        self.opened = {trial.label: self._measurements(trial) for trial in there}
        needed = [label for each in missing for label in (*reversed(each.bases), each.label)]
        self.needed = [self.trials[label] for label in dict.fromkeys(needed)]
        try:
            first = [self._making(each) for each in self.needed if not each.after]
            self.engine.follow(first, self._look)
        finally:
            free_weights()
        self._write()
        self._tell()

    def _making(self, trial: Trial) -> Job:
        """Make a model, unless it is there or has diverged."""
        there = trial.is_ready or self._diverged(trial)
        return Job([] if there else [trial.making], partial(self._made, trial))

    def _diverged(self, trial: Trial) -> str:
        """How its training diverged, in this run or one before."""
        (made,) = map(self.store.get, trial.making.keys)
        return made or (self.store.get(trial.key) or {}).get("diverged", "")

    def _made(self, trial: Trial, error: UserError | None) -> list[Job]:
        """Measure a model, and make those that start from it."""
        following = [each for each in self.needed if each.after and each.after.label == trial.label]
        jobs = list[Job]()
        diverged = self._diverged(trial)
        if trial.key not in self.store:
            with self._failing(trial):
                if error is not None:
                    raise error
                if diverged:
                    self._finish(trial, [], diverged)
                else:
                    jobs.append(self._evaluation(trial))
        if error is None and diverged:
            error = UserError(f"{trial.label} diverged")
        if error is None:
            return jobs + [self._making(each) for each in following]
        return jobs + [job for each in following for job in self._made(each, error)]

    def _evaluation(self, trial: Trial) -> Job:
        """Measure a model."""
        measurements = self.opened.get(trial.label) or self._measurements(trial)
        items = [replace(item, label=trial.label) for item in in_turn(measurements)]

        def then(error: UserError | None) -> list[Job]:
            with self._failing(trial):
                if error is not None:
                    raise error
                self._finish(trial, cells_of(measurements, self.store))
            if trial.tunes:  # where choose does not fit the cells, nothing more is trained
                self.study.best_rates([trial], self.store)
            return []

        def measured(line: str, done: int, total: int) -> None:
            share = done / max(total, 1)
            before = 0 if trial.is_ready else TRAINING
            self._tell(trial.label, f"evaluated {share:.0%}", before + (1 - before) * share)

        return Job(items, then, measured)

    def _finish(self, trial: Trial, cells: list[Cell], diverged: str = "") -> None:
        """Keep and show the results of a trial."""
        self.store.put([trial.key], [trial.value(cells, diverged)])
        if diverged:
            log.warning("%s diverged: %s", trial.label, diverged)
        self._write()
        self._tell()

    @contextmanager
    def _failing(self, trial: Trial) -> Iterator[None]:
        """An error in the block is that of one trial, and the others continue."""
        try:
            yield
        except Exception as error:
            why = problem(error).removeprefix(f"{trial.label}: ")
            self.failed[trial.label] = why
            log.warning("%s failed: %s", trial.label, why)

    def _measurements(self, trial: Trial) -> list[Measurement]:
        return measurements_of(trial.plan, {trial.name: str(trial.model)}, texts=self.texts)[0]

    def _look(self) -> None:
        """Show how far trainings are."""
        for trial in self.needed:
            with suppress(OSError, ValueError):  # it is not trained now, or just writes it
                step, steps = json.loads(trial.steps.read_text(encoding="utf-8"))
                text = f"step {step:,} of {steps:,}"
                self._tell(trial.label, text, TRAINING * step / steps)

    def _tell(self, label: str = "", text: str = "", share: float = 0.0) -> None:
        """Show the whole, and what a trial has just done."""
        self.shares[label] = share
        finished = {label for label, trial in self.trials.items() if trial.key in self.store}
        costs = {label: trial.cost for label, trial in self.trials.items()}
        done = sum(
            cost * (1 if each in finished else self.shares.get(each, 0))
            for each, cost in costs.items()
        )
        percent = int(100 * done / sum(costs.values()))
        line = f"{percent}% of the work, {len(finished):,} of {len(self.trials):,} models finished"
        line += f", {label}: {text}" if text else ""
        self.progress(line, percent, 100)

    def _write(self) -> None:
        """Write ``results.json`` with what is finished."""
        trials = self.trials.values()
        store = self.store
        values = [(trial, store.get(trial.key)) for trial in trials if trial.key in store]
        diverged = {
            trial.label: value["diverged"] for trial, value in values if "diverged" in value
        }
        content = {
            **_figures([(trial, value) for trial, value in values if not trial.tunes]),
            "tuning": _figures([(trial, value) for trial, value in values if trial.tunes]),
            "failures": self.failed | diverged,
            "study": asdict(self.study),
            "measured": [fingerprint(trial.key) for trial, _ in values],
            "environment": {**describe_environment(), "threads": self.study.num_cpus},
        }
        keep_other_results(self.output / RESULTS_FILE, [fingerprint(t.key) for t in trials])
        write_json(self.output / RESULTS_FILE, content)


def _with_tokenizer(trial: Trial, output: Path) -> Trial:
    """The trial, with one tokenizer for all models that would train the same one."""
    # Perplexities compare only what is split into the same tokens.
    if not trial.recipe or trial.recipe.data.tokenizer or trial.recipe.model.start:
        return trial
    folder = output / TOKENIZERS / tokenizer_key(trial.recipe)[:16]
    load_run_tokenizer(trial.recipe, folder)
    return trial.with_tokenizer(folder / TOKENIZER)


def _figures(values: Sequence[tuple[Trial, Value]]) -> dict[str, list[Value]]:
    """The cells and the trainings of trials; one that diverged has no cells."""
    return {
        "results": [cell for _, value in values for cell in value["cells"]],
        "training": [
            {**value["training"], "name": trial.of_size, "seed": trial.seed}
            for trial, value in values
            if value["training"]
        ],
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Trials of this process use as many threads as those of others."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that processes save what they train."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted("", number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _executor(
    study: Study, output: Path, trials: int, ray: str | None, workers: int | None
) -> ItemExecutor:
    if ray is not None:
        return OnRay(ray, num_cpus=study.num_cpus, num_gpus=study.num_gpus)
    if workers is not None and workers < 0:
        raise UserError(f"workers must be 0 or more, got {workers}")
    if workers == 0:
        return ItemExecutor()
    if workers is None:
        workers = 1 if torch.accelerator.is_available() else available_cores() // study.num_cpus
        workers = max(1, min(workers, trials))
    return Workers(workers, threads=study.num_cpus, logs=output / LOGS)
