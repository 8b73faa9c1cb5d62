"""A trial of a study: a model, trained, converted or as it is, and what is measured of it."""

import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from transformers import TrainerCallback

from coca_attention.errors import error_prefix
from coca_attention.models.conversion import Conversion
from coca_lab.engine import Item
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.plan import Plan
from coca_lab.evaluation.task import Cell, free_weights, settings_key
from coca_lab.files import plain_name, read_json, write_json
from coca_lab.fingerprints import code_fingerprint, fingerprint, model_fingerprint
from coca_lab.folders import convert_folder
from coca_lab.recipe import check_same_recipe
from coca_lab.training import Recipe, is_finished, read_summary, train
from coca_lab.training.folder import RECIPE_FILE, check_finished, check_same_inputs, has_begun
from coca_lab.training.run import largest_divisor
from coca_lab.training.texts import inputs_of
from coca_lab.training.trainer import TrainingDiverged

TRAINING = 0.75
"""Share of the work that is training; the rest is evaluation. Only for the time left."""
Value = dict[str, Any]
"""What is kept of a trial: ``training``, ``cells``, and how it ``diverged``."""
LOGS = "logs"
"""Folder of a study with what its processes print, and how far its trainings are."""
CONVERSION_FILE = "conversion.json"
"""Of a converted model: what it was made from, and how."""


@dataclass(frozen=True)
class Trial:
    """A model and its measurements; called, it makes the model: trains or converts it."""

    name: str
    size: str
    output: Path  # of the study
    plan: Plan
    recipe: Recipe | None = None
    start: str = ""  # the model that it starts from, or that is evaluated
    conversion: Conversion | None = None
    seed: int = 0
    tunes: bool = False  # whether it tries a learning rate
    trains_tokenizer: bool = False  # whether its tokenizer is one that the study trains
    after: "Trial | None" = None  # the one whose model this one starts from

    def with_seed(self, seed: int) -> Self:
        """The trial with a seed."""
        if self.recipe is None:
            return replace(self, seed=seed)
        recipe = self.recipe.changed("training", seed=seed)
        return replace(self, recipe=recipe, seed=seed, start=recipe.model.start or "")

    def with_rate(self, rate: float, tuning_seed: int | None = None) -> Self:
        """The trial with a learning rate, or with a seed one that tries it."""
        assert self.recipe is not None
        trial = replace(self, recipe=self.recipe.changed("training", learning_rate=rate))
        if tuning_seed is None:
            return trial
        return replace(trial.with_seed(tuning_seed), tunes=True)

    def starting_from(self, other: "Trial") -> Self:
        """The trial with the model of another one as its start."""
        start = str(other.model)
        recipe = self.recipe and self.recipe.changed("model", start=start)
        return replace(self, recipe=recipe, start=start, after=other)

    def with_tokenizer(self, folder: Path) -> Self:
        """The trial with a tokenizer that the study has trained for its recipe."""
        assert self.recipe is not None
        recipe = self.recipe.changed("data", tokenizer=str(folder))
        return replace(self, recipe=recipe, trains_tokenizer=True)

    @property
    def bases(self) -> list[str]:
        """Labels of the trials whose model it comes from, the nearest first."""
        return [self.after.label, *self.after.bases] if self.after else []

    @cached_property
    def key(self) -> dict[str, Any]:
        """Everything that the values depend on, wherever the study is."""
        tasks = self.plan.tasks.items()
        return {
            "model": [self.name, self.size, self.seed, self.made],
            "tasks": {
                name: [settings_key(each), code_fingerprint(TASKS[name].measure)]
                for name, each in tasks
            },
            "methods": [asdict(method) for method in self.plan.methods],
            "dtype": self.plan.dtype,
            **({"endpoint": self.plan.endpoint} if self.plan.endpoint else {}),
        }

    @cached_property
    def made(self) -> str:
        """Fingerprint of everything that the model depends on.

        Of a trained one the recipe, the texts and the start; else the files, and the conversion.
        """
        with error_prefix(f"model {self.name}: "):
            start = self.after.made if self.after else self.start and model_fingerprint(self.start)
        if self.recipe is None:
            return fingerprint([start, self.conversion and asdict(self.conversion)])
        fields = asdict(self.recipe)
        inputs = inputs_of(self.recipe, start=start)
        for section, name in (("data", "cache"), ("data", "tokenizer"), ("model", "start")):
            del fields[section][name]  # they say where it is
        if self.trains_tokenizer:
            del inputs["tokenizer"]  # which follows from the recipe and its texts
        return fingerprint([fields, inputs])

    @property
    def rate(self) -> float | None:
        """The learning rate, if it is trained."""
        return None if self.recipe is None else self.recipe.training.learning_rate

    @property
    def of_size(self) -> str:
        """Its name and size."""
        return f"{self.name}, {self.size}" if self.size else self.name

    @property
    def label(self) -> str:
        """What messages call it."""
        name = self.of_size
        name += f", rate {self.rate:g}" if self.tunes else ""
        return f"{name}, seed {self.seed}" if self.seed else name

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return plain_name(self.label)

    @property
    def is_ready(self) -> bool:
        """Whether its model is evaluated as it is."""
        return self.recipe is None and self.conversion is None

    @property
    def model(self) -> Path:
        """Path of the model."""
        return Path(self.start) if self.is_ready else self.output / self.folder

    @property
    def steps(self) -> Path:
        """File with the steps that its training has done, and all; there while it is trained."""
        return self.output / LOGS / f"{self.folder}.steps"

    @property
    def cost(self) -> int:
        """How much work it is, next to the others."""
        if self.recipe is None:
            return 1
        training = self.recipe.training
        data = self.recipe.data
        width = self.recipe.model.hidden_size
        return self.recipe.steps * training.global_batch_size * data.block_length * width

    @property
    def making(self) -> Item:
        """The making of its model as work for an engine; the value is no more than that of a call.

        Whether the model is still there the value does not say, so it serves for one run.
        """
        return Item([["made", self.label, self.made]], self, [None], self.cost, self.label)

    @property
    def may_change(self) -> set[str]:
        """Fields of its recipe that depend on where the study is, and on the memory there."""
        elsewhere = {"data.cache", "training.micro_batch_size"}
        if self.after:
            elsewhere.add("model.start")
        if self.trains_tokenizer:
            elsewhere.add("data.tokenizer")
        return elsewhere

    def check_folder(self) -> None:
        """Raise UserError if its folder has a run of another recipe, or on another text."""
        if self.recipe is not None and has_begun(self.model):
            check_same_recipe(self.recipe, self.model / RECIPE_FILE, self.may_change)
            if self.after is None:  # else its start may be yet to be made
                check_same_inputs(inputs_of(self.recipe), self.model)

    def __call__(self, _: list[None]) -> list[str]:
        """Make its model; how the training diverged, or else nothing."""
        free_weights()  # of the model that was measured before
        if self.conversion is not None:
            self._convert(self.conversion)
        elif self.recipe is not None:
            try:
                self._train(self.recipe)
            except TrainingDiverged as error:  # as it would again
                return [str(error)]
        return [""]

    def value(self, cells: list[Cell], diverged: str = "") -> Value:
        """What is kept of it: the summary of its training, and its cells with their place."""
        trained = self.recipe is not None and not diverged
        summary = read_summary(self.model) if trained else None
        place = {"training_seed": self.seed, "learning_rate": self.rate, "size": self.size}
        place |= {"parameters": summary["parameters"] if summary else None}
        found = {"training": summary, "cells": [{**cell, **place} for cell in cells]}
        return found | ({"diverged": diverged} if diverged else {})

    def _train(self, recipe: Recipe) -> None:
        """Train unless it is done; by smaller parts of a batch where memory does not suffice."""
        if is_finished(self.model):
            check_finished(recipe, inputs_of(recipe), self.model, self.may_change)
        while not is_finished(self.model):
            try:
                steps = [Steps(self.steps)]
                train(recipe, self.model, may_change=self.may_change, callbacks=steps)
            except torch.OutOfMemoryError:
                size = recipe.training.micro_batch_size
                if size == 1:
                    raise
                # A divisor of the batch, which accumulation has to fill.
                smaller = largest_divisor(recipe.training.global_batch_size, size // 2)
                recipe = recipe.changed("training", micro_batch_size=smaller)

    def _convert(self, conversion: Conversion) -> None:
        """Convert, again where the start or the options have changed; nothing else is replaced."""
        record = self.model / CONVERSION_FILE
        made = asdict(conversion)
        made["start"] = model_fingerprint(self.start)
        if record.is_file():
            if read_json(record) == made:
                return
            shutil.rmtree(self.model)
        convert_folder(self.start, self.model, conversion)
        write_json(record, made)


class Steps(TrainerCallback):
    """Writes every tenth step of a training; parameters have the types of `TrainerCallback`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % 10 == 0:
            with suppress(OSError):  # it is for the eye alone
                self.path.parent.mkdir(exist_ok=True)
                self.path.write_text(f"[{state.global_step}, {state.max_steps}]", encoding="utf-8")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        with suppress(OSError):
            self.path.unlink()
