"""Transformers' Trainer with the paper's schedule, stops at NaN or a signal, reliable files."""

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
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
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from coca_attention.errors import UserError
from coca_lab.files import put_in_place
from coca_lab.loading import without_warnings
from coca_lab.recipe_sections import TrainingRecipe
from coca_lab.training.folder import (
    Summary,
    catch_write_errors,
    check_complete,
    last_checkpoint,
    reads_checkpoint,
    sorted_checkpoints,
    writing_checkpoint,
)
from coca_lab.training.objectives import Loss
from coca_lab.training.retrieval import Retrieval
from coca_lab.training.sharding import check_kind, prepare_sharding

UNLOGGED, PROCESSES = "unlogged", "processes"
"""In the state of a checkpoint, the losses that `RecipeTrainer.log` has yet to log, and how many
processes have written it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL = 1.0
"""Seconds within which further signals count as the first: torchrun passes Ctrl-C on to processes
that the terminal has already sent it to."""


class TrainingDiverged(UserError):
    """The loss or a weight is no longer finite; such weights are never saved."""


class Interrupted(KeyboardInterrupt):
    """A signal has ended the work and determines the exit code; the message says what is saved."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal = number


class StopOnSignal(TrainerCallback):
    """In its ``with`` block, a signal ends training after the step, which is saved."""

    # All processes stop after the same step, whichever of them received the signal; a second one
    # raises `Interrupted` at once.
    # Transformers' `enable_jit_checkpoint` reacts to SIGTERM alone, after three seconds, and may
    # save before the optimizer's step, when the random state is already that of the next.

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal: int | None = None
        self.stopped = False

    def __enter__(self) -> "StopOnSignal":
        main = threading.current_thread() is threading.main_thread()
        self.before = {n: signal.signal(n, self._receive) for n in SIGNALS if main}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.since = now
            self.signal = number
            if self.accelerator.is_main_process:
                # Not by print, which the signal may have interrupted.
                text = "\ncoca: training ends after this step; once more ends it at once\n"
                os.write(2, text.encode())
        elif now - self.since >= ONE_SIGNAL:
            raise Interrupted(
                "training ended within a step; the same command continues from the last "
                "checkpoint, if there is one",
                number,
            )

    def requested(self) -> bool:
        """Whether any process has received a signal; all processes have to ask."""
        if not self.stopped:
            if self.signal is not None:
                self.accelerator.set_trigger()
            self.stopped = self.accelerator.check_trigger()
        return self.stopped

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.requested():
            control.should_save = control.should_training_stop = True

    on_evaluate = on_step_end  # before the step's checkpoint would be saved


def learning_rate_share(step: int, settings: TrainingRecipe) -> float:
    """Learning rate of a step, 0 … steps - 1, as a share of the peak: a line up, a line down."""
    # From paper §3.3. Trainer's schedulers begin at 0 and end at 0, or one step later.
    start = settings.initial_learning_rate / settings.learning_rate
    warmup = round(settings.warmup_share * settings.steps)
    if step < warmup:
        return start + (1 - start) * step / warmup
    decay = max(settings.steps - 1 - warmup, 1)
    return 1 - (1 - settings.final_share) * min((step - warmup) / decay, 1.0)


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
        self.settings = settings
        self.loss = loss
        self.retrieval = retrieval
        try:
            super().__init__(args=arguments, **kwargs)
        except (ValueError, ImportError, RuntimeError) as error:
            raise UserError(f"the Trainer rejects these settings: {error}") from error
        launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        sharded = launched or arguments.fsdp_plugin_args is not None
        if sharded or self.accelerator.parallelism_config is not None:
            prepare_sharding(self.accelerator, arguments, sharded)
        if self.is_fsdp_enabled:
            # Accelerate leaves autocast to FSDP, whose casts `prepare_sharding` turns off.
            assert self.model is not None
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        if loss is not None:
            # The loss is a mean over the micro-batch, so Trainer has to divide by their number.
            self.model_accepts_loss_kwargs = False
        self.unlogged: Tensor | float = 0.0  # the sum of the losses since the last logged
        self.validated: list[Tensor] = []  # of every batch of a validation, nats and targets
        for default in (ProgressCallback, PrinterCallback):
            self.remove_callback(default)
        for callback in callbacks:
            self.add_callback(callback)

    def train_to_the_end(self, checkpoint: Path | None, before: TrainerState) -> float | None:
        """Train to the last step, from a checkpoint and its state.

        Returns:
            The seconds that it took, or None if nothing was left to train.

        Raises:
            Interrupted: If a signal ended training; the step is saved.
            UserError: If the checkpoint cannot be read, or Trainer rejects a setting.
        """
        steps = self.settings.steps
        resume = None if checkpoint is None else str(checkpoint)
        if checkpoint is not None:
            check_kind(checkpoint, sharded=self.is_fsdp_enabled)
            self.args.eval_on_start = False
            self.unlogged = (before.stateful_callbacks or {}).get(UNLOGGED, 0.0)  # pyright: ignore
        if resume is not None and before.global_step == steps:
            # After a kill between the last step and the end, Trainer would do another step.
            self._load_from_checkpoint(resume)
            self.state = before
            return None
        if checkpoint is not None:
            kept: Any = before.stateful_callbacks or {}
            check_complete(checkpoint, self, kept.get(PROCESSES))
        stop = StopOnSignal(self.accelerator)
        self.add_callback(stop)
        try:
            with stop:
                result = self.train(resume_from_checkpoint=resume)
        except UserError:
            raise
        except (ValueError, TypeError, ImportError) as error:
            if not self.settings.trainer:
                raise
            raise UserError(f"training.trainer cannot be used: {error}") from error
        done = self.state.global_step
        if stop.requested():
            raise Interrupted(
                f"{Path(str(self.args.output_dir)).parent}: training ended after step {done:,} of "
                f"{steps:,}, which is saved; run the same command again to resume",
                stop.signal or signal.SIGTERM,  # which another process received
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

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            # Validation always measures the next-token loss, over all tokens (`evaluation_loop`).
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            targets = (inputs["shift_labels"] != -100).sum()
            loss = torch.where(targets > 0, loss.float(), 0.0)  # and not 0 / 0 without any target
            self.validated.append(torch.stack((loss.detach() * targets, targets.float())))
            return (loss, outputs) if return_outputs else loss
        if self.loss is not None:
            return self.loss(model, inputs)
        if num_items_in_batch is not None:
            # Without any target, as between empty documents, the loss is 0 and not 0 / 0.
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp_min(1)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self.validated.clear()
        output = super().evaluation_loop(*args, **kwargs)
        # Trainer has the mean of the batches, which may have different numbers of targets.
        read = self.accelerator.gather(torch.stack(self.validated).sum(0).unsqueeze(0))
        nats, targets = torch.as_tensor(read).double().sum(0).tolist()
        if not targets:
            raise UserError(
                "the validation text has no token to predict: its documents are empty; remove "
                "them, or set data.separate_documents to false"
            )
        loss = nats / targets
        if not loss < math.log(sys.float_info.max):  # nan, or no perplexity
            raise self._diverged(f"the validation loss is {loss}")
        assert output.metrics is not None
        output.metrics["eval_loss"] = loss
        if self.retrieval is not None:
            shares = self.retrieval.shares(self.model)  # in evaluation mode after the loop
            output.metrics.update({f"eval_{name}": share for name, share in shares.items()})
        return output

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
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

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """With finite weights alone, whole on the disk before others go, and errors in words."""
        folder = Path(str(self.args.output_dir))
        self._check_finite()
        kept: Any = self.state.stateful_callbacks
        kept[UNLOGGED] = self._sum_of_losses()
        kept[PROCESSES] = self.args.world_size
        with catch_write_errors(folder, self.describe_saved):
            with writing_checkpoint(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"):
                super()._save_checkpoint(model, trial)
            if self.is_world_process_zero():
                for path in sorted_checkpoints(folder)[self.settings.keep_checkpoints :]:
                    if str(path) != self.state.best_model_checkpoint:
                        shutil.rmtree(path, ignore_errors=True)

    @reads_checkpoint
    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # Trainer reads the configuration as of no family, and would warn of the fields of roles.
        with without_warnings("transformers.modeling_rope_utils"):
            super()._load_from_checkpoint(*args, **kwargs)

    _load_optimizer_and_scheduler = reads_checkpoint(Trainer._load_optimizer_and_scheduler)
    _load_scaler = reads_checkpoint(Trainer._load_scaler)
    _load_rng_state = reads_checkpoint(Trainer._load_rng_state)

    def _issue_warnings_after_load(self, load_result: _IncompatibleKeys) -> None:
        """Raise ValueError where Trainer warns: weights that were not read would be random."""
        # Tied weights are saved once, so the others of their names are always missing.
        assert self.model is not None  # given to __init__
        tied = tied_names(self.model)
        missing = [name for name in load_result.missing_keys if name not in tied]
        for name in [*missing, *load_result.unexpected_keys][:1]:
            raise ValueError(f"{name} is in one of checkpoint and model only")

    def save_trained(
        self, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype | None
    ) -> None:
        """Merge adapters and save the model in a dtype, with its tokenizer, whole or not at all."""
        partial = folder / ".model.partial"
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "merge_and_unload"):
            model = self.model = model.merge_and_unload()
        self._check_finite()
        weights: Any = self.accelerator.get_state_dict(self.model)
        # Gathered or cast they no longer share memory, so tied ones would be saved twice.
        tied = tied_names(model)
        weights = {name: weight for name, weight in weights.items() if name not in tied}
        if dtype is not None:
            weights = {
                name: weight.to(dtype) if weight.is_floating_point() else weight
                for name, weight in weights.items()
            }
            for name, weight in weights.items():
                if not torch.isfinite(weight).all():
                    raise UserError(
                        f"{name} has values too large for {str(dtype).removeprefix('torch.')}: set "
                        "model.dtype to bfloat16 or float32, and run the same command again"
                    )
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
            put_in_place(path, folder / path.name)
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
        return torch.as_tensor(self.accelerator.gather(losses)).mean().item()

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"{what} at step {self.state.global_step + 1}: training stopped, "
            f"{self.describe_saved()}. Try a lower learning rate, a longer warm-up or precision "
            "float32"
        )

    def measured(self, metrics: dict[str, float]) -> Summary:
        """``perplexity`` and, if prompts were asked, ``retrieval`` from what validation logs."""
        measured: Summary = {"perplexity": math.exp(metrics["eval_loss"])}
        if self.retrieval is not None:
            names = self.retrieval.questions
            measured["retrieval"] = {name: metrics[f"eval_{name}"] for name in names}
        return measured

    def curves(self) -> dict[str, list[Summary]]:
        """``curve``, the loss and the learning rate by step, and ``validation``, see `measured`."""
        history = self.state.log_history
        names = ("step", "loss", "learning_rate")
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


def tied_names(model: nn.Module) -> set[str]:
    """Names of weights that are another one's tensor, under whose name it is saved."""
    # A configuration may say that two are tied which are not.
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    weights = dict(model.named_parameters(remove_duplicate=False))
    return {name for name in tied if name in weights and weights[name] is weights.get(tied[name])}
