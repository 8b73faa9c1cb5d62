"""One Trainer run in one folder: resumes when restarted; saves the model atomically."""

import logging
import math
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.trainer_callback import ProgressCallback

from coca_attention.errors import Interrupted, UserError
from coca_lab.files import replace
from coca_lab.loading import load_model, no_progress_bars
from coca_lab.training.checkpoints import (
    STATE_FILE,
    catch_read_errors,
    catch_write_errors,
    last_checkpoint,
)
from coca_lab.training.data import TrainingData
from coca_lab.training.interrupts import StopOnSignal
from coca_lab.training.model import (
    choose_parameters,
    load_teacher,
    make_model,
    own_device,
    parameter_counts,
)
from coca_lab.training.objectives import teacher_loss
from coca_lab.training.recipe import Recipe, StageRecipe, TrainingRecipe
from coca_lab.training.retrieval import Retrieval
from coca_lab.training.sharding import check_kind
from coca_lab.training.trainer import RecipeTrainer, training_arguments

log = logging.getLogger(__name__)


class TrainingStopped(UserError):
    """A callback has ended training before the last step; the same command goes on."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to train.

    Attributes:
        recipe: The recipe.
        output: Its folder.
        tokenizer: Its tokenizer.
        data: Its blocks.
        callbacks: Further Trainer callbacks.
    """

    recipe: Recipe
    output: Path
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    callbacks: Sequence[TrainerCallback] = ()


def fit(
    run: Run, stage: StageRecipe, blocks: Dataset[Any], folder: Path, before: Path | None
) -> tuple[RecipeTrainer, dict[str, Any]]:
    """Train a stage to its last step, from the last checkpoint in the folder if there is one.

    Args:
        run: The run.
        stage: The stage; a recipe without stages has a single one.
        blocks: Its blocks.
        folder: Checkpoints and curves go into its subfolders.
        before: Folder of the stage whose model this one starts from, or None.

    Returns:
        The trainer with the trained model, and the stage's summary.

    Raises:
        UserError: If the Trainer rejects the settings, a checkpoint cannot be written or read, or
            the teacher or the starting model does not fit the recipe.
        TrainingStopped: If a callback has stopped training early.
        TrainingDiverged: If the loss or a weight is no longer finite.
        Interrupted: If SIGINT or SIGTERM came; the last step is saved unless two came.
    """
    settings = stage.settings(run.recipe.training)
    set_seed(settings.seed)
    resume, state = _resume(folder)
    model = _stage_model(run, stage, before)
    if PartialState().is_main_process:
        _announce(settings, folder, model, 0 if state is None else state.global_step)
    trained, parameters = parameter_counts(model)
    make_loss = nullcontext()
    if stage.objective != "next_token":
        make_loss = teacher_loss(load_teacher(run.recipe), model, stage.objective)
    with make_loss as loss:
        trainer = _trainer(run, settings, folder, blocks, model, loss, resume)
        seconds = _train(trainer, settings, folder, resume, state)
    tokens = settings.global_batch_size * run.recipe.data.block_length
    steps = settings.steps - (0 if state is None else state.global_step)
    return trainer, {
        "name": stage.name,
        "train": stage.train,
        "objective": stage.objective,
        "steps": settings.steps,
        "tokens": settings.steps * tokens,
        "parameters": parameters,
        "trained": trained,
        "trained_share": trained / parameters,
        "seconds": seconds if resume is None else None,  # of the whole stage
        "throughput": {"tokens_per_second": steps * tokens / seconds} if seconds else None,
        "curve": curve(trainer),
        "validation": validation_curve(trainer),
    }


def _resume(folder: Path) -> tuple[Path | None, TrainerState | None]:
    """The checkpoint to resume from, and its state.

    One process chooses, as others may see an older state of a network file system.
    """
    chosen = None
    if PartialState().is_main_process:
        chosen = last_checkpoint(folder / "checkpoints", say=True)
    resume = broadcast_object_list([chosen])[0]
    if resume is None:
        return None, None
    with catch_read_errors(resume):
        return resume, TrainerState.load_from_json(str(resume / STATE_FILE))


def _stage_model(run: Run, stage: StageRecipe, before: Path | None) -> PreTrainedModel:
    if before is None:
        model = make_model(run.recipe, run.tokenizer)
    else:
        model = load_model(before, device=own_device())
    return choose_parameters(model, stage)


def _trainer(
    run: Run,
    settings: TrainingRecipe,
    folder: Path,
    blocks: Dataset[Any],
    model: PreTrainedModel,
    loss: Any,
    resume: Path | None,
) -> RecipeTrainer:
    every, state = run.recipe.validation.every, PartialState()
    arguments = training_arguments(settings, folder, state.num_processes, validate_every=every)
    arguments.eval_on_start = every is not None and resume is None
    if run.recipe.stages or run.data.is_ordered:
        arguments.train_sampling_strategy = "sequential"
    shown: list[TrainerCallback] = [Progress(run.data.retrieval)]
    if "tensorboard" in settings.report_to and state.is_main_process:
        # In the run folder; Trainer's own takes its folder from the environment.
        from torch.utils.tensorboard import SummaryWriter
        from transformers.integrations import TensorBoardCallback

        shown.append(TensorBoardCallback(SummaryWriter(folder / "logs")))
    if sys.stderr.isatty() and not arguments.disable_tqdm:
        shown.append(Bar())
    try:
        trainer = RecipeTrainer(
            settings,
            loss=loss,
            retrieval=run.data.retrieval,
            model=model,
            args=arguments,
            train_dataset=blocks,
            eval_dataset=run.data.validation,
            callbacks=[*shown, *run.callbacks],
        )
    except UserError:
        raise
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"the Trainer rejects these settings: {error}") from error
    if resume is not None:
        check_kind(resume, sharded=trainer.is_fsdp_enabled)
    return trainer


def _train(
    trainer: RecipeTrainer,
    settings: TrainingRecipe,
    folder: Path,
    resume: Path | None,
    state: TrainerState | None,
) -> float | None:
    """Train to the last step; the seconds, or None if there was nothing left to do."""
    if state is not None and state.global_step >= settings.steps:
        # After a kill between the last step and the end, Trainer would do another step.
        trainer._load_from_checkpoint(str(resume))
        trainer.state = state
        return None
    stop = StopOnSignal(trainer.accelerator)
    trainer.add_callback(stop)
    try:
        with stop, no_progress_bars():
            result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except UserError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        if not settings.trainer:
            raise
        raise UserError(f"training.trainer cannot be used: {error}") from error
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
    return result.metrics["train_runtime"]


def _announce(settings: TrainingRecipe, folder: Path, model: PreTrainedModel, step: int) -> None:
    """Say what is about to be trained, where, and from which step."""
    trained, every = parameter_counts(model)
    log.info(
        "%s: %s parameters%s on %s, %s steps of %s blocks, %s",
        folder,
        f"{every:,}",
        "" if trained == every else f" ({trained:,} of them trained)",
        PartialState().device,
        f"{settings.steps:,}",
        f"{settings.global_batch_size:,}",
        f"resuming from step {step:,}" if step else "from the first step",
    )


class Bar(ProgressCallback):
    """Trainer's bar, with the loss behind it instead of a line for every log entry."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")


class Progress(TrainerCallback):
    """A line for every measurement, and now and then one for the loss."""

    seconds = 10.0

    def __init__(self, retrieval: Retrieval | None) -> None:
        self.retrieval, self.said = retrieval, -math.inf

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        now = time.monotonic()
        late = now - self.said >= self.seconds or state.global_step >= state.max_steps
        if state.is_world_process_zero and logs and "loss" in logs and late:
            self.said = now
            step, steps = f"{state.global_step:,}", f"{state.max_steps:,}"
            log.info("step %s of %s, loss %.3f", step, steps, float(logs["loss"]))

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            parts = [f"validation perplexity {math.exp(metrics['eval_loss']):.2f}"]
            for name, asked in self.retrieval.questions.items() if self.retrieval else ():
                share = metrics[f"eval_{name}"]
                parts.append(f"{asked.what} at {asked.length:,} tokens {share:.0%}")
            log.info("step %s, %s", f"{state.global_step:,}", ", ".join(parts))


def measured(metrics: dict[str, Any], retrieval: Retrieval | None) -> dict[str, Any]:
    """``perplexity`` and, if prompts were asked, ``retrieval`` from what the Trainer logs."""
    found: dict[str, Any] = {"perplexity": math.exp(metrics["eval_loss"])}
    if retrieval is not None:
        found["retrieval"] = {name: metrics[f"eval_{name}"] for name in retrieval.questions}
    return found


def measure(run: Run, model: PreTrainedModel) -> dict[str, Any]:
    """What validation says of a model, measured as during training; see `measured`.

    Args:
        run: The run, whose folder nothing is written to.
        model: Any causal language model with the vocabulary of the blocks.
    """
    settings, retrieval = run.recipe.training, run.data.retrieval
    arguments = training_arguments(settings, run.output, PartialState().num_processes)
    trainer = RecipeTrainer(
        settings, retrieval=retrieval, model=model, args=arguments, eval_dataset=run.data.validation
    )
    trainer.is_fsdp_enabled = False  # a whole model, which is read alone
    return measured(trainer.evaluate(), retrieval)


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
    trainer.saved_dtype = dtype
    with no_progress_bars(), catch_write_errors(folder, trainer.describe_saved):
        trainer.save_model(str(partial))
        if not trainer.is_world_process_zero():
            return None
        if dtype is not None:
            model.config.dtype = dtype
            model.config.save_pretrained(partial)
        # A pickle; recipe.yaml has all settings.
        (partial / "training_args.bin").unlink(missing_ok=True)
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
