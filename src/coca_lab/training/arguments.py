"""Transformers' TrainingArguments of a stage: what the recipe sets, and what it leaves open.

A field of TrainingArguments is set by the recipe, or a recipe may set it in ``training.trainer``
(`FREE`), or it is refused: what Transformers adds is refused until its effect was tested here.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from coca_attention.errors import UserError, did_you_mean
from coca_lab.recipe import Recipe
from coca_lab.recipe_sections import TrainingRecipe

SCHEDULE = "training.warmup_share, initial_learning_rate and final_share"
INSTEAD = {
    "output_dir": "--output",
    "max_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "per_device_train_batch_size": "training.micro_batch_size",
    "per_device_eval_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size and micro_batch_size",
    "auto_find_batch_size": "training.micro_batch_size",
    "lr_scheduler_type": SCHEDULE,
    "lr_scheduler_kwargs": SCHEDULE,
    "warmup_steps": SCHEDULE,
    "adam_beta1": "training.beta1",
    "adam_beta2": "training.beta2",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "data_seed": "training.seed",
    "save_strategy": "training.save_every",
    "save_steps": "training.save_every",
    "save_total_limit": "training.keep_checkpoints",
    "logging_strategy": "training.log_every",
    "logging_steps": "training.log_every",
    "eval_strategy": "validation.every",
    "eval_steps": "validation.every",
    "activation_checkpointing": "training.gradient_checkpointing",
    "torch_compile": "training.compile",
}
"""Fields of the recipe for those of TrainingArguments that have another name there."""

COMPILES = "training.compile: true"
CHECKPOINTS = "training.gradient_checkpointing: true"
SHARDS = "fsdp beside it"
FREE: dict[str, str] = {
    "optim": "",
    "optim_args": "",
    "adam_epsilon": "",
    "neftune_noise_alpha": "",
    "tf32": "",
    "full_determinism": "",
    "torch_empty_cache_steps": "",
    "torch_compile_backend": COMPILES,
    "torch_compile_mode": COMPILES,
    "activation_checkpointing_kwargs": CHECKPOINTS,
    "gradient_checkpointing_kwargs": CHECKPOINTS,
    "dataloader_num_workers": "",
    "dataloader_pin_memory": "",
    "dataloader_persistent_workers": "",
    "dataloader_prefetch_factor": "",
    "dataloader_multiprocessing_context": "",
    "ddp_find_unused_parameters": "",
    "ddp_bucket_cap_mb": "",
    "ddp_broadcast_buffers": "",
    "ddp_static_graph": "",
    "fsdp": "",
    "fsdp_config": SHARDS,
    "deepspeed": "",
    "disable_tqdm": "",
    "run_name": "",
}
"""Fields that ``training.trainer`` may set, with what else has to be set for an effect."""
OF_OPTIMIZERS = ("optim_args", "adam_epsilon")
"""Those that some optimizers do not read."""


def training_arguments(
    recipe: Recipe, settings: TrainingRecipe, folder: Path, processes: int = 1
) -> TrainingArguments:
    """Transformers' arguments for a stage's settings; UserError if the recipe does not fit."""
    per_pass = settings.micro_batch_size * processes
    every = recipe.validation.every
    if settings.global_batch_size % per_pass:
        raise UserError(
            "`global_batch_size` must be a multiple of `micro_batch_size` x processes; got "
            f"{settings.global_batch_size} and {settings.micro_batch_size} x {processes}"
        )
    # Renamed during Transformers 5.
    checkpointing = {"activation_checkpointing", "gradient_checkpointing"}
    names = checkpointing & {item.name for item in fields(TrainingArguments)}
    # What the section training determines, or reliable checkpoints need.
    known: dict[str, Any] = {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.micro_batch_size,
        "per_device_eval_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.global_batch_size // per_pass,
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
    if recipe.is_ordered:
        known["train_sampling_strategy"] = "sequential"
    if every is not None:
        known |= {"eval_strategy": "steps", "eval_steps": every, "eval_on_start": True}
    check_free(settings, known)
    arguments = _made(known, settings.trainer)
    check_effect(known, settings.trainer, arguments)
    # For float32, Trainer would use the configuration of accelerate launch.
    casts = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    arguments.mixed_precision = casts[settings.precision]
    return arguments


def _made(known: Mapping[str, Any], given: Mapping[str, Any]) -> TrainingArguments:
    try:
        # A copy, because Transformers changes what it is given.
        return TrainingArguments(**known, **deepcopy(dict(given)))
    except (TypeError, ValueError, ImportError, OSError) as error:
        raise UserError(f"training.trainer: {error}") from error


def check_free(settings: TrainingRecipe, known: Mapping[str, Any]) -> None:
    """Raise UserError if ``trainer`` has a field that the recipe sets, or that has no effect."""
    present = {item.name for item in fields(TrainingArguments)}
    conditions = {
        COMPILES: settings.compile,
        CHECKPOINTS: settings.gradient_checkpointing,
        SHARDS: bool(settings.trainer.get("fsdp")),
    }
    ours = {item.name for item in fields(TrainingRecipe)}
    for name in settings.trainer:
        if name not in present:
            hint = did_you_mean(name, FREE)
            raise UserError(f"training.trainer: TrainingArguments has no field {name}{hint}")
        instead = f"training.{name}" if name in ours else INSTEAD.get(name)
        if instead is not None:
            raise UserError(f"training.trainer: the recipe sets {name} itself; set {instead}")
        if name in known or name not in FREE:
            taken = ", ".join(free for free in FREE if free in present)
            raise UserError(
                f"training.trainer: coca train sets {name} itself, or does nothing with it; what "
                f"can be set there is {taken}"
            )
        needs = FREE[name]
        if needs and not conditions[needs]:
            raise UserError(f"training.trainer: {name} has no effect without {needs}")


def check_effect(
    known: Mapping[str, Any], given: Mapping[str, Any], arguments: TrainingArguments
) -> None:
    """Raise UserError if a field changes what the recipe sets, or if an optimizer ignores it."""
    if not given:
        return
    plain = _made(known, {})
    for name in known:
        if getattr(arguments, name) != getattr(plain, name):
            raise UserError(
                f"training.trainer changes {name} from {getattr(plain, name)}, which the recipe "
                f"sets, to {getattr(arguments, name)}: leave out {', '.join(given)}"
            )
    optimizer = _optimizer(arguments)
    for name in OF_OPTIMIZERS:
        if name in given and getattr(arguments, name) != getattr(plain, name):
            without = {other: value for other, value in given.items() if other != name}
            if _optimizer(_made(known, without)) == optimizer:
                kind = getattr(arguments.optim, "value", arguments.optim)
                raise UserError(f"training.trainer: optimizer {kind} has no use for {name}")


def _optimizer(arguments: TrainingArguments) -> tuple[Any, Any]:
    """The class of an optimizer and its settings; UserError if it cannot be made."""
    try:
        return Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"training.trainer: {error}") from error
