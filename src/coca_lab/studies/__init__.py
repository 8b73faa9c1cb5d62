"""A study: one YAML of models, sizes, seeds and tasks, run trial by trial, and its page."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from coca_attention.errors import UserError, error_prefix
from coca_attention.models.conversion import Conversion
from coca_lab.arguments import (
    SettingsParser,
    checked,
    option_words,
    put,
    read_settings,
    settings_parser,
)
from coca_lab.engine import Engine, Progress, RayEngine, Store, problem
from coca_lab.environment import available_cores, describe_environment
from coca_lab.evaluation.suite import (
    RESULTS_FILE,
    STORE_FILE,
    ScalingSettings,
    Suite,
    task_sections,
)
from coca_lab.evaluation.task import Cell
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.processes import ProcessEngine, listen
from coca_lab.report import write_report
from coca_lab.studies.trial import EVALUATION, LOGS, Trial
from coca_lab.training import Recipe, load_recipe
from coca_lab.training.folder import TOKENIZER, tokenizer_key
from coca_lab.training.texts import load_run_tokenizer

REPORT_FILE, TOKENIZERS = "report.html", "tokenizers"
RESERVED = {RESULTS_FILE, STORE_FILE, REPORT_FILE, TOKENIZERS, LOGS, EVALUATION}
"""Of the folder of a study, which no model can have."""
Options = dict[str, Any]
"""Fields of a recipe by dotted names, such as {model.attention: rope}."""
CONVERT = "convert."
RATE = "training.learning_rate"


@dataclass
class Study:
    """What to train and evaluate; a study file also has one section per task, named after it."""

    title: str = ""
    """Heading of the report."""
    recipe: str = ""
    """The recipe that models change: a file, or the name of one of the project's; by default the
    settings of the paper."""
    models: dict[str, Options] = field(default_factory=dict)
    """Models by name, each with the fields of the recipe that it sets, such as {RoFormer:
    {model.attention: rope}}; recipe names another recipe, seeds are others than those of the study.
    With path, a folder or name, a model is evaluated as it is, or converted: {path: MODEL,
    convert.form: rope}. path and model.start may name another model of the study."""
    options: Options = field(default_factory=dict)
    """Fields of the recipe that all trained models set."""
    sizes: dict[str, Options] = field(default_factory=dict)
    """Sizes by name, each with fields of the recipe, such as {0.2M: {model.hidden_size: 64}}, and
    seeds if they differ. Every model is trained in every size; the report draws trends."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the training."""
    learning_rates: list[float] = field(default_factory=list)
    """Learning rates of which every trained model gets the best, unless it sets its own: each is
    tried with tuning_seed, and the seeds are trained with the one that choose finds."""
    tuning_seed: int = 100
    """Seed of the trials of learning rates, whose cells are no results."""
    choose: dict[str, Any] = field(default_factory=dict)
    """Which cells decide: those with these fields, such as {task: perplexity, window: 256}, by
    their perplexity, or else by the share of right answers."""
    text: str = ""
    """Text to train and evaluate on, as data.source of a recipe; by default what the recipe and the
    tasks say."""
    scalings: list[ScalingSettings] = field(default_factory=lambda: [ScalingSettings()])
    """Rotary scalings to evaluate with."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights in the evaluation."""
    num_cpus: int = 1
    """Threads of a trial."""
    num_gpus: float | None = None
    """With --ray: GPUs of a trial; by default one if there are GPUs."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Settings of every evaluation task, by its name."""

    def check(self) -> None:
        """Raise UserError where settings contradict each other; `trials` checks the recipes."""
        if not self.models:
            raise UserError("a study needs models, such as {RoFormer: {model.attention: rope}}")
        if self.learning_rates and self.choose.get("task") not in self.tasks:
            raise UserError(
                "learning_rates need choose, such as {task: perplexity, window: 256}, with a task "
                f"of the study; got {self.choose}"
            )
        if self.num_cpus < 1:
            raise UserError(f"num_cpus must be at least 1, got {self.num_cpus}")
        replace(self.suite(self.models), scalings=self.scalings).check()

    def suite(self, models: Iterable[str]) -> Suite:
        """What is measured of the named models, without their folders."""
        models = dict.fromkeys(models, "")
        scalings = [s for s in self.scalings if s.models is None or set(s.models) & set(models)]
        tasks = {
            name: replace(task, source=self.text) if self.text and hasattr(task, "source") else task
            for name, task in self.tasks.items()
        }
        return Suite(models, scalings, tasks, self.dtype)

    def trials(self, output: Path, best: Mapping[str, float] | None = None) -> list[Trial]:
        """Every model in every size with every seed: seed by seed, so all are soon compared.

        Those with learning rates to choose from are tried with all of them, and with their seeds
        as soon as ``best`` has the chosen ones, by model and size.
        """
        every = [(name, size) for size in self.sizes or [""] for name in self.models]
        # A model from elsewhere is one, whatever the sizes.
        every = dict.fromkeys((n, "" if self._is_ready(n) else size) for n, size in every)
        lists = [self._seeds(name, size, output, best or {}) for name, size in every]
        trials = [trial for each in zip_longest(*lists) for trial in each if trial is not None]
        if len({trial.folder for trial in trials}) < len(trials):
            raise UserError(
                "models and sizes must differ in letters, digits or one of . _ = -, got "
                + "; ".join(trial.label for trial in trials)
            )
        for trial in trials:
            if not trial.folder or trial.folder.lower() in RESERVED:
                raise UserError(
                    f"a model cannot be called {trial.label!r}, whose folder {trial.folder or '.'} "
                    "is the study's own: rename it"
                )
        return _linked(trials)

    def _is_ready(self, name: str) -> bool:
        """Whether a model is from elsewhere, as it is or converted."""
        seen, start = {name}, self.models[name].get("path")
        while start in self.models and start not in seen:
            seen.add(start)
            start = self.models[start].get("path")
        return start is not None and start not in self.models

    def best_rates(self, trials: Sequence[Trial], store: Store) -> dict[str, float]:
        """The best learning rate of every model and size that has been tried with all."""
        found: dict[str, dict[float, float]] = {}
        for trial in trials:
            if trial.recipe and trial.tunes and trial.key in store:
                cells, rate = store.get(trial.key)["cells"], trial.recipe.training.learning_rate
                chosen = [c for c in cells if all(c.get(n) == x for n, x in self.choose.items())]
                if cells and not chosen:
                    raise UserError(f"no cell of {trial.label} has what choose asks: {self.choose}")
                found.setdefault(trial.of_size, {})[rate] = _cost(chosen)
        return {
            name: min(self.learning_rates, key=costs.__getitem__)
            for name, costs in found.items()
            if costs.keys() >= {*self.learning_rates}
        }

    def _seeds(self, name: str, size: str, output: Path, best: Mapping[str, float]) -> list[Trial]:
        """A model in a size, seed by seed, and what tries its learning rates."""
        suite = self.suite([name])
        suite.models, suite.scalings = {}, [replace(each, models=None) for each in suite.scalings]
        options = self.options | self.sizes.get(size, {}) | self.models[name]
        seeds = options.pop("seeds", self.seeds)
        with error_prefix(f"model {name}{size and f', size {size}'}: "):
            if not _are_seeds(seeds):
                raise UserError(
                    f"seeds must be different numbers from 0, at least one, got {seeds}"
                )
            if "path" in options:
                trial = Trial(name, size, output, suite, **_ready_model(self.models[name]))
            else:
                trial = Trial(name, size, output, suite, recipe=self._recipe(options))
            trials = [trial.with_seed(seed) for seed in seeds]
            if trial.recipe is not None and self.learning_rates and RATE not in options:
                tried = [trial.with_rate(rate, self.tuning_seed) for rate in self.learning_rates]
                rate = best.get(trial.of_size)
                return [each.with_rate(rate) for each in trials if rate is not None] + tried
        return trials[:1] if self._is_ready(name) else trials

    def _recipe(self, options: Options) -> Recipe:
        """The recipe with the options of a model."""
        options = {"recipe": self.recipe, **options}
        if "training.seed" in options:
            raise UserError("training.seed: set seeds")
        if self.text:
            options.setdefault("data.source", self.text)
        path = options.pop("recipe") or None
        return load_recipe(path, option_words(options))


def _cost(cells: Sequence[Cell]) -> float:
    """Nats per token, or right answers as a negative share; infinite where a model diverged."""
    if not cells or any(cell.get("nats", 0) is None for cell in cells):
        return math.inf
    if "nats" in cells[0]:
        return sum(cell["nats"] for cell in cells) / sum(cell["tokens"] for cell in cells)
    right = sum(cell.get("right", cell["accuracy"]) for cell in cells)
    return -right / sum(cell.get("asked", 1) for cell in cells)


def _are_seeds(seeds: Any) -> bool:
    return (
        isinstance(seeds, list)
        and all(isinstance(seed, int) and seed >= 0 for seed in seeds)
        and 0 < len(seeds) == len(set(seeds))
    )


def _ready_model(options: Options) -> dict[str, Any]:
    """The fields of a trial that trains nothing."""
    known = {name for name in options if name in ("path", "seeds") or name.startswith(CONVERT)}
    if unknown := options.keys() - known:
        raise UserError(
            f"a model with path is evaluated as it is or after {CONVERT}…; leave out path or "
            f"{', '.join(sorted(unknown))}"
        )
    fields = {n.removeprefix(CONVERT): v for n, v in options.items() if n.startswith(CONVERT)}
    conversion = checked(Conversion, put(fields, {}), CONVERT) if fields else None
    return {"start": options["path"], "conversion": conversion}


def _linked(trials: Sequence[Trial]) -> list[Trial]:
    """The trials; what starts from another model of the study, by its name, has its folder."""
    found: dict[str, Trial] = {}
    tuned = {trial.name for trial in trials if trial.tunes}

    def link(trial: Trial, before: tuple[str, ...] = ()) -> Trial:
        if trial.label in before:
            raise UserError(f"models start from each other: {', '.join(before)}")
        if trial.start in tuned:
            raise UserError(
                f"{trial.label} starts from {trial.start}, whose learning rate is yet to be "
                f"chosen: set {RATE} of {trial.start}"
            )
        if trial.label not in found:
            named = [t for t in trials if t.name == trial.start != trial.name]
            others = [t for t in named if t.size in (trial.size, "")]
            if others:
                other = next((t for t in others if t.seed == trial.seed), others[0])
                trial = trial.starting_from(link(other, (*before, trial.label)))
            found[trial.label] = trial
        return found[trial.label]

    return [link(trial) for trial in trials]


def study_parser(shown: Collection[str] = ()) -> SettingsParser:
    """The parser of the options that override a study file."""
    return settings_parser(Study, "coca study", task_sections(), shown)


def load_study(name: str | Path, words: Sequence[str] = ()) -> Study:
    """A checked study from a YAML file or by its name, with words that override it.

    Fields of recipes, such as ``--training.steps 50``, are set for all models.
    """
    options, rest = _recipe_words(words)
    sections: Any = {"kind": "study", "program": "coca study", "sections": task_sections()}
    study = read_settings(Study, name, rest, **sections)
    for each in (*study.models.values(), *study.sizes.values()):
        for option in options.keys() & each.keys():
            del each[option]
    study.options |= options
    return study


def _recipe_words(words: Sequence[str]) -> tuple[Options, list[str]]:
    """The fields of recipes among words of a command line, and the other words."""
    options, rest, left = Options(), [], deque(words)
    while left:
        name, equals, value = (word := left.popleft()).partition("=")
        if not name.startswith("--") or name[2:].split(".")[0] not in Recipe.__dataclass_fields__:
            rest.append(word)
            continue
        if not equals:
            value = left.popleft() if left and not left[0].startswith("--") else "true"
        options[name[2:].replace("-", "_")] = value
    return options, rest


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
    trials = study.trials(output)
    with Store(output / STORE_FILE) as store, _threads(study.num_cpus):
        engine = _engine(study, store, len(trials), ray, workers)
        best, failed = None, dict[str, str]()
        while (found := study.best_rates(trials, store)) != best:
            best, trials = found, study.trials(output, found)
            trials, failed = _run_trials(study, trials, engine, results, progress)
    if len(failed) < len(trials):
        write_report([results], output / REPORT_FILE)
    for label, error in failed.items():
        count = f"{len(failed):,} of {len(trials):,} trials failed, first {label}"
        raise UserError(f"{count}: {error}. The same command runs them again")
    return results


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
