"""A recipe's settings as Transformers' arguments, and the paper's schedule."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from coca_attention.errors import UserError
from coca_lab.recipe import Recipe
from coca_lab.recipe_sections import StageRecipe, TrainingRecipe


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
