"""Transformers' Trainer with the paper's schedule, a stop at NaN, and reliable checkpoints.

Under FSDP2 it needs more than the configuration of Accelerate: see `prepare_sharding`.
"""

import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, gather_object
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coca_attention.errors import UserError
from coca_lab.files import replace
from coca_lab.loading import no_progress_bars
from coca_lab.recipe import Recipe
from coca_lab.recipe_sections import StageRecipe, TrainingRecipe
from coca_lab.training.callbacks import LogLastStep, StopOnSignal, shown
from coca_lab.training.checkpoints import (
    catch_write_errors,
    last_checkpoint,
    reads_checkpoint,
    sorted_checkpoints,
    writing_checkpoint,
)
from coca_lab.training.objectives import Loss
from coca_lab.training.retrieval import Retrieval

UNLOGGED = "unlogged"
"""In the state of a checkpoint, the losses that `RecipeTrainer.log` has yet to log."""


class TrainingDiverged(UserError):
    """The loss or a weight is no longer finite; such weights are never saved."""


def learning_rate_share(step: int, settings: TrainingRecipe) -> float:
    """Learning rate of a step, 0 … steps - 1, as a share of the peak: a line up, a line down."""
    # From paper §3.3. Trainer's schedulers begin at 0 and end at 0, or one step later.
    start = settings.initial_learning_rate / settings.learning_rate
    warmup = round(settings.warmup_share * settings.steps)
    if step < warmup:
        return start + (1 - start) * step / warmup
    decay = max(settings.steps - 1 - warmup, 1)
    return 1 - (1 - settings.final_share) * min((step - warmup) / decay, 1.0)


def training_arguments(
    recipe: Recipe, stage: StageRecipe, folder: Path, processes: int = 1
) -> TrainingArguments:
    """Transformers' arguments for a stage in a folder; UserError if the recipe does not fit."""
    if processes == 1 and torch.cuda.device_count() > 1:
        raise UserError(
            f"one process cannot use {torch.cuda.device_count()} GPUs: start one process per GPU "
            "with accelerate launch, or select a GPU with CUDA_VISIBLE_DEVICES=0"
        )
    settings = stage.settings(recipe.training)
    per_pass = settings.micro_batch_size * processes
    if settings.global_batch_size % per_pass:
        raise UserError(
            "global_batch_size must be a multiple of micro_batch_size x processes; got "
            f"{settings.global_batch_size} and {settings.micro_batch_size} x {processes}"
        )
    known = _known_arguments(settings) | {
        "output_dir": str(folder / "checkpoints"),
        "gradient_accumulation_steps": settings.global_batch_size // per_pass,
    }
    if recipe.is_ordered:
        known["train_sampling_strategy"] = "sequential"
    if (every := recipe.validation.every) is not None:
        known |= {"eval_strategy": "steps", "eval_steps": every, "eval_on_start": True}
    if taken := sorted(set(known) & set(settings.trainer)):
        raise UserError(f"training.trainer repeats what the recipe sets itself: {', '.join(taken)}")
    try:
        arguments = TrainingArguments(**known, **settings.trainer)
    except (TypeError, ValueError, ImportError, OSError) as error:
        raise UserError(f"training.trainer: {error}") from error
    # For float32, Trainer would use the configuration of accelerate launch.
    names = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    arguments.mixed_precision = names[settings.precision]
    return arguments


def _known_arguments(settings: TrainingRecipe) -> dict[str, Any]:
    """Arguments that the section training determines, or that reliable checkpoints need."""
    # Renamed during Transformers 5.
    checkpointing = {"activation_checkpointing", "gradient_checkpointing"}
    names = checkpointing & {item.name for item in fields(TrainingArguments)}
    return {
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.micro_batch_size,
        "per_device_eval_batch_size": settings.micro_batch_size,
        "learning_rate": settings.learning_rate,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "bf16": settings.precision == "bfloat16",
        "fp16": settings.precision == "float16",
        "seed": settings.seed,
        "data_seed": settings.seed,
        "save_steps": settings.save_every,
        "save_total_limit": None,  # `_save_checkpoint` removes old ones
        "logging_steps": settings.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        # `shown` adds TensorBoard's callback, with the folder of the run.
        "report_to": [name for name in settings.report_to if name != "tensorboard"] or "none",
        "remove_unused_columns": False,
        "dataloader_drop_last": True,
        # A resumed run continues with the next block.
        "ignore_data_skip": False,
        min(names): settings.gradient_checkpointing,
        "torch_compile": settings.compile,
        "use_cpu": not torch.accelerator.is_available(),
    }


class RecipeTrainer(Trainer):
    """Trainer with the recipe's schedule, another loss and retrieval; it never saves NaN."""

    def __init__(
        self,
        settings: TrainingRecipe,
        arguments: TrainingArguments,
        *,
        loss: Loss | None = None,
        retrieval: Retrieval | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ) -> None:
        """UserError if Trainer rejects the settings."""
        self.settings, self.loss, self.retrieval = settings, loss, retrieval
        try:
            super().__init__(args=arguments, **kwargs)
        except (ValueError, ImportError, RuntimeError) as error:
            raise UserError(f"the Trainer rejects these settings: {error}") from error
        prepare_sharding(self.accelerator, arguments)
        if self.is_fsdp_enabled:
            # Accelerate leaves autocast to FSDP, whose casts `prepare_sharding` turns off.
            model: Any = self.model
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        if loss is not None:
            # The loss is a mean over the micro-batch, so Trainer has to divide by their number.
            self.model_accepts_loss_kwargs = False
        self.unlogged: Tensor | float = 0.0  # the sum of the losses since the last logged
        for default in (ProgressCallback, PrinterCallback):
            self.remove_callback(default)
        if self.train_dataset is not None:
            callbacks = (*shown(arguments, settings.report_to, retrieval), *callbacks)
        for callback in (LogLastStep(), *callbacks):
            self.add_callback(callback)

    def train_to_the_end(self, checkpoint: Path | None, before: TrainerState) -> float | None:
        """Train to the last step, from a checkpoint and its state.

        Returns:
            The seconds that it took, or None if nothing was left to train.

        Raises:
            Interrupted: If a signal ended training; the step is saved.
            UserError: If the checkpoint cannot be read, or Trainer rejects a setting.
        """
        steps, resume = self.settings.steps, None if checkpoint is None else str(checkpoint)
        if checkpoint is not None:
            check_kind(checkpoint, sharded=self.is_fsdp_enabled)
            self.args.eval_on_start = False
            self.unlogged = (before.stateful_callbacks or {}).get(UNLOGGED, 0.0)  # pyright: ignore
        if resume is not None and before.global_step == steps:
            # After a kill between the last step and the end, Trainer would do another step.
            self._load_from_checkpoint(resume)
            self.state = before
            return None
        stop = StopOnSignal(self.accelerator)
        self.add_callback(stop)
        try:
            with stop, no_progress_bars():
                result = self.train(resume_from_checkpoint=resume)
        except UserError:
            raise
        except (ValueError, TypeError, ImportError) as error:
            if not self.settings.trainer:
                raise
            raise UserError(f"training.trainer cannot be used: {error}") from error
        done = self.state.global_step
        if stop.requested():
            raise stop.interrupted(
                f"{Path(str(self.args.output_dir)).parent}: training ended after step {done:,} of "
                f"{steps:,}, which is saved; run the same command again to resume"
            )
        if done != steps:
            raise UserError(
                f"training stopped at step {done} of {steps}; run the same command again to resume"
            )
        return result.metrics["train_runtime"]

    # Methods that Trainer documents as those to override.

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LambdaLR:
        used: Any = optimizer or self.optimizer
        self.lr_scheduler = LambdaLR(used, lambda step: learning_rate_share(step, self.settings))
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            # Validation always measures the next-token loss, as a mean over the batch.
            kwargs.pop("num_items_in_batch", None)
            if not (inputs["shift_labels"] != -100).any():
                raise UserError(
                    "a block of the validation text has no token to predict: its documents are "
                    "empty; remove them, or set data.separate_documents to false"
                )
        elif (targets := kwargs.get("num_items_in_batch")) is not None:
            # Without any target, as between empty documents, the loss is 0 and not 0 / 0.
            kwargs["num_items_in_batch"] = torch.as_tensor(targets).clamp_min(1)
        if self.loss is None or not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        return self.loss(model, inputs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        loss = (output.metrics or {}).get("eval_loss", 0.0)
        if not loss < math.log(sys.float_info.max):  # nan, or no perplexity
            raise self._diverged(f"the validation loss is {loss}")
        if self.retrieval is not None and output.metrics is not None:
            shares = self.retrieval.shares(self.model)  # in evaluation mode after the loop
            output.metrics.update({f"eval_{name}": share for name, share in shares.items()})
        return output

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss).all():
            raise self._diverged(f"the loss is {loss.item()}")
        self.unlogged += loss
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer's own mean begins anew where a run resumes.
        if "loss" in logs:
            before = next((e["step"] for e in self.state.log_history[::-1] if "loss" in e), 0)
            logs["loss"] = self._sum_of_losses() / (self.state.global_step - before)
            self.unlogged = 0.0
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Trainer reads checkpoints by the names of the model's class, but a family's files can have
        # others (untied GPT-NeoX, experts). PEFT saves adapters alone.
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if sharded or not isinstance(self.model, PreTrainedModel):
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            folder = output_dir or str(self.args.output_dir)
            self.model.save_pretrained(folder, save_original_format=False)

    # Private methods: Trainer has no public hook that can stop a checkpoint, none before its state
    # is written, and none around reading. tests/lab/training/test_trainer.py notices changes.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """With finite weights alone, whole on the disk before others go, and errors in words."""
        folder = Path(str(self.args.output_dir))
        self._check_finite()
        kept: Any = self.state.stateful_callbacks
        kept[UNLOGGED] = self._sum_of_losses()
        with catch_write_errors(folder, self.describe_saved):
            with writing_checkpoint(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"):
                super()._save_checkpoint(model, trial)
            if self.is_world_process_zero():
                for path in sorted_checkpoints(folder)[self.settings.keep_checkpoints :]:
                    if str(path) != self.state.best_model_checkpoint:
                        shutil.rmtree(path, ignore_errors=True)

    _load_from_checkpoint = reads_checkpoint(Trainer._load_from_checkpoint)
    _load_optimizer_and_scheduler = reads_checkpoint(Trainer._load_optimizer_and_scheduler)
    _load_scaler = reads_checkpoint(Trainer._load_scaler)
    _load_rng_state = reads_checkpoint(Trainer._load_rng_state)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise ValueError where Trainer warns: weights that were not read would be random."""
        # Tied weights are saved once, so the others of their names are always missing.
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        for name in [*missing, *load_result.unexpected_keys][:1]:
            raise ValueError(f"{name} is in one of checkpoint and model only")

    def save_trained(
        self, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype | None
    ) -> None:
        """Merge adapters and save the model in a dtype, with its tokenizer, whole or not at all."""
        partial, model = folder / ".model.partial", self.accelerator.unwrap_model(self.model)
        with no_progress_bars(), catch_write_errors(folder, self.describe_saved):
            if hasattr(model, "merge_and_unload"):
                model = self.model = model.merge_and_unload()
            self._check_finite()
            weights: Any = self.accelerator.get_state_dict(self.model)
            # Gathered or cast they no longer share memory, so tied ones would be saved twice.
            tied: Any = getattr(model, "all_tied_weights_keys", {})
            weights = {name: weight for name, weight in weights.items() if name not in tied}
            weights = weights if dtype is None else _cast(weights, dtype)
            if not self.is_world_process_zero():
                return
            shutil.rmtree(partial, ignore_errors=True)
            model.save_pretrained(partial, state_dict=weights)
            if dtype is not None:
                model.config.dtype = dtype
                model.config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for path in partial.iterdir():
                if path.is_dir():  # chat templates; a folder takes the place of an empty one alone
                    shutil.rmtree(folder / path.name, ignore_errors=True)
                replace(path, folder / path.name)
            partial.rmdir()

    def _check_finite(self) -> None:
        """Raise TrainingDiverged, in all processes, if a weight is not finite in one of them."""
        assert self.model is not None  # given to __init__
        # After a step with a finite loss, weights can still have overflowed.
        parts = {
            name: weight.to_local() if isinstance(weight, DTensor) else weight
            for name, weight in self.model.named_parameters()
        }
        bad = [name for name, part in parts.items() if not torch.isfinite(part).all()]
        for name in gather_object(bad)[:1]:
            raise self._diverged(f"{name} has values that are not finite")

    def _sum_of_losses(self) -> float:
        """The losses since the last that was logged, a mean over the processes."""
        losses = torch.as_tensor(self.unlogged, device=self.args.device)
        gathered: Any = self.accelerator.gather(losses)
        return gathered.mean().item()

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"{what} at step {self.state.global_step + 1}: training stopped, "
            f"{self.describe_saved()}. Try a lower learning rate, a longer warm-up or precision "
            "float32"
        )

    def measured(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """``perplexity`` and, if prompts were asked, ``retrieval`` from what validation logs."""
        measured: dict[str, Any] = {"perplexity": math.exp(metrics["eval_loss"])}
        if self.retrieval is not None:
            names = self.retrieval.questions
            measured["retrieval"] = {name: metrics[f"eval_{name}"] for name in names}
        return measured

    def curves(self) -> dict[str, list[dict[str, Any]]]:
        """``curve``, the loss and the learning rate by step, and ``validation``, see `measured`."""
        history, names = self.state.log_history, ("step", "loss", "learning_rate")
        return {
            "curve": [{name: e[name] for name in names} for e in history if "loss" in e],
            "validation": [
                {"step": e["step"], **self.measured(e)} for e in history if "eval_loss" in e
            ],
        }

    def describe_saved(self) -> str:
        """The last checkpoint of the run, for error messages."""
        last = last_checkpoint(Path(str(self.args.output_dir)))
        return f"the last good checkpoint is {last}" if last else "no checkpoint was saved yet"


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in another precision; UserError if it cannot hold one of them."""
    cast = {n: w.to(dtype) if w.is_floating_point() else w for n, w in weights.items()}
    for name, weight in cast.items():
        if not torch.isfinite(weight).all():
            raise UserError(
                f"{name} has values too large for {str(dtype).removeprefix('torch.')}: set "
                "model.dtype to bfloat16 or float32, and run the same command again"
            )
    return cast


def prepare_sharding(accelerator: Accelerator, arguments: TrainingArguments) -> None:
    """Adjust a new Accelerator where FSDP is configured; UserError if it cannot be used so."""
    parallel = accelerator.parallelism_config
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    is_sharded = launched or arguments.fsdp_plugin_args is not None
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None) if is_sharded else None
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise UserError(
            "coca train reads other blocks in every process: set cp_size, sp_size and tp_size of "
            "parallelism_config to 1, and shard the weights by FSDP2 instead"
        )
    if not is_sharded:
        return
    if plugin is None:
        raise UserError(
            "FSDP is configured but there is no process per GPU: start with accelerate launch "
            "--config_file recipes/accelerate/NAME.yaml, on a machine with GPUs"
        )
    if arguments.torch_compile:
        raise UserError("training.compile cannot be combined with FSDP: leave one of them out")
    if plugin.fsdp_version != 2:
        raise UserError(
            f"FSDP version {plugin.fsdp_version} is not supported: set fsdp_version: 2 in the "
            "configuration of accelerate launch"
        )
    if plugin.cpu_ram_efficient_loading:
        raise UserError(
            "cpu_ram_efficient_loading leaves the weights empty on all processes except the first, "
            "but each has to convert its start and load its teacher: set "
            "fsdp_cpu_ram_efficient_loading: false"
        )
    if plugin.activation_checkpointing:
        raise UserError(
            "activation checkpointing is controlled by the recipe: set "
            "fsdp_activation_checkpointing: false, and training.gradient_checkpointing"
        )
    # Autocast in place of FSDP's casts, which would round cos and sin. Its cache would keep the
    # weights that are freed after each layer.
    plugin.mixed_precision_policy = None
    accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)  # pyright: ignore
    # Gradients are sharded after every micro-batch, so accumulation never holds a full copy.
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


def check_kind(checkpoint: Path, sharded: bool) -> None:
    """Raise UserError unless a checkpoint was written as this run is: with FSDP, or without."""
    if sharded != any(checkpoint.glob(f"{FSDP_MODEL_NAME}*")):
        written, now = ("without", "with") if sharded else ("with", "without")
        raise UserError(
            f"{checkpoint} was written {written} FSDP, and this run is {now} it: resume it as it "
            "was started, or start over in another --output"
        )
