"""What a study is: one YAML of models, sizes, seeds and tasks."""

import json
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from coca_attention.errors import UserError, error_prefix
from coca_attention.models.conversion import Conversion
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.evaluation.suite import ScalingSettings, Suite, task_sections
from coca_lab.studies.trial import Trial
from coca_lab.training import Recipe, load_recipe

Options = dict[str, Any]
"""Fields of a recipe by dotted names, such as {model.attention: rope}."""
SECTIONS = ("model", "data", "validation", "training", "stages")
"""Of a recipe."""
CONVERT = "convert."


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

    def trials(self, output: Path) -> list[Trial]:
        """Every model in every size with every seed: seed by seed, so all are soon compared."""
        every = [(name, size) for size in self.sizes or [""] for name in self.models]
        lists = [self._seeds(name, size, output) for name, size in every]
        trials = [trial for each in zip_longest(*lists) for trial in each if trial is not None]
        if len({trial.folder for trial in trials}) < len(trials):
            raise UserError(
                "models and sizes must differ in letters, digits or one of . _ = -, got "
                + "; ".join(trial.label for trial in trials)
            )
        return [_from_other(trial, trials) for trial in trials]

    def _seeds(self, name: str, size: str, output: Path) -> list[Trial]:
        """A model in a size, seed by seed."""
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
        # A model from elsewhere is one, whatever the seeds.
        return trials[:1] if trial.recipe is None and trial.start not in self.models else trials

    def _recipe(self, options: Options) -> Recipe:
        """The recipe with the options of a model."""
        options = {"recipe": self.recipe, **options}
        if "training.seed" in options:
            raise UserError("training.seed: set seeds")
        if self.text:
            options.setdefault("data.source", self.text)
        path = options.pop("recipe") or None
        return load_recipe(path, [f"--{name}={_word(value)}" for name, value in options.items()])


def _word(value: Any) -> str:
    """A value of an option as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


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
    try:
        conversion = Conversion(**fields) if fields else None
    except TypeError as error:
        raise UserError(f"{CONVERT}{error}") from error
    return {"start": options["path"], "conversion": conversion}


def _from_other(trial: Trial, trials: Sequence[Trial]) -> Trial:
    """A trial whose start is another model of the study, by its name, with that model's folder."""
    others = [t for t in trials if t.name == trial.start != trial.name and t.size == trial.size]
    if not others:
        return trial
    return trial.starting_from(next((t for t in others if t.seed == trial.seed), others[0]))


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
        if not name.startswith("--") or name[2:].split(".")[0] not in SECTIONS:
            rest.append(word)
            continue
        if not equals:
            value = left.popleft() if left and not left[0].startswith("--") else "true"
        options[name[2:].replace("-", "_")] = value
    return options, rest
