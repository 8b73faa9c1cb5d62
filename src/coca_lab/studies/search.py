"""Trials of one recipe, compared by successive halving (arXiv 1502.07943), each in own processes.

A rung trains all remaining trials for its number of steps, evaluates them alike, and passes on the
best. A learning-rate schedule depends on the number of steps, so every rung trains from the start.
"""

import asyncio
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import IO, Any

import yaml

from coca_attention.errors import RESUMABLE, UserError, error_prefix
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.environment import (
    available_cores,
    check_results,
    describe_environment,
    file_locks,
    keep_other_results,
    write_json,
    write_text,
)
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.suite import RESULTS_FILE, task_sections
from coca_lab.evaluation.task import Cell, Progress
from coca_lab.training import load_recipe

# By task: the field with a cell's size, the figure to rank by, and whether more of it is better.
RANKED = {
    "perplexity": ("window", "perplexity", False),
    "passkey": ("length", "accuracy", True),
    "needles": ("length", "recall", True),
}
BY_RUNG = ("training.steps", "training.seed")


@dataclass
class Rung:
    """A round of the search."""

    steps: int
    """Training steps of every trial."""
    keep: float | None = None
    """Trials that the next rung gets: below 1 a share, rounded up; from 1 a number. By default
    half of them. The last rung has none."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the training; figures are means over them."""

    def remaining(self, trials: int) -> int:
        """How many of a number of trials the next rung gets."""
        keep = 0.5 if self.keep is None else self.keep
        return min(trials, math.ceil(trials * keep) if keep < 1 else int(keep))


@dataclass
class Search:
    """What to try; a search file also has one section per evaluation task, named after it."""

    recipe: str = ""
    """The recipe (YAML) that all trials change."""
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Trials by name, each with the options of the recipe that it sets, such as
    {RoFormer: {model.attention: rope}}."""
    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Options of the recipe and values of each; all combinations are further trials."""
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sizes by name, each with options of the recipe, such as {0.2M: {model.hidden_size: 64}},
    and, where they should differ, the seeds of its last rung ({seeds: [0, 1]}). Every size is a
    search of its own in a folder of its name, and the report draws trends over all."""
    rungs: list[Rung] = field(default_factory=list)
    """The rounds, from short to long training."""
    rank: dict[str, list[int]] = field(default_factory=dict)
    """Figures that trials are ranked by: a task and its windows or prompt lengths, such as
    {perplexity: [256, 4096], passkey: [4096]}. The best trial has the lowest mean of its ranks."""
    workers: int | None = None
    """Trials that run at once, with one thread each; by default one per core."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Settings of every evaluation task, by its name."""

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Options of every trial by its name: the named trials, then the grid's."""
        found = dict(self.trials)
        for values in product(*self.grid.values()) if self.grid else ():
            options = dict(zip(self.grid, values, strict=True))
            name = " ".join(f"{k.rpartition('.')[2]}={_word(v)}" for k, v in options.items())
            found[name] = options
        return found

    def of_size(self, size: str) -> "Search":
        """The search among the trials of one size."""
        common, rungs = dict(self.sizes[size]), list(self.rungs)
        if rungs and "seeds" in common:
            rungs[-1] = replace(rungs[-1], seeds=common.pop("seeds"))
        trials = {name: common | options for name, options in self.overrides.items()}
        return replace(self, trials=trials, grid={}, sizes={}, rungs=rungs)

    def check(self) -> None:
        """Raise UserError where settings contradict each other, or a trial is no valid recipe."""
        for name in (*self.sizes, *self.trials):
            if not isinstance(name, str):
                raise UserError(f"sizes and trials are named by text, got {name!r}: put quotes")
        for size in self.sizes:
            if _folder_name(size) != size:
                raise UserError(f"sizes are named by letters, digits or . _ = -, got {size!r}")
            with error_prefix(f"size {size}: "):
                self.of_size(size).check()
        trials = self.overrides
        for name, wanted in (
            ("recipe", "the path of a recipe"),
            ("rungs", "at least one, such as [{steps: 200}, {steps: 1000}]"),
            ("rank", "figures to rank by, such as {perplexity: [1024]}"),
        ):
            if not getattr(self, name):
                raise UserError(f"a search needs {name}: {wanted}")
        if not trials:
            raise UserError("a search needs trials or a grid (option of the recipe: [values])")
        folders = set(map(_folder_name, trials))
        combinations = math.prod(map(len, self.grid.values())) if self.grid else 0
        if len(folders) < len(self.trials) + combinations or "" in folders:
            raise UserError(
                "trials and values must differ in letters, digits or one of . _ = -, got "
                + ", ".join(trials)
            )
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers must be at least 1, got {self.workers}")
        for number, rung in enumerate(self.rungs, start=1):
            with error_prefix(f"rung {number}: "):
                self._check_rung(rung, is_last=number == len(self.rungs))
        self._check_rank()
        for name, options in trials.items():
            with error_prefix(f"trial {name}: "):
                if fixed := [option for option in BY_RUNG if option in options]:
                    raise UserError(f"{', '.join(fixed)}: set steps and seeds in the rungs")
                for rung in self.rungs:
                    recipe = load_recipe(self.recipe, _words(options, rung.steps, 0))
                    if recipe.steps != rung.steps:
                        raise UserError(
                            f"the recipe has {recipe.steps} steps and the rung {rung.steps}: leave "
                            "the steps out of the recipe's stages"
                        )

    def _check_rung(self, rung: Rung, *, is_last: bool) -> None:
        if rung.steps < 1:
            raise UserError(f"steps must be at least 1, got {rung.steps}")
        seeds: Any = rung.seeds  # those of a size are not typed
        if (
            not isinstance(seeds, list)
            or not all(isinstance(seed, int) and seed >= 0 for seed in seeds)
            or not 0 < len(seeds) == len(set(seeds))
        ):
            raise UserError(f"seeds must be different numbers from 0, at least one, got {seeds}")
        if is_last and rung.keep is not None:
            raise UserError("the last rung keeps nothing: leave out keep, or add a rung")
        keep = rung.keep
        if keep is not None and (keep <= 0 or (keep >= 1 and keep != int(keep))):
            raise UserError(f"keep must be a share below 1 or a whole number, got {keep:g}")

    def _check_rank(self) -> None:
        for task, settings in self.tasks.items():
            TASKS[task].check(settings)
        for task, sizes in self.rank.items():
            if task not in RANKED:
                raise UserError(f"rank: trials are ranked by {', '.join(RANKED)}; got {task}")
            if task not in self.tasks:
                raise UserError(f"rank: the search has no section {task} to evaluate it")
            measured = getattr(self.tasks[task], RANKED[task][0] + "s")
            if getattr(self.tasks[task], "targets", None) == "one-pass":
                measured = [max(measured)]  # all others are ranges of its text
            if not sizes or not set(sizes) <= set(measured):
                raise UserError(f"rank: {task} is evaluated at {measured}; got {sizes}")


def search_parser() -> SettingsParser:
    """The parser of search files and overrides; its help comes from the documented fields."""
    return settings_parser(Search, "coca search", "search", task_sections())


def load_search(path: str | Path, overrides: list[str] | None = None) -> Search:
    """A checked search from a YAML file and command-line overrides.

    Raises:
        UserError: If a file is missing or malformed, a key is unknown, or a value is invalid.
    """
    options = overrides or []
    sections = task_sections()
    return read_settings(
        Search, path, options, kind="search", program="coca search", sections=sections
    )


@dataclass(frozen=True)
class Job:
    """A trial in a rung with one seed.

    Its folder holds the trained model, the evaluation, what the processes printed, and what was
    measured, ``trial.json``, which is written last.
    """

    facts: Cell
    """What its record says about it."""
    folder: Path
    recipe: str
    overrides: list[str]
    """Words for ``coca train``."""
    tasks: dict[str, Any]
    """Sections of the suite, as JSON values."""

    def prepare(self) -> None:
        """Claim the folder and write the suite.

        Raises:
            UserError: If the folder has a run of another recipe.
        """
        from coca_lab.training.run import claim_folder

        claim_folder(load_recipe(self.recipe, self.overrides), self.folder / "model")
        suite = {"models": {self.facts["model"]: str(self.folder / "model")}, **self.tasks}
        write_text(self.folder / "suite.yaml", yaml.safe_dump(suite, sort_keys=False))

    async def run(self) -> Cell:
        """The record; trains and evaluates unless this evaluation has been finished before."""
        path = self.folder / "trial.json"
        with open(self.folder / ".lock", "w") as lock:
            # The processes inherit the lock. Those of a search that was killed keep it to the end.
            while not _lock(lock):
                await asyncio.sleep(0.5)
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            if found.get("tasks") != self.tasks:
                measured, killed = await self._measure(lock)
                found = {"tasks": self.tasks, "measured": measured}
                if not killed:  # or else the next start tries again
                    write_json(path, found)
        return self.facts | found["measured"]

    async def _measure(self, lock: IO[str]) -> tuple[Cell, bool]:
        """What was measured, and whether it ended by something that may pass, such as a signal."""
        model, evaluation = self.folder / "model", self.folder / "evaluation"
        log = self.folder / "log.txt"
        found: Cell = {"status": "failed", "error": None, "training": None, "cells": []}
        for words in (
            ["train", self.recipe, *self.overrides, f"--output={model}"],
            ["eval", "suite", str(self.folder / "suite.yaml"), f"--output={evaluation}"],
        ):
            code = await run_coca(words, log, lock)
            if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):
                raise UserError(f"{log} was interrupted; run the same command again to resume")
            if code:
                error = _error(log, code)
                return found | {"error": error}, code < 0 or RESUMABLE in error
            if words[0] == "train":
                from coca_lab.training import read_summary

                found["training"] = _summary(read_summary(model))
        content = json.loads((evaluation / RESULTS_FILE).read_text(encoding="utf-8"))
        return found | {"status": "finished", "cells": content["results"]}, False


async def run_coca(words: Sequence[str], log: Path, lock: IO[str]) -> int:
    """Run ``coca`` in a process with one thread that inherits a lock; return its exit status."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    with open(log, "ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coca_lab.cli", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **threads},
            pass_fds=[lock.fileno()],
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def search(search: Search, output: str | Path, *, progress: Progress | None = None) -> Path:
    """Run what has no record yet, rung by rung, and write all results.

    Args:
        search: What to try.
        output: Folder for ``results.json`` and the folders of all trials.
        progress: Called with a label, the trials done so far and the trials to do in all.

    Returns:
        The result file: a cell per trial, rung and seed, with the evaluation's cells. It is
        written anew whenever a trial ends.

    Raises:
        UserError: If the search is invalid, a folder holds a trial of another recipe, or all
            trials of a rung failed.
    """
    search.check()
    output = Path(output)
    check_results(output / RESULTS_FILE)
    cells: list[Cell] = []

    def save(found: list[Cell]) -> None:
        _write(search, cells + found, output)

    for size in search.sizes:
        cells += _halve(search.of_size(size), output / size, progress, save)
    if not search.sizes:
        _halve(search, output, progress)
    return output / RESULTS_FILE


def _halve(
    search: Search,
    output: Path,
    progress: Progress | None,
    also_save: Callable[[list[Cell]], None] | None = None,
) -> list[Cell]:
    """The records of all rungs of a search with one size, written whenever a trial ends."""
    trials, planned = search.overrides, 0
    earlier: list[Cell] = []
    remaining = len(trials)
    for rung in search.rungs:
        planned += remaining * len(rung.seeds)
        remaining = rung.remaining(remaining)

    def save(cells: list[Cell]) -> None:
        found = [*earlier, *cells]
        _write(search, found, output)
        if also_save is not None:
            also_save(found)
        if progress is not None:
            failed = sum(cell["status"] == "failed" for cell in found)
            progress(f"trials ({failed} failed)" if failed else "trials", len(found), planned)

    for number, rung in enumerate(search.rungs, start=1):
        jobs = [
            _make_job(search, number, name, options, seed, output)
            for seed in rung.seeds  # outer: cut short, a search has compared all trials
            for name, options in trials.items()
        ]
        save([])
        workers = search.workers or available_cores()
        cells = asyncio.run(_run_jobs(jobs, workers, save))
        ranks = mean_ranks(cells, search.rank)
        best = sorted(ranks, key=ranks.__getitem__)
        best = best[: rung.remaining(len(trials)) if number < len(search.rungs) else 1]
        for cell in cells:
            cell |= {"mean_rank": ranks.get(cell["model"]), "kept": cell["model"] in best}
        save(cells)
        if not best:
            failed = next(cell for cell in cells if cell["error"])
            raise UserError(
                f"no trial of rung {number} finished with every seed; the first error, of "
                f"{failed['model']}: {failed['error']} (results: {output / RESULTS_FILE})"
            )
        earlier += cells
        trials = {name: trials[name] for name in trials if name in best}
    return earlier


def _write(search: Search, cells: list[Cell], output: Path) -> None:
    content = {
        "results": cells,
        "search": asdict(search),
        "environment": {**describe_environment(), "threads": 1},
    }
    results = output / RESULTS_FILE
    keep_other_results(results, "search", content["search"])
    write_json(results, content)


def mean_ranks(records: Sequence[Cell], rank: dict[str, list[int]]) -> dict[str, float]:
    """Mean rank of every trial over the figures it is ranked by; 1 is the best, ties share theirs.

    Args:
        records: Of all trials and seeds of a rung.
        rank: As `Search.rank`.

    Returns:
        By trial, without those that failed with any seed.
    """
    by_trial: dict[str, list[Cell]] = {}
    for record in records:
        by_trial.setdefault(record["model"], []).append(record)
    finished = {
        name: group
        for name, group in by_trial.items()
        if all(record["status"] == "finished" for record in group)
    }
    ranks: dict[str, list[float]] = {name: [] for name in finished}
    for task, sizes in rank.items():
        for size in sizes:
            values = {name: _value(group, task, size) for name, group in finished.items()}
            for name, value in values.items():
                better = sum(other < value for other in values.values())
                same = sum(other == value for other in values.values())
                ranks[name].append(better + (same + 1) / 2)
    return {name: sum(each) / len(each) for name, each in ranks.items()}


def _value(records: Sequence[Cell], task: str, size: int) -> float:
    """A figure to rank by, lower is better: the mean over seeds, infinite where it is missing."""
    by, figure, more_is_better = RANKED[task]
    values = [
        math.inf if cell[figure] is None else -cell[figure] if more_is_better else cell[figure]
        for record in records
        for cell in record["cells"]
        if cell["task"] == task and cell[by] == size and cell["scaling"] == "none"
    ]
    return sum(values) / len(values) if values else math.inf


def _make_job(
    search: Search, number: int, name: str, options: dict[str, Any], seed: int, output: Path
) -> Job:
    rung = search.rungs[number - 1]
    facts = {
        "task": "search",
        "search": output.name,
        "model": name,
        "overrides": options,
        "rung": number,
        "rungs": len(search.rungs),
        "steps": rung.steps,
        "seed": seed,
        "rank": search.rank,
    }
    job = Job(
        facts,
        output / f"rung-{number}" / _folder_name(name) / f"seed-{seed}",
        search.recipe,
        _words(options, rung.steps, seed),
        {task: asdict(settings) for task, settings in search.tasks.items()},
    )
    job.prepare()
    return job


async def _run_jobs(
    jobs: Sequence[Job], workers: int, save: Callable[[list[Cell]], None]
) -> list[Cell]:
    """The records of all jobs; ``save`` receives those that there are whenever one ends."""
    free = asyncio.Semaphore(workers)
    records: dict[int, Cell] = {}

    async def run(index: int) -> None:
        async with free:
            records[index] = await jobs[index].run()
        save([records[each] for each in sorted(records)])

    await asyncio.gather(*map(run, range(len(jobs))))
    return [records[index] for index in range(len(jobs))]


def _word(value: Any) -> str:
    """A value of an option as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _words(options: dict[str, Any], steps: int, seed: int) -> list[str]:
    """The overrides of a recipe for a trial, as words for ``coca train``."""
    every = {**options, "training.steps": steps, "training.seed": seed}
    return [f"--{name}={_word(value)}" for name, value in every.items()]


def _folder_name(trial: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", trial).strip("-.")


def _lock(file: IO[str]) -> bool:
    locks = file_locks()
    try:
        locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _summary(training: dict[str, Any]) -> Cell:
    """What a record keeps of ``training.json``; seconds are None if training was interrupted."""
    seconds = training["seconds"]
    return {
        "parameters": training["parameters"],
        "tokens": training["tokens"],
        "loss": training["curve"][-1]["loss"],
        "seconds_per_step": None if seconds is None else seconds / training["steps"],
    }


def _error(log: Path, code: int) -> str:
    """Why a process failed: its signal, the error that ``coca`` printed, or its last line."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    text = log.read_text(encoding="utf-8", errors="replace")
    # A progress bar may stand before it in its line.
    said = re.findall(r"coca: (?:error: )?(.+)", text) or text.split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), f"exit status {code}")
