"""Train the stages of a run one after another, each with its own parameters, loss and schedule.

Every stage is a Trainer run in its own folder, ``stages/NAME``, and reads the blocks that follow
those of the previous stage. It leaves an ordinary model folder with a ``stage.json``, which is
written last and marks the stage as finished; the next stage starts from these weights. An
interrupted run therefore resumes from the last checkpoint of its current stage, or from the weights
of the last finished stage.

A recipe without stages is a single stage in the run folder itself.
"""

import gc
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from coca_attention.errors import UserError
from coca_attention.models.cards import write_card
from coca_attention.models.fields import attention_of
from coca_lab.environment import read_json, write_json
from coca_lab.loading import load_model, model_without_weights
from coca_lab.training.checkpoints import catch_write_errors
from coca_lab.training.data import TrainingData
from coca_lab.training.fit import curve, fit, save_trained, validation_curve
from coca_lab.training.model import (
    choose_parameters,
    make_model,
    own_device,
    parameter_counts,
)
from coca_lab.training.objectives import teacher_loss
from coca_lab.training.recipe import Recipe
from coca_lab.training.sections import StageRecipe
from coca_lab.training.throughput import summary as throughput
from coca_lab.training.trainer import RecipeTrainer

# Written last: a stage whose folder has it is finished.
STAGE_FILE = "stage.json"


def train_stages(
    recipe: Recipe,
    data: TrainingData,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[RecipeTrainer, list[dict[str, Any]]]:
    """Train all stages that are not finished yet.

    Args:
        recipe: The run.
        data: Its data.
        tokenizer: Saved with every stage's model.
        output: Folder of the run.
        callbacks: Further Trainer callbacks.

    Returns:
        The trainer of the last stage, whose model is not saved yet, and the summary of every stage.

    Raises:
        UserError: As `fit`, or if the teacher or the starting model does not fit the recipe.
    """
    state = PartialState()
    *earlier, last = zip(recipe.run_stages, stage_blocks(recipe, data), strict=True)
    train = partial(_train_stage, recipe, data, tokenizer, callbacks)
    summaries: list[dict[str, Any]] = []
    before: Path | None = None
    for stage, blocks in earlier:
        folder = output / "stages" / stage.name
        if not (folder / STAGE_FILE).is_file():
            trainer, summary = train(stage, blocks, folder, before)
            model = save_trained(trainer, tokenizer, folder)
            if model is not None:
                with catch_write_errors(folder, trainer.describe_saved):
                    write_card(
                        folder,
                        model.config,
                        source=recipe.model.start,
                        training={f"stage {stage.name}": "`stage.json`"},
                    )
                    write_json(folder / STAGE_FILE, summary)
            del trainer, model
            gc.collect()  # Trainer and model refer to each other
            state.wait_for_everyone()
        if state.is_main_process:
            # Their optimizer states, twice as large as the weights, are no longer needed.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        summaries.append(read_json(folder / STAGE_FILE))
        before = folder
    stage, blocks = last
    folder = output / "stages" / stage.name if recipe.stages else output
    trainer, summary = train(stage, blocks, folder, before)
    return trainer, [*summaries, summary]


def stage_blocks(recipe: Recipe, data: TrainingData) -> Sequence[Dataset[Any]]:
    """The blocks of every stage: consecutive slices of one order for the whole run.

    Without stages they are `TrainingData.blocks`, which the Trainer shuffles if they have no order.
    """
    if not recipe.stages:
        return [data.blocks]
    every = [stage.settings(recipe.training) for stage in recipe.stages]
    borders = np.cumsum([0, *(settings.steps * settings.global_batch_size for settings in every)])
    blocks, order = data.blocks, np.arange(len(data.blocks))
    if not data.is_ordered:
        order = block_order(len(blocks), int(borders[-1]), recipe.training.seed)
    slices: list[Any] = [order[first:end] for first, end in pairwise(borders)]
    return [Subset[Any](blocks, indices) for indices in slices]


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """Order in which a run reads its blocks: concatenated permutations, one per pass.

    Args:
        blocks: Number of blocks.
        needed: Number of blocks that the run reads.
        seed: Seed of the permutations.

    Returns:
        (needed,), int64.
    """
    generator = np.random.default_rng(seed)
    passes = -(-needed // blocks)
    return np.concatenate([generator.permutation(blocks) for _ in range(passes)])[:needed]


def join_curves(summaries: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """A curve of all stages on one axis of steps; entries of named stages say which one.

    Args:
        summaries: From `train_stages`.
        name: ``curve`` or ``validation``.
    """
    entries, done = [], 0
    for summary in summaries:
        stage = {"stage": summary["name"]} if summary["name"] else {}
        entries += [{**entry, "step": entry["step"] + done, **stage} for entry in summary[name]]
        done += summary["steps"]
    return entries


def _train_stage(
    recipe: Recipe,
    data: TrainingData,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: Sequence[TrainerCallback],
    stage: StageRecipe,
    blocks: Dataset,
    folder: Path,
    before: Path | None,
) -> tuple[RecipeTrainer, dict[str, Any]]:
    """Train a stage, from the model of the stage in the folder ``before`` if there is one."""

    def make() -> PreTrainedModel:
        if before is None:
            model = make_model(recipe, tokenizer, data.blocks)
        else:
            model = load_model(before, device=own_device())
        return choose_parameters(model, stage)

    make_loss = None
    if stage.objective != "next_token":
        make_loss = partial(teacher_loss, load_teacher(recipe), objective=stage.objective)
    settings = stage.settings(recipe.training)
    trainer, seconds = fit(
        settings,
        folder,
        blocks,
        make,
        block_length=recipe.data.block_length,
        in_order=bool(recipe.stages) or data.is_ordered,
        validation=data.validation,
        retrieval=data.retrieval,
        validate_every=recipe.validation.every,
        make_loss=make_loss,
        callbacks=callbacks,
    )
    trained, parameters = parameter_counts(trainer.accelerator.unwrap_model(trainer.model))
    return trainer, {
        "name": stage.name,
        "train": stage.train,
        "objective": stage.objective,
        "steps": settings.steps,
        "tokens": settings.steps * settings.global_batch_size * recipe.data.block_length,
        "parameters": parameters,
        "trained": trained,
        "trained_share": trained / parameters,
        "seconds": seconds,  # None if the stage was interrupted
        "throughput": throughput(trainer.state.log_history),
        "curve": curve(trainer),
        "validation": validation_curve(trainer),
    }


def load_teacher(recipe: Recipe, *, empty: bool = False) -> PreTrainedModel:
    """The teacher in the dtype of its files.

    Args:
        recipe: A recipe with a start or a teacher.
        empty: Whether to make the teacher on the meta device, without weights.

    Raises:
        UserError: If it cannot be loaded, or there is nothing to learn from it.
    """
    name = recipe.model.teacher or recipe.model.start
    assert name is not None  # `Recipe.check`
    if empty:
        teacher = model_without_weights(name, "auto")
    else:
        teacher = load_model(name, dtype="auto", device=own_device())
    if recipe.model.teacher is None and attention_of(teacher.config) == recipe.model.attention:
        raise UserError(
            f"{name} already has attention {recipe.model.attention}, so there is nothing to learn "
            "from it: set model.teacher to the model that it was converted from"
        )
    return teacher
