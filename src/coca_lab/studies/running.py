"""Running a study: what is missing is trained and evaluated, and one page shows all."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from coca_attention.errors import UserError
from coca_lab.cluster import RayEngine
from coca_lab.engine import Engine, Job, Progress, Step, problem
from coca_lab.environment import available_cores, describe_environment
from coca_lab.evaluation.plan import Texts, measurements_of
from coca_lab.evaluation.task import Measurement, cells_of, free_weights
from coca_lab.files import check_results, keep_other_results, read_json, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.processes import ProcessEngine, listen
from coca_lab.report import REPORTS, write_report
from coca_lab.store import Store
from coca_lab.studies.study import LOGS, REPORT_FILE, RESULTS_FILE, STORE_FILE, TOKENIZERS, Study
from coca_lab.studies.trial import TRAINING, Trial, Value
from coca_lab.training.folder import TOKENIZER
from coca_lab.training.texts import load_run_tokenizer, tokenizer_key


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
    with Store(output / STORE_FILE) as store, nullcontext() if ready else _threads(study.num_cpus):
        engine = _engine(study, store, output, len(trials), ray, 0 if ready else workers)
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
        write_report([output / RESULTS_FILE], output / REPORT_FILE)
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
        opened = {trial.label: self._measurements(trial) for trial in there}
        listen(self._tell)
        try:
            self.engine.follow([self._job(each, opened.get(each.label)) for each in missing])
        finally:
            free_weights()
        self._write()
        self._tell()

    def _job(self, trial: Trial, measurements: list[Measurement] | None) -> Job:
        """Make the model, after those that it comes from, and measure it."""
        try:
            diverged = yield from self._make(trial)
            cells = []
            if not diverged:
                measurements = measurements or self._measurements(trial)
                every = [item for each in measurements for item in each.items]
                items = [replace(item, label=trial.label) for item in every]
                yield items, partial(self._measured, trial)
                cells = cells_of(measurements, self.store)
            self.store.put([trial.key], [trial.value(cells, diverged)])
        except Exception as error:
            self.failed[trial.label] = problem(error).removeprefix(f"{trial.label}: ")
        else:
            self._write()
            self._tell()

    def _make(self, trial: Trial) -> Generator[Step, None, str]:
        """Make its model and those that it comes from; how its training diverged."""
        diverged = ""
        for label in (*reversed(trial.bases), trial.label):
            each = self.trials[label]
            diverged = (self.store.get(each.key) or {}).get("diverged", "")
            if not (diverged or each.is_ready):
                yield [each.making], lambda *_: None
                (diverged,) = map(self.store.get, each.making.keys)
            if diverged and each is not trial:
                raise UserError(f"{label} diverged")
        return diverged

    def _measurements(self, trial: Trial) -> list[Measurement]:
        return measurements_of(trial.plan, {trial.name: str(trial.model)}, texts=self.texts)[0]

    def _measured(self, trial: Trial, line: str, done: int, total: int) -> None:
        share, before = done / max(total, 1), 0 if trial.is_ready else TRAINING
        self._tell(trial.label, f"evaluated {100 * share:.0f} %", before + (1 - before) * share)

    def _tell(self, label: str = "", text: str = "", share: float = 0.0) -> None:
        """Show the whole, and what a trial has just done."""
        self.shares[label] = share
        finished = {label for label, trial in self.trials.items() if trial.key in self.store}
        costs = {label: trial.cost for label, trial in self.trials.items()}
        done = sum(
            cost * (1 if each in finished else self.shares.get(each, 0))
            for each, cost in costs.items()
        )
        line = f"{len(finished):,} of {len(self.trials):,} models finished"
        line += f", {label}: {text}" if text else ""
        self.progress(line, int(100 * done / sum(costs.values())), 100)

    def _write(self) -> None:
        """Write ``results.json`` with what is finished."""
        trials, store = self.trials.values(), self.store
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


def _engine(
    study: Study, store: Store, output: Path, trials: int, ray: str | None, workers: int | None
) -> Engine:
    if ray is not None:
        return RayEngine(store, address=ray, num_cpus=study.num_cpus, num_gpus=study.num_gpus)
    if workers is not None and workers < 0:
        raise UserError(f"workers must be 0 or more, got {workers}")
    if workers == 0:
        return Engine(store)
    if workers is None:
        workers = 1 if torch.accelerator.is_available() else available_cores() // study.num_cpus
    workers = max(1, min(workers, trials))
    return ProcessEngine(store, processes=workers, threads=study.num_cpus, logs=output / LOGS)
