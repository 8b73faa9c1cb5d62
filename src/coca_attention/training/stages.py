"""A run in several stages, each with parameters, objective and schedule of its own.

Every stage is a run of the Trainer in a folder of its own, ``stages/NAME``, and reads the blocks
that follow those of the stage before. What it leaves is an ordinary model folder with a
``stage.json`` that is written last: a folder that has it is finished, and the next stage begins
from its weights. A run that was killed therefore goes on within a stage from its last checkpoint,
and between stages from the weights of the last finished one.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accelerate import PartialState
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from coca_attention.data import Mixture
from coca_attention.environment import write_json
from coca_attention.errors import UserError
from coca_attention.models.loading import load_model
from coca_attention.training.build import (
    attention_of,
    choose_parameters,
    make_model,
    parameter_counts,
)
from coca_attention.training.fit import curve, fit, save_trained, validation_curve
from coca_attention.training.objectives import learning_from
from coca_attention.training.recipe import Recipe, StageRecipe, TrainingRecipe
from coca_attention.training.trainer import RecipeTrainer, writing

# Written last: a stage's folder that has it is finished.
STAGE_FILE = "stage.json"


def train_stages(
    recipe: Recipe,
    output: Path,
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    validation: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[RecipeTrainer, list[dict[str, Any]]]:
    """Train all stages that are not finished yet.

    Args:
        recipe: A run with stages.
        output: Folder of the run.
        dataset: All blocks.
        tokenizer: Saved with every stage's model.
        validation: Blocks that the recipe measures perplexity on, or None.
        callbacks: Further Trainer callbacks.

    Returns:
        The trainer of the last stage, whose model is not saved yet, and every stage's summary.

    Raises:
        UserError: As `fit`, or if a teacher or the starting model does not fit.
    """
    state = PartialState()
    every = [stage.settings(recipe.training) for stage in recipe.stages]
    sizes = [settings.steps * settings.global_batch_size for settings in every]
    borders = np.cumsum([0, *sizes])
    # A mixture has an order of its own, made for the whole run.
    order = (
        np.arange(len(dataset))
        if isinstance(dataset, Mixture)
        else block_order(len(dataset), int(borders[-1]), recipe.training.seed)
    )
    folders = [output / "stages" / stage.name for stage in recipe.stages]
    summaries = []
    before: Path | None = None
    for stage, settings, folder, (first, last) in zip(
        recipe.stages, every, folders, pairwise(borders), strict=True
    ):
        end = folder is folders[-1]
        if end or not (folder / STAGE_FILE).is_file():
            trainer, summary = _train_stage(
                recipe,
                stage,
                settings,
                folder,
                Subset(dataset, order[first:last]),  # pyright: ignore[reportArgumentType]
                validation,
                partial(_begin, recipe, stage, tokenizer, dataset, before),
                callbacks,
            )
            if end:
                return trainer, [*summaries, summary]
            if save_trained(trainer, tokenizer, folder) is not None:
                with writing(folder, trainer.kept):
                    write_json(folder / STAGE_FILE, summary)
            del trainer
            state.wait_for_everyone()
        if state.is_main_process:
            # Optimizer states, twice as large as the weights, are of no use any more.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        summaries.append(json.loads((folder / STAGE_FILE).read_text(encoding="utf-8")))
        before = folder
    raise AssertionError("a recipe with stages has a last one")


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """The order in which a run reads its blocks: all of them once, then all once more, and so on.

    Args:
        blocks: How many there are.
        needed: How many are read.
        seed: Of the permutations.

    Returns:
        Indices (needed,).
    """
    generator = np.random.default_rng(seed)
    passes = [generator.permutation(blocks) for _ in range(-(-needed // blocks))]
    return np.concatenate(passes)[:needed]


def joined_curve(
    summaries: Sequence[dict[str, Any]], name: Literal["curve", "validation"]
) -> list[dict[str, Any]]:
    """A curve of all stages one after the other, steps counted on, each entry with its stage."""
    entries, done = [], 0
    for summary in summaries:
        entries += [
            {**entry, "step": entry["step"] + done, "stage": summary["name"]}
            for entry in summary[name]
        ]
        done += summary["steps"]
    return entries


def _begin(
    recipe: Recipe,
    stage: StageRecipe,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Dataset,
    before: Path | None,
) -> PreTrainedModel:
    """The model of the stage before, or the run's first; what the stage trains is chosen."""
    if before is None:
        model = make_model(recipe, tokenizer, blocks)
    else:
        model = load_model(before, device="cpu")
    return choose_parameters(model, stage)


def _train_stage(
    recipe: Recipe,
    stage: StageRecipe,
    settings: TrainingRecipe,
    folder: Path,
    dataset: Dataset,
    validation: Any,
    make: Callable[[], PreTrainedModel],
    callbacks: Sequence[TrainerCallback],
) -> tuple[RecipeTrainer, dict[str, Any]]:
    learning = None
    if stage.objective != "next_token":
        learning = partial(learning_from, _teacher(recipe), objective=stage.objective)
    trainer, seconds = fit(
        settings,
        folder,
        dataset,
        make,
        in_order=True,
        validation=validation,
        validate_every=recipe.validation.every,
        learning=learning,
        callbacks=callbacks,
    )
    learned, parameters = parameter_counts(trainer.accelerator.unwrap_model(trainer.model))
    return trainer, {
        "name": stage.name,
        "train": stage.train,
        "objective": stage.objective,
        "steps": settings.steps,
        "tokens": settings.steps * settings.global_batch_size * recipe.data.block_length,
        "parameters": parameters,
        "trained": learned,
        "trained_share": learned / parameters,
        "seconds": seconds,  # None where it took more than one start
        "curve": curve(trainer),
        "validation": validation_curve(trainer),
    }


def _teacher(recipe: Recipe) -> PreTrainedModel:
    """The teacher in its own dtype, on the CPU until it is asked."""
    name = recipe.model.teacher or recipe.model.start
    assert name is not None  # `Recipe.check`
    teacher = load_model(name, dtype="auto", device="cpu")
    if recipe.model.teacher is None and attention_of(teacher) == recipe.model.attention:
        raise UserError(
            f"{name} has the attention {recipe.model.attention} already, so nothing can be learned "
            "from it: set model.teacher to the model that it was made from"
        )
    return teacher
