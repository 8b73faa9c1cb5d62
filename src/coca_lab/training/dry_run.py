"""What a run will cost, found out without writing anything.

Sizes come from the model's shapes, without its weights. Time and peak memory come from a few steps
of every stage: the recipe's own model, batch and loss, the run's own trainer, random tokens.
"""

import gc
import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from coca_lab.data import BlockDataset, load_tokenizer
from coca_lab.environment import reset_peak, resident_megabytes
from coca_lab.training.model import (
    CALIBRATION_TOKENS,
    choose_parameters,
    load_teacher,
    make_model,
    parameter_counts,
)
from coca_lab.training.objectives import check_teacher, teacher_loss, without_adapters
from coca_lab.training.recipe import Recipe
from coca_lab.training.sections import StageRecipe
from coca_lab.training.sharding import uses_fsdp
from coca_lab.training.trainer import RecipeTrainer, training_arguments

ADAM_STATES = 2  # of AdamW, for every trained weight
LONGEST = 60.0
"""Seconds after which no further step of a stage is measured; a second one always is, as the first
may compile."""


@dataclass
class StageCost:
    """What a stage costs, per process where several share the run."""

    name: str
    """Of the stage; empty for a run without stages."""
    train: str
    objective: str
    parameters: int
    """Of the model."""
    trained: int
    """How many of them learn."""
    steps: int
    passes: int
    """Micro-batches of a step, in every process."""
    tokens_per_step: int
    """In all processes."""
    weights: int
    """Bytes; so are the next three."""
    gradients: int
    optimizer: int
    teacher: int
    peak: int | None = None
    """Bytes in use at most during the measured steps: on a GPU, of its memory; on a CPU, of the
    whole process. None if not measured, as the next two, in seconds."""
    pass_seconds: float | None = None
    """Forward and backward pass of a micro-batch."""
    step_seconds: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the stage, in all processes."""
        return self.steps * self.tokens_per_step

    @property
    def memory(self) -> int:
        """Bytes of weights, gradients, optimizer state and teacher; activations come on top."""
        return self.weights + self.gradients + self.optimizer + self.teacher

    @property
    def seconds(self) -> float | None:
        """Time of the stage, without validation and checkpoints; None if not measured."""
        return None if self.step_seconds is None else self.steps * self.step_seconds


@dataclass
class RunCost:
    """What a run costs."""

    stages: list[StageCost]
    device: str
    """Where a process computes."""
    device_memory: int
    """Bytes of memory there."""
    processes: int
    is_sharded: bool
    """Whether the processes share weights, gradients and optimizer state."""
    start_seconds: float | None = None
    """Time to make the model to start from, or None if not measured."""
    why_not: str = ""
    """Why time and peak memory were not measured; empty if they were."""

    @property
    def seconds(self) -> float | None:
        """Time of all stages and of the start, or None if not measured."""
        parts = [self.start_seconds, *(stage.seconds for stage in self.stages)]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


def dry_run(recipe: Recipe, *, steps: int = 3) -> RunCost:
    """Find out what a run will cost, on the devices of this process (group). Nothing is written.

    Args:
        recipe: The run. Its text is not read.
        steps: Steps of every stage to measure, after one to warm up; 0 for none. Large batches are
            not read whole: the time of a step is that of its micro-batches and its update.

    Raises:
        UserError: If the start, the teacher or the tokenizer cannot be loaded or does not fit, or
            the batch sizes do not divide.
    """
    recipe.check()
    state: Any = PartialState(cpu=not torch.accelerator.is_available())
    sharded = uses_fsdp(training_arguments(recipe.training, Path(), state.num_processes))
    vocabulary = vocabulary_of(recipe)
    cost = RunCost(
        [_sizes(recipe, stage, vocabulary, state, sharded) for stage in recipe.run_stages],
        str(state.device),
        _device_memory(state.device),
        state.num_processes,
        sharded,
    )
    needed = max(stage.memory for stage in cost.stages)
    if needed > cost.device_memory:
        cost.why_not = (
            f"{needed / 1e9:.1f} GB without activations do not fit into {cost.device}, which has "
            f"{cost.device_memory / 1e9:.1f} GB"
        )
    elif steps:
        try:
            _measure(recipe, cost, vocabulary, steps)
        except torch.OutOfMemoryError as error:
            cost.why_not = f"out of memory on {cost.device}: {str(error).partition('.')[0]}"
    return cost


class _Vocabulary:
    eos_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def vocabulary_of(recipe: Recipe) -> Any:
    """The recipe's tokenizer, or what a model needs to know of one that is not trained yet."""
    named = recipe.data.tokenizer or recipe.model.start
    return _Vocabulary(recipe.data.vocab_size) if named is None else load_tokenizer(named)


def _sizes(
    recipe: Recipe, stage: StageRecipe, vocabulary: Any, state: PartialState, sharded: bool
) -> StageCost:
    """The cost of a stage as far as the shapes of its model say."""
    settings = stage.settings(recipe.training)
    arguments = training_arguments(settings, Path(), state.num_processes)
    blocks = _blocks(recipe, vocabulary, 1)
    model = choose_parameters(make_model(recipe, vocabulary, blocks, empty=True), stage)
    trained, parameters = parameter_counts(model)
    teacher = 0
    if stage.objective != "next_token":
        read = load_teacher(recipe, empty=True)
        check_teacher(read, without_adapters(model), stage.objective)
        teacher = read.get_memory_footprint(return_buffers=False)
    shares = state.num_processes if sharded else 1
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return StageCost(
        stage.name,
        stage.train,
        stage.objective,
        parameters,
        trained,
        settings.steps,
        arguments.gradient_accumulation_steps,
        settings.global_batch_size * recipe.data.block_length,
        model.get_memory_footprint(return_buffers=False) // shares,
        gradients // shares,
        ADAM_STATES * gradients // shares,
        teacher,
    )


def _blocks(recipe: Recipe, vocabulary: Any, count: int) -> BlockDataset:
    """Blocks of random tokens, enough for a calibration or the count."""
    length = recipe.data.block_length
    tokens = max(count * length, CALIBRATION_TOKENS) + 1
    drawn = np.random.default_rng(0).integers(len(vocabulary), size=tokens)
    end = vocabulary.eos_token_id if recipe.data.separate_documents else None
    return BlockDataset(drawn, length, end=end)


def _device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _measure(recipe: Recipe, cost: RunCost, vocabulary: Any, steps: int) -> None:
    """Fill in what only running shows: train every stage for a few steps of 1 or 2 passes."""
    for stage, found in zip(recipe.run_stages, cost.stages, strict=True):
        settings = stage.settings(recipe.training)
        batch = settings.global_batch_size // found.passes * min(found.passes, 2)
        settings = replace(settings, global_batch_size=batch, report_to=[])
        blocks = _blocks(recipe, vocabulary, (steps + 1) * batch)
        began = time.perf_counter()
        model = choose_parameters(make_model(recipe, vocabulary, blocks), stage)
        if cost.start_seconds is None:
            cost.start_seconds = time.perf_counter() - began
        # What a later stage starts from takes as long to train however T was initialised.
        recipe = replace(recipe, model=replace(recipe.model, init="fold"))
        make_loss, clock = nullcontext(), _Clock(steps)
        if stage.objective != "next_token":
            make_loss = teacher_loss(load_teacher(recipe), model, stage.objective)
        with tempfile.TemporaryDirectory() as folder, make_loss as loss:
            arguments = training_arguments(settings, Path(folder), cost.processes)
            arguments.save_strategy = SaveStrategy.NO
            RecipeTrainer(
                settings, loss=loss, model=model, args=arguments, train_dataset=blocks,
                callbacks=[clock],
            ).train()  # fmt: skip
        warm_up = 1 if len(clock.last) > 1 else 0
        first, last = clock.first[warm_up:], clock.last[warm_up:]
        found.peak, found.pass_seconds = clock.peak, median(first or last)
        found.step_seconds = (found.passes - 1) * found.pass_seconds + median(last)
        del model, make_loss, loss
        gc.collect()  # Trainer and model refer to each other


class _Clock(TrainerCallback):
    """Times micro-batches, and ends the training after a few steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.peak = steps, 0
        self.first: list[float] = []
        self.last: list[float] = []
        state: Any = PartialState()
        self.cuda = state.device.type == "cuda"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self._now()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at = self._now()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first.append(self._lap())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last.append(self._lap())
        if self.cuda:
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.peak = int(resident_megabytes("VmHWM") * 1e6)
        late = len(self.last) > 1 and self.at - self.began > LONGEST
        if late or state.global_step > self.steps:
            control.should_training_stop = True

    def _lap(self) -> float:
        before, self.at = self.at, self._now()
        return self.at - before

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
