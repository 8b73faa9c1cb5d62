"""Running a study: what is missing is trained and evaluated, and one page shows all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from coca_attention.errors import UserError
from coca_lab.engine import Engine, Progress, RayEngine, Store, problem
from coca_lab.environment import available_cores, describe_environment
from coca_lab.evaluation.plan import measure
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.processes import ProcessEngine, listen
from coca_lab.report import REPORTS, write_report
from coca_lab.studies.study import REPORT_FILE, RESULTS_FILE, STORE_FILE, TOKENIZERS, Study
from coca_lab.studies.trial import Trial
from coca_lab.training.folder import TOKENIZER, tokenizer_key
from coca_lab.training.texts import load_run_tokenizer


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
    for this machine; otherwise ``workers`` processes run a trial at a time, 0 for this one alone.
    Without ``workers``, models that are all evaluated as they are share the work in smaller items.
    """
    study.check()
    output = Path(output)
    results = output / RESULTS_FILE
    check_results(results)
    trials, failed = study.trials(output), dict[str, str]()
    with Store(output / STORE_FILE) as store:
        if not workers and all(trial.is_ready for trial in trials):
            _measure_all(study, trials, _engine(study, store, 0, ray, 0), progress)
            _write(study, trials, store, failed, results)
        else:
            if study.endpoint:
                raise UserError("an endpoint answers for models with path: no training, no workers")
            with _threads(study.num_cpus):
                engine = _engine(study, store, len(trials), ray, workers)
                best = None
                while (found := study.best_rates(trials, store)) != best:
                    best, trials = found, study.trials(output, found)
                    trials, failed = _run_trials(study, trials, engine, results, progress)
    shown = REPORTS.keys() & study.tasks or any(trial.recipe for trial in trials)
    if shown and len(failed) < len(trials):
        write_report([results], output / REPORT_FILE)
    for label, error in failed.items():
        count = f"{len(failed):,} of {len(trials):,} trials failed, first {label}"
        raise UserError(f"{count}: {error}. The same command runs them again")
    return results


def _measure_all(study: Study, trials: Sequence[Trial], engine: Engine, progress: Progress) -> None:
    """Keep the values of models that are evaluated as they are, under the keys of their trials."""
    missing = [trial for trial in trials if trial.key not in engine.store]
    if missing:
        engine.progress = progress
        plan = replace(study, tasks=study.tasks_on_text)
        cells, _ = measure(plan, {trial.name: str(trial.model) for trial in missing}, engine)
        for trial in missing:
            own = [cell for cell in cells if cell["model"] == trial.name]
            engine.store.put([trial.key], [trial.value(own)])


def _run_trials(
    study: Study, trials: Sequence[Trial], engine: Engine, results: Path, progress: Progress
) -> tuple[list[Trial], dict[str, str]]:
    """Compute what the engine's store lacks; the trials, and why some failed, by their labels."""
    trials = _with_tokenizer(trials, results.parent)
    for trial in trials:
        trial.check_folder()
    shown, failed = _Shown(trials, engine.store, progress), dict[str, str]()
    listen(shown.tell)

    def save(*_: Any) -> None:
        _write(study, trials, engine.store, failed, results)
        shown.tell()

    engine.progress = save
    for ready in _rounds(trials):
        lost = [trial for trial in ready if trial.after and trial.after.label in failed]
        failed |= {trial.label: f"{trial.bases[0]} failed" for trial in lost}
        items = [trial.item for trial in ready if trial.label not in failed]
        failed |= {item.label: problem(error) for item, error in engine.compute(items)}
    save()
    return trials, failed


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
    study: Study, store: Store, trials: int, ray: str | None, workers: int | None
) -> Engine:
    if ray is not None:
        return RayEngine(store, address=ray, num_cpus=study.num_cpus, num_gpus=study.num_gpus)
    if workers is not None and workers < 0:
        raise UserError(f"workers must be 0 or more, got {workers}")
    if workers == 0:
        return Engine(store)
    if workers is None:
        workers = 1 if torch.accelerator.is_available() else available_cores() // study.num_cpus
    return ProcessEngine(store, processes=max(1, min(workers, trials)), threads=study.num_cpus)


def _with_tokenizer(trials: Sequence[Trial], output: Path) -> list[Trial]:
    """The trials, with one tokenizer for all models that would train the same one."""
    # Perplexities compare only what is split into the same tokens.
    chosen = []
    for trial in trials:
        if trial.recipe and not (trial.recipe.data.tokenizer or trial.recipe.model.start):
            folder = output / TOKENIZERS / tokenizer_key(trial.recipe)[:16]
            load_run_tokenizer(trial.recipe, folder)
            trial = trial.with_tokenizer(folder / TOKENIZER)
        chosen.append(trial)
    return chosen


def _rounds(trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    """The trials that start from none of the others, then those that start from these, …"""
    for depth in range(1 + max(len(trial.bases) for trial in trials)):
        yield [trial for trial in trials if len(trial.bases) == depth]


def _write(
    study: Study, trials: Sequence[Trial], store: Store, failed: dict[str, str], path: Path
) -> None:
    values = [(trial, store.get(trial.key)) for trial in trials if trial.key in store]
    diverged = {trial.label: value["diverged"] for trial, value in values if "diverged" in value}
    content = {
        **_figures([(trial, value) for trial, value in values if not trial.tunes]),
        "tuning": _figures([(trial, value) for trial, value in values if trial.tunes]),
        "failures": failed | diverged,
        "study": asdict(study),
        "measured": [fingerprint(trial.key) for trial in trials if trial.key in store],
        "environment": {**describe_environment(), "threads": study.num_cpus},
    }
    keep_other_results(path, [fingerprint(trial.key) for trial in trials])
    write_json(path, content)


def _figures(values: Sequence[tuple[Trial, dict[str, Any]]]) -> dict[str, Any]:
    """The cells and the trainings of trials; one that diverged has no cells."""
    return {
        "results": [cell for _, value in values for cell in value["cells"]],
        "training": [
            {**value["training"], "name": trial.of_size, "seed": trial.seed}
            for trial, value in values
            if value["training"]
        ],
    }


class _Shown:
    """How far a study is, from what is finished and what running trials tell."""

    def __init__(self, trials: Sequence[Trial], store: Store, progress: Progress) -> None:
        self.trials, self.store, self.progress = trials, store, progress
        self.shares: dict[str, float] = {}

    def tell(self, label: str = "", text: str = "", share: float = 0.0) -> None:
        """Show the whole, and what a trial has just done."""
        self.shares[label] = share
        finished = {trial.label for trial in self.trials if trial.key in self.store}
        done = sum(
            trial.cost * (1 if trial.label in finished else self.shares.get(trial.label, 0))
            for trial in self.trials
        )
        line = f"{len(finished):,} of {len(self.trials):,} models finished"
        line += f", {label}: {text}" if text else ""
        self.progress(line, int(100 * done / sum(trial.cost for trial in self.trials)), 100)
