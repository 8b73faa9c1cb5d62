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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch.utils.data import Dataset, Subset

from coca_lab.files import read_json, write_json
from coca_lab.training.checkpoints import catch_write_errors
from coca_lab.training.data import TrainingData
from coca_lab.training.fit import Run, fit, save_trained
from coca_lab.training.recipe import Recipe
from coca_lab.training.trainer import RecipeTrainer

# Written last: a stage whose folder has it is finished.
STAGE_FILE = "stage.json"


def train_stages(run: Run) -> tuple[RecipeTrainer, list[dict[str, Any]]]:
    """Train all stages that are not finished yet.

    Returns:
        The trainer of the last stage, whose model is not saved yet, and the summary of every stage.

    Raises:
        UserError: As `fit`.
    """
    state, recipe = PartialState(), run.recipe
    *earlier, last = zip(recipe.run_stages, stage_blocks(recipe, run.data), strict=True)
    summaries: list[dict[str, Any]] = []
    before: Path | None = None
    for stage, blocks in earlier:
        folder = run.output / "stages" / stage.name
        if not (folder / STAGE_FILE).is_file():
            trainer, summary = fit(run, stage, blocks, folder, before)
            model = save_trained(trainer, run.tokenizer, folder)
            if model is not None:
                with catch_write_errors(folder, trainer.describe_saved):
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
    folder = run.output / "stages" / stage.name if recipe.stages else run.output
    trainer, summary = fit(run, stage, blocks, folder, before)
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
