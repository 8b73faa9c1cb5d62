"""What a study is: models, sizes, seeds and tasks, from one YAML file, and their trials."""

import logging
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError, error_prefix
from coca_attention.models.conversion import Conversion
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.task import Cell
from coca_lab.options import checked, option_words, read_settings
from coca_lab.settings.sources import SourceSettings
from coca_lab.settings.studies import Options, StudySettings
from coca_lab.store import Store
from coca_lab.studies.trial import LOGS, Trial
from coca_lab.training import Recipe, load_recipe

log = logging.getLogger(__name__)

RESULTS_FILE, STORE_FILE = "results.json", "values.sqlite"
REPORT_FILE, TOKENIZERS = "report.html", "tokenizers"
RESERVED = {RESULTS_FILE, STORE_FILE, REPORT_FILE, TOKENIZERS, LOGS}
"""Of the folder of a study, which no model can have."""
CONVERT = "convert."
RATE = "training.learning_rate"


class Study(StudySettings):
    """What to train and evaluate, and its trials."""

    @property
    def tasks_on_text(self) -> dict[str, Any]:
        """The settings of the tasks; those without a source of their own read the study's text."""
        default = SourceSettings().source
        source = self.text or SourceSettings().source
        return {
            name: replace(task, source=source) if getattr(task, "source", "") == default else task
            for name, task in self.tasks.items()
        }

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
        seen = {name}
        start = self.models[name].get("path")
        while start in self.models and start not in seen:
            seen.add(start)
            start = self.models[start].get("path")
        return start is not None and start not in self.models

    def best_rates(self, trials: Sequence[Trial], store: Store) -> dict[str, float]:
        """The best learning rate of every model and size that has been tried with all."""
        found: dict[str, dict[float | None, float]] = {}
        for trial in trials:
            if trial.tunes and trial.key in store:
                cells = store.get(trial.key)["cells"]
                rate = trial.rate
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
        plan = replace(self.of(name), tasks=self.tasks_on_text)
        options = self.options | self.sizes.get(size, {}) | self.models[name]
        seeds = options.pop("seeds", self.seeds)
        with error_prefix(f"model {name}{size and f', size {size}'}: "):
            valid = isinstance(seeds, list) and all(isinstance(x, int) and x >= 0 for x in seeds)
            if not valid or not seeds or len(set(seeds)) < len(seeds):
                raise UserError(
                    f"seeds must be one or more different whole numbers from 0 on, got {seeds}"
                )
            if "path" in options:
                trial = Trial(name, size, output, plan, **_ready_model(self.models[name]))
            else:
                trial = Trial(name, size, output, plan, recipe=self._recipe(options))
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
        path = os.path.expanduser(options.pop("recipe")) or None
        return load_recipe(path, option_words(options))


def _cost(cells: Sequence[Cell]) -> float:
    """Nats a token or digit, or right answers as a negative share; infinite if a model diverged."""
    if not cells or any(cell.get("nats", 0) is None for cell in cells):
        return math.inf
    if "nats" in cells[0] and "tokens" in cells[0]:
        return sum(cell["nats"] for cell in cells) / sum(cell["tokens"] for cell in cells)
    if "nats" in cells[0]:  # a mean already, of the digits of needles
        return sum(cell["nats"] for cell in cells) / len(cells)
    if "right" in cells[0]:
        return -sum(cell["right"] for cell in cells) / sum(cell["asked"] for cell in cells)
    figure = next((name for name in ("accuracy", "score") if name in cells[0]), None)
    if figure is None:
        raise UserError(
            f"choose: cells of {cells[0]['task']} have neither nats nor right answers (nats, "
            "accuracy or score): choose by another task"
        )
    return -sum(cell[figure] for cell in cells) / len(cells)


def _ready_model(options: Options) -> dict[str, Any]:
    """The fields of a trial that trains nothing."""
    known = {name for name in options if name in ("path", "seeds") or name.startswith(CONVERT)}
    if unknown := options.keys() - known:
        raise UserError(
            f"a model with path is evaluated as it is or after {CONVERT}…; leave out path or "
            f"{', '.join(sorted(unknown))}"
        )
    fields = {n.removeprefix(CONVERT): v for n, v in options.items() if n.startswith(CONVERT)}
    conversion = checked(Conversion, fields, CONVERT) if fields else None
    return {"start": os.path.expanduser(options["path"]), "conversion": conversion}


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


def load_study(name: str | Path, words: Sequence[str] = ()) -> Study:
    """A checked study from a YAML file or by its name, with words that override it.

    Seeds, and fields of recipes such as ``--training.steps 50``, are set for all models and sizes.
    """
    options, rest = _recipe_words(words)
    taken = TASKS.keys() & Study.__dataclass_fields__.keys()
    if taken:
        raise UserError(f"a task cannot be named {', '.join(taken)}, as a field of studies")
    sections = {task.name: task.settings for task in TASKS.values()}
    study = read_settings(
        Study, name, rest, kind="study", program="coca study", sections=sections, check=False
    )
    typed = {word.partition("=")[0] for word in rest}
    if "--models" in typed and "--methods" not in typed:
        _leave_out_methods(study)
    with error_prefix(f"{name}: "):
        study.check()
    seeds = {"seeds"} if "--seeds" in typed else set[str]()
    for each in (*study.models.values(), *study.sizes.values()):
        for option in (seeds | options.keys()) & each.keys():
            del each[option]
    study.options |= options
    return study


def _leave_out_methods(study: Study) -> None:
    """Leave models that the study does not have out of its methods, and methods of no other."""
    left_out = []
    kept = []
    for method in study.methods:
        named = method.models
        if named is None:
            kept.append(method)
            continue
        there = [model for model in named if model in study.models]
        left_out += [f"{method.name} of {model}" for model in named if model not in there]
        if there:
            kept.append(replace(method, models=there))
    study.methods = kept
    if left_out:
        log.info("left out, because `models` does not have them: %s", ", ".join(left_out))


def _recipe_words(words: Sequence[str]) -> tuple[Options, list[str]]:
    """The fields of recipes among words of a command line, and the other words."""
    options = Options()
    rest = []
    left = deque(words)
    while left:
        name, equals, value = (word := left.popleft()).partition("=")
        if not name.startswith("--") or name[2:].split(".")[0] not in Recipe.__dataclass_fields__:
            rest.append(word)
            continue
        if not equals:
            value = left.popleft() if left and not left[0].startswith("--") else "true"
        options[name[2:].replace("-", "_")] = value
    return options, rest
