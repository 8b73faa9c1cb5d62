"""One run of the Trainer in one folder: started again, it goes on; and its model saved whole."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)

from coca_attention.errors import UserError
from coca_attention.models.loading import no_progress_bars
from coca_attention.training.objectives import Loss
from coca_attention.training.recipe import TrainingRecipe
from coca_attention.training.sharding import check_kind
from coca_attention.training.trainer import (
    STATE_FILE,
    RecipeTrainer,
    last_checkpoint,
    training_arguments,
    writing,
)


def fit(
    settings: TrainingRecipe,
    folder: Path,
    dataset: Any,
    make: Callable[[], PreTrainedModel],
    *,
    in_order: bool = False,
    validation: Any = None,
    validate_every: int | None = None,
    learning: Callable[[PreTrainedModel], AbstractContextManager[Loss]] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[RecipeTrainer, float | None]:
    """Train to the last step, from the last checkpoint in the folder where there is one.

    Args:
        settings: Steps, rates, batches, seed.
        folder: Checkpoints and curves go into subfolders of it.
        dataset: Blocks.
        make: Gives the model to begin with, called after the seed was set.
        in_order: Whether the blocks are read as they stand; otherwise they are shuffled.
        validation: Blocks that the loss on the next token is measured on, or None.
        validate_every: Steps between the measurements; None exactly where there are no blocks.
        learning: From that model to the context of another loss than its own.
        callbacks: Further Trainer callbacks.

    Returns:
        The trainer with the trained model, and the seconds; None where it took several starts.

    Raises:
        UserError: If the Trainer refuses the settings, a checkpoint cannot be written, or it was
            stopped early.
        TrainingDiverged: If the loss or a weight is no longer finite.
    """
    state = PartialState()
    set_seed(settings.seed)
    # One process chooses: others might see another state of a network's file system.
    resume = broadcast_object_list([last_checkpoint(folder / "checkpoints")])[0]
    trained = None if resume is None else TrainerState.load_from_json(str(resume / STATE_FILE))
    # Killed between the last step and the end: Trainer would do one step more.
    done = trained is not None and trained.global_step >= settings.steps
    model = make()
    arguments = training_arguments(
        settings,
        folder,
        state.num_processes,
        validate_every=validate_every,
    )
    arguments.eval_on_start = validate_every is not None and resume is None
    if in_order:
        arguments.train_sampling_strategy = "sequential"
    with learning(model) if learning is not None else nullcontext() as loss:
        try:
            trainer = RecipeTrainer(
                settings,
                loss=loss,
                model=model,
                args=arguments,
                train_dataset=dataset,
                eval_dataset=validation,
                callbacks=[*_curves(settings, folder, state), *callbacks],
            )
        except UserError:
            raise
        except (ValueError, ImportError) as error:
            raise UserError(f"the Trainer refuses these settings: {error}") from error
        if resume is not None:
            check_kind(resume, sharded=trainer.shards is not None)
        seconds = None
        if done and trained is not None:
            trainer._load_from_checkpoint(str(resume))
            trainer.state = trained
        else:
            with no_progress_bars():
                result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            seconds = result.metrics.get("train_runtime") if resume is None else None
    if trainer.state.global_step != settings.steps:
        raise UserError(
            f"training stopped at step {trainer.state.global_step} of {settings.steps}; start it "
            "again to go on"
        )
    return trainer, seconds


def perplexity_of(
    model: PreTrainedModel, settings: TrainingRecipe, folder: Path, validation: Any
) -> float:
    """A model's perplexity on the validation blocks, measured as in training.

    Args:
        model: Any causal language model of the blocks' vocabulary.
        settings: Batch size and precision.
        folder: The run's folder; nothing is written into it.
        validation: Blocks, in whole global batches.
    """
    arguments = training_arguments(settings, folder, PartialState().num_processes)
    trainer = RecipeTrainer(settings, model=model, args=arguments, eval_dataset=validation)
    return math.exp(trainer.evaluate()["eval_loss"])


def _curves(settings: TrainingRecipe, folder: Path, state: PartialState) -> list[TrainerCallback]:
    """TensorBoard into the run folder; Trainer's own takes its folder from the environment."""
    if "tensorboard" not in settings.report_to or not state.is_main_process:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(folder / "logs"))]


def save_trained(
    trainer: RecipeTrainer, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> PreTrainedModel | None:
    """Put a trained model into a folder: written aside, then moved; adapters are merged before.

    Returns:
        The model on the process that writes, None on the others.

    Raises:
        UserError: If the folder cannot be written.
        TrainingDiverged: If a weight is not finite.
    """
    partial = folder / ".model.partial"
    if trainer.is_world_process_zero():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = trainer.model = model.merge_and_unload()
    if trainer.shards is not None:
        # Gathered for the process that writes.
        trainer.shards.set_state_dict_type("FULL_STATE_DICT")
    with no_progress_bars(), writing(folder, trainer.kept):
        trainer.save_model(str(partial))
        if not trainer.is_world_process_zero():
            return None
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle; recipe.yaml says it all
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            os.replace(path, folder / path.name)
        partial.rmdir()
    return model


def curve(trainer: RecipeTrainer) -> list[dict[str, Any]]:
    """Loss and learning rate by step."""
    return [
        {"step": entry["step"], "loss": entry["loss"], "learning_rate": entry["learning_rate"]}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def validation_curve(trainer: RecipeTrainer) -> list[dict[str, Any]]:
    """Perplexity on the validation blocks by step; empty where there are none."""
    return [
        {"step": entry["step"], "perplexity": math.exp(entry["eval_loss"])}
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]
