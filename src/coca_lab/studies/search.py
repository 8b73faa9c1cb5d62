"""Trials of one recipe, compared by successive halving (arXiv 1502.07943).

A rung trains all remaining trials for its number of steps, evaluates them alike, and passes on the
best. A learning-rate schedule depends on the number of steps, so every rung trains from the start.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from coca_attention.errors import UserError, error_prefix, may_pass
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.engine import Engine, Item, Progress, Store, problem, start_engine
from coca_lab.environment import describe_environment
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.suite import (
    RESULTS_FILE,
    STORE_FILE,
    Suite,
    evaluate,
    task_sections,
)
from coca_lab.evaluation.task import Cell
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.training import Recipe, load_recipe, read_summary, train
from coca_lab.training.run import claim_folder

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
    num_cpus: int = 1
    """Threads of a trial; with --ray also its cores, and as many trials run at once as there are
    cores for."""
    num_gpus: float | None = None
    """With --ray: GPUs of a trial; by default one if there are GPUs."""
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
        if self.num_cpus < 1:
            raise UserError(f"num_cpus must be at least 1, got {self.num_cpus}")
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


def search_parser(shown: Sequence[str] = ()) -> SettingsParser:
    """The parser of search files and overrides; its help comes from the documented fields."""
    return settings_parser(Search, "coca search", task_sections(), shown)


def load_search(path: str | Path, overrides: Sequence[str] = ()) -> Search:
    """A checked search from a YAML file and command-line overrides.

    Raises:
        UserError: If a file is missing or malformed, a key is unknown, or a value is invalid.
    """
    options: Any = {"kind": "search", "program": "coca search", "sections": task_sections()}
    return read_settings(Search, path, overrides, **options)


def search(
    search: Search, output: str | Path, *, progress: Progress | None = None, ray: str | None = None
) -> Path:
    """Run what has no record yet, rung by rung, and write all results.

    A trial is trained and evaluated by the process that takes it: this one, trial after trial, or
    one of Ray. An exception ends that trial alone. What ends the process, such as a lack of
    memory, ends the search in this process; on Ray the trial has failed after three attempts.

    Args:
        search: What to try.
        output: Folder for ``results.json``, the records and the folders of all trials.
        progress: As for `coca_lab.engine.Engine`; the work is counted in trials.
        ray: Run trials on Ray: the address of a cluster, or empty for this machine.

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

    with Store(output / STORE_FILE) as store:
        resources = {"num_cpus": search.num_cpus, "num_gpus": search.num_gpus}
        engine = start_engine(store, progress, ray, **resources)
        for size in search.sizes:
            cells += _halve(search.of_size(size), output / size, engine, save)
        if not search.sizes:
            _halve(search, output, engine)
    return output / RESULTS_FILE


def _halve(
    search: Search,
    output: Path,
    engine: Engine,
    also_save: Callable[[list[Cell]], None] = lambda cells: None,
) -> list[Cell]:
    """The records of all rungs of a search with one size, written whenever a trial ends."""
    trials = search.overrides
    earlier: list[Cell] = []

    def save(cells: list[Cell]) -> None:
        _write(search, [*earlier, *cells], output)
        also_save([*earlier, *cells])

    for number, rung in enumerate(search.rungs, start=1):
        cells = _run_rung(search, number, trials, output, engine, save)
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


def _run_rung(
    search: Search,
    number: int,
    trials: dict[str, dict[str, Any]],
    output: Path,
    engine: Engine,
    save: Callable[[list[Cell]], None],
) -> list[Cell]:
    """The records of a rung; ``save`` receives those that there are whenever a trial ends."""
    rung = search.rungs[number - 1]
    runs: list[tuple[Cell, Item]] = []
    for seed in rung.seeds:  # outer: cut short, a search has compared all trials
        for name, options in trials.items():
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
            folder = output / f"rung-{number}" / _folder_name(name) / f"seed-{seed}"
            trial = Trial(
                name,
                folder,
                load_recipe(search.recipe, _words(options, rung.steps, seed)),
                search.tasks,
                search.num_cpus,
            )
            claim_folder(trial.recipe, folder / "model")
            label = f"{name}, rung {number}, seed {seed}"
            runs.append((facts, Item([trial.key], trial, [None], label=label)))

    save([])

    def records() -> list[Cell]:
        found = ((facts, engine.store.get(item.keys[0])) for facts, item in runs)
        return [facts | measured for facts, measured in found if measured is not None]

    shown = engine.progress

    def report(line: str, done: int, total: int) -> None:
        save(records())
        line = line.replace("items", f"trials of rung {number}").replace("tokens", "trials")
        shown(line, done, total)

    engine.progress = report
    try:
        failed = engine.compute([item for _, item in runs])
    finally:
        engine.progress = shown
    # Those that are not in the store are tried again by the next start.
    lost = {id(item): _failed(problem(error)) for item, error in failed}
    return [
        facts | (lost[id(item)] if id(item) in lost else engine.store.get(item.keys[0]))
        for facts, item in runs
    ]


@dataclass(frozen=True)
class Trial:
    """A trial in a rung with one seed; called, it trains, evaluates and returns what it measured.

    Attributes:
        name: Of the trial.
        folder: Gets the trained model, the values of its evaluation, and what was printed.
        recipe: With the options of the trial, and the steps and seed of the rung.
        tasks: Settings of every evaluation task, by its name.
        threads: That the operators of PyTorch use.
    """

    name: str
    folder: Path
    recipe: Recipe
    tasks: dict[str, Any]
    threads: int

    @property
    def key(self) -> Any:
        """Everything that the record depends on."""
        tasks = {task: asdict(settings) for task, settings in self.tasks.items()}
        return {"folder": str(self.folder), "recipe": asdict(self.recipe), "tasks": tasks}

    def __call__(self, _: list[Any]) -> list[Cell]:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (
                open(self.folder / "log.txt", "a", encoding="utf-8") as log,
                redirect_stdout(log),
                redirect_stderr(log),
            ):
                return [self._measure()]
        except Exception as error:
            if may_pass(error):
                raise
            return [_failed(problem(error))]
        finally:
            torch.set_num_threads(threads)

    def _measure(self) -> Cell:
        model = self.folder / "model"
        train(self.recipe, model)
        suite = Suite(models={self.name: str(model)})
        tasks = [(TASKS[name], settings) for name, settings in self.tasks.items()]
        with Store(self.folder / STORE_FILE) as store:
            cells = evaluate(suite, tasks, Engine(store))
        training = _summary(read_summary(model))
        return {"status": "finished", "error": None, "training": training, "cells": cells}


def _failed(error: str) -> Cell:
    return {"status": "failed", "error": error, "training": None, "cells": []}


def _write(search: Search, cells: list[Cell], output: Path) -> None:
    content = {
        "results": cells,
        "search": asdict(search),
        "environment": {**describe_environment(), "threads": search.num_cpus},
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


def _word(value: Any) -> str:
    """A value of an option as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _words(options: dict[str, Any], steps: int, seed: int) -> list[str]:
    """The overrides of a recipe for a trial, as words for ``coca train``."""
    every = {**options, "training.steps": steps, "training.seed": seed}
    return [f"--{name}={_word(value)}" for name, value in every.items()]


def _folder_name(trial: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", trial).strip("-.")


def _summary(training: dict[str, Any]) -> Cell:
    """What a record keeps of ``training.json``; seconds are None if training was interrupted."""
    seconds = training["seconds"]
    return {
        "parameters": training["parameters"],
        "tokens": training["tokens"],
        "loss": training["curve"][-1]["loss"],
        "seconds_per_step": None if seconds is None else seconds / training["steps"],
    }
