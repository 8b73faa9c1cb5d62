"""One Trainer run in one folder: resumes when restarted; saves the model atomically."""

import logging
import math
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)

from coca_attention.errors import Interrupted, UserError
from coca_lab.environment import replace
from coca_lab.loading import no_progress_bars
from coca_lab.training.checkpoints import STATE_FILE, catch_write_errors, last_checkpoint
from coca_lab.training.interrupts import StopOnSignal
from coca_lab.training.model import parameter_counts
from coca_lab.training.objectives import Loss
from coca_lab.training.retrieval import Retrieval
from coca_lab.training.sections import TrainingRecipe
from coca_lab.training.sharding import catch_read_errors, check_kind
from coca_lab.training.trainer import RecipeTrainer, training_arguments

log = logging.getLogger(__name__)


class TrainingStopped(UserError):
    """A callback has ended training before the last step; the same command goes on."""


def fit(
    settings: TrainingRecipe,
    folder: Path,
    dataset: Any,
    make: Callable[[], PreTrainedModel],
    *,
    block_length: int | None = None,
    in_order: bool = False,
    validation: Any = None,
    retrieval: Retrieval | None = None,
    validate_every: int | None = None,
    make_loss: Callable[[PreTrainedModel], AbstractContextManager[Loss]] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[RecipeTrainer, float | None]:
    """Train to the last step, from the last checkpoint in the folder if there is one.

    Args:
        settings: Steps, rates, batches, seed.
        folder: Checkpoints and curves go into its subfolders.
        dataset: Blocks.
        make: Returns the model to start from; called after the seed has been set.
        block_length: Their tokens; with it, the log says how fast the run is.
        in_order: Whether the blocks are read in the order of the dataset, not shuffled.
        validation: Blocks to measure the next-token loss on, or None.
        retrieval: Prompts to ask whenever that is measured, or None.
        validate_every: Steps between measurements; None if and only if ``validation`` is.
        make_loss: Maps the model to a context manager that gives the loss to minimise; by default
            the model's own loss is used.
        callbacks: Further Trainer callbacks.

    Returns:
        The trainer with the trained model, and the seconds, or None if training was interrupted.

    Raises:
        UserError: If the Trainer rejects the settings, or a checkpoint cannot be written.
        TrainingStopped: If a callback has stopped training early.
        TrainingDiverged: If the loss or a weight is no longer finite.
        Interrupted: If SIGINT or SIGTERM came; the last step is saved unless two came.
    """
    state = PartialState()
    set_seed(settings.seed)
    # One process chooses, as others may see an older state of a network file system.
    found = last_checkpoint(folder / "checkpoints", say=True) if state.is_main_process else None
    resume = broadcast_object_list([found])[0]
    trained = None
    if resume is not None:
        with catch_read_errors(resume):
            trained = TrainerState.load_from_json(str(resume / STATE_FILE))
    # After a kill between the last step and the end, Trainer would do another step.
    done = trained is not None and trained.global_step >= settings.steps
    model = make()
    if state.is_main_process:
        _announce(settings, folder, model, 0 if trained is None else trained.global_step)
    arguments = training_arguments(
        settings, folder, state.num_processes, validate_every=validate_every
    )
    arguments.eval_on_start = validate_every is not None and resume is None
    if in_order:
        arguments.train_sampling_strategy = "sequential"
    with make_loss(model) if make_loss is not None else nullcontext() as loss:
        try:
            trainer = RecipeTrainer(
                settings,
                loss=loss,
                retrieval=retrieval,
                block_length=block_length,
                model=model,
                args=arguments,
                train_dataset=dataset,
                eval_dataset=validation,
                callbacks=[
                    *_curves(settings, folder, state),
                    _SayValidation(retrieval),
                    *callbacks,
                ],
            )
        except UserError:
            raise
        except (ValueError, ImportError, RuntimeError) as error:
            raise UserError(f"the Trainer rejects these settings: {error}") from error
        if resume is not None:
            check_kind(resume, sharded=trainer.shards is not None)
        seconds = None
        stop = StopOnSignal(trainer.accelerator)
        trainer.add_callback(stop)
        if done and trained is not None:
            trainer._load_from_checkpoint(str(resume))
            trainer.state = trained
        else:
            try:
                with stop, no_progress_bars(), closing(trainer.progress):
                    result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            except UserError:
                raise
            except (ValueError, TypeError, ImportError) as error:
                if not settings.trainer:
                    raise
                raise UserError(f"training.trainer cannot be used: {error}") from error
            seconds = result.metrics.get("train_runtime") if resume is None else None
    if stop.requested():
        raise Interrupted(
            f"{folder}: training ended after step {trainer.state.global_step:,} of "
            f"{settings.steps:,}, which is saved; run the same command again to resume",
            stop.signal or signal.SIGTERM,
        )
    if trainer.state.global_step != settings.steps:
        raise TrainingStopped(
            f"training stopped at step {trainer.state.global_step} of {settings.steps}; run the "
            "same command again to resume"
        )
    return trainer, seconds


def _announce(settings: TrainingRecipe, folder: Path, model: PreTrainedModel, step: int) -> None:
    """Say what is about to be trained, where, and from which step."""
    trained, every = parameter_counts(model)
    begin = f"resuming from step {step:,}" if step else "from the first step"
    log.info(
        "%s: %s parameters%s on %s, %s steps of %s blocks, %s",
        folder,
        f"{every:,}",
        "" if trained == every else f" ({trained:,} of them trained)",
        PartialState().device,
        f"{settings.steps:,}",
        f"{settings.global_batch_size:,}",
        begin,
    )


def measured(metrics: dict[str, Any], retrieval: Retrieval | None) -> dict[str, Any]:
    """``perplexity`` and, if prompts were asked, ``retrieval`` from what the Trainer logs."""
    found: dict[str, Any] = {"perplexity": math.exp(metrics["eval_loss"])}
    if retrieval is not None:
        found["retrieval"] = {name: metrics[f"eval_{name}"] for name in retrieval.questions}
    return found


def measure(
    model: PreTrainedModel,
    settings: TrainingRecipe,
    folder: Path,
    validation: Any,
    retrieval: Retrieval | None = None,
) -> dict[str, Any]:
    """What validation says of a model, measured as during training; see `measured`.

    Args:
        model: Any causal language model with the vocabulary of the blocks.
        settings: Batch size and precision.
        folder: The run's folder; nothing is written to it.
        validation: Blocks, in whole global batches.
        retrieval: Prompts to ask, or None.
    """
    arguments = training_arguments(settings, folder, PartialState().num_processes)
    trainer = RecipeTrainer(
        settings, retrieval=retrieval, model=model, args=arguments, eval_dataset=validation
    )
    return measured(trainer.evaluate(), retrieval)


class _SayValidation(TrainerCallback):
    """A line for every measurement on the validation text."""

    def __init__(self, retrieval: Retrieval | None) -> None:
        self.retrieval = retrieval

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            parts = [f"validation perplexity {math.exp(metrics['eval_loss']):.2f}"]
            for name, asked in self.retrieval.questions.items() if self.retrieval else ():
                share = metrics[f"eval_{name}"]
                parts.append(f"{asked.what} at {asked.length:,} tokens {share:.0%}")
            log.info("step %s, %s", f"{state.global_step:,}", ", ".join(parts))


def _curves(settings: TrainingRecipe, folder: Path, state: PartialState) -> list[TrainerCallback]:
    """TensorBoard in the run folder; Trainer's own takes its folder from the environment."""
    if "tensorboard" not in settings.report_to or not state.is_main_process:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(folder / "logs"))]


def save_trained(
    trainer: RecipeTrainer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel | None:
    """Merge adapters and save the model: written to a temporary folder, then moved.

    Args:
        trainer: The trainer.
        tokenizer: Saved with the model.
        folder: Where to.
        dtype: Of the saved weights; by default that of training.

    Returns:
        The model on the process that writes, None on the others.

    Raises:
        UserError: If the folder cannot be written, or the dtype cannot hold a weight.
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
        # The process that writes gathers all weights.
        trainer.shards.set_state_dict_type("FULL_STATE_DICT")
    trainer.saved_dtype = dtype
    with no_progress_bars(), catch_write_errors(folder, trainer.describe_saved):
        trainer.save_model(str(partial))
        if not trainer.is_world_process_zero():
            return None
        if dtype is not None:
            model.config.dtype = dtype
            model.config.save_pretrained(partial)
        (partial / "training_args.bin").unlink(
            missing_ok=True
        )  # a pickle; recipe.yaml has all settings
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            if path.is_dir():  # chat templates; a folder takes the place of an empty one alone
                shutil.rmtree(folder / path.name, ignore_errors=True)
            replace(path, folder / path.name)
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
    """What validation measured by step, see `measured`; empty without validation."""
    return [
        {"step": entry["step"], **measured(entry, trainer.retrieval)}
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]
