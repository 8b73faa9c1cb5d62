"""Running a study: its trials on an engine, then one page."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from coca_attention.errors import UserError
from coca_lab.engine import Engine, Progress, RayEngine, Store, problem
from coca_lab.environment import available_cores, describe_environment
from coca_lab.evaluation.suite import RESULTS_FILE, STORE_FILE
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.processes import ProcessEngine, listen
from coca_lab.report import write_report
from coca_lab.studies import Study
from coca_lab.studies.trial import Trial
from coca_lab.training import Recipe
from coca_lab.training.data import load_run_tokenizer

REPORT_FILE = "report.html"


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
    """
    study.check()
    output = Path(output)
    results = output / RESULTS_FILE
    check_results(results)
    trials = _with_tokenizer(study.trials(output), output)
    for trial in trials:
        trial.check_folder()
    with Store(output / STORE_FILE) as store:
        engine = _engine(study, store, len(trials), ray, workers)
        shown, failed = _Shown(trials, store, progress), dict[str, str]()
        listen(shown.tell)

        def save(*_: Any) -> None:
            _write(study, [trial for trial in trials if trial.key in store], store, failed, results)
            shown.tell()

        engine.progress = save
        for ready in _rounds(trials):
            items = [trial.item for trial in ready if trial.after not in failed]
            failed |= {item.label: problem(error) for item, error in engine.compute(items)}
            failed |= {each.label: f"{each.after} failed" for each in ready if each.after in failed}
        save()
    if len(failed) < len(trials):
        write_report([results], output / REPORT_FILE, title=study.title or None)
    for label, error in failed.items():
        count = f"{len(failed):,} of {len(trials):,} trials failed, first {label}"
        raise UserError(f"{count}: {error}. The same command runs them again")
    return results


def _engine(
    study: Study, store: Store, trials: int, ray: str | None, workers: int | None
) -> Engine:
    if ray is not None:
        resources: Any = {"num_cpus": study.num_cpus, "num_gpus": study.num_gpus}
        return RayEngine(store, address=ray, **resources)
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
    alike: dict[str, list[tuple[str, Recipe]]] = {}
    for trial in trials:
        if trial.recipe and not (trial.recipe.data.tokenizer or trial.recipe.model.start):
            data = trial.recipe.data
            texts = {name: (each.source, each.text_field) for name, each in data.sources.items()}
            about = (data.held_out, data.vocab_size, data.split_digits, bool(data.passkey_share))
            alike.setdefault(repr((texts, about)), []).append((trial.label, trial.recipe))
    folders = {}
    for number, group in enumerate(alike.values()):
        folder = output / "tokenizers" / str(number) if number else output
        load_run_tokenizer(group[0][1], folder)
        folders |= dict.fromkeys((label for label, _ in group), folder / "tokenizer")
    return [t.with_tokenizer(folders[t.label]) if t.label in folders else t for t in trials]


def _rounds(trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    """The trials that start from none of the others, then those that start from these, …"""
    left, done = list(trials), {""}
    while left:
        ready = [trial for trial in left if trial.after in done]
        if not ready:
            raise UserError(f"models start from each other: {left[0].label}, {left[0].after}")
        yield ready
        done |= {trial.label for trial in ready}
        left = [trial for trial in left if trial.label not in done]


def _write(
    study: Study, finished: Sequence[Trial], store: Store, failed: dict[str, str], path: Path
) -> None:
    values = [(trial, store.get(trial.key)) for trial in finished]
    content = {
        "results": [cell for _, value in values for cell in value["cells"]],
        "training": [
            {**value["training"], "name": trial.of_size, "seed": trial.seed}
            for trial, value in values
            if value["training"]
        ],
        "failures": failed,
        "study": asdict(study),
        "environment": {**describe_environment(), "threads": study.num_cpus},
    }
    keep_other_results(path, "study", content["study"])
    write_json(path, content)


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
