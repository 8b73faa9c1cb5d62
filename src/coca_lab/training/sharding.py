"""FSDP2: what a run needs beyond the configuration of Accelerate.

The weights, gradients and optimizer states of a sharded run are distributed over its processes. Its
checkpoints are those of torch.distributed.checkpoint: every process writes its own part, and any
number of processes, sharded or not, can read them.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, ParallelismConfig, PartialState
from accelerate.utils import (
    AutocastKwargs,
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
)
from accelerate.utils.constants import FSDP_MODEL_NAME
from accelerate.utils.dataclasses import get_module_class_from_name
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainingArguments

from coca_attention.errors import UserError
from coca_lab.training.sections import refuse


def uses_fsdp(arguments: TrainingArguments) -> bool:
    """Whether the Trainer's arguments or ``accelerate launch`` request FSDP."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return launched or arguments.fsdp_plugin_args is not None


def prepare_sharding(
    accelerator: Accelerator, arguments: TrainingArguments
) -> FullyShardedDataParallelPlugin | None:
    """Set up a new Accelerator for FSDP2 if the configuration requests it.

    Args:
        accelerator: Modified in place.
        arguments: The Trainer's.

    Returns:
        The configuration of the sharding, or None without FSDP.

    Raises:
        UserError: If the configuration is not supported.
    """
    if not uses_fsdp(arguments):
        return None
    if arguments.torch_compile:
        raise UserError("training.compile cannot be combined with FSDP: leave one of them out")
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate ignores FSDP on CPUs, where PyTorch supports it as on GPUs.
        options: Any = arguments.fsdp_plugin_args or {}
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        raise UserError(
            "FSDP is configured but there is no process group: start with accelerate launch "
            "--config_file recipes/accelerate/NAME.yaml"
        )
    plugin: FullyShardedDataParallelPlugin = state.fsdp_plugin
    check_options(plugin)
    # Always the kind of checkpoint that does not gather the whole state in one process.
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    # Use autocast instead, so that a run computes the same on one process and on many. Its cache
    # would keep the weights that should be freed after each layer.
    plugin.mixed_precision_policy = None
    handler: Any = AutocastKwargs(cache_enabled=False)
    accelerator.autocast_handler = handler
    # Gradients are sharded after every micro-batch, so accumulation never holds a full copy.
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    return plugin


def check_parallelism(parallel: ParallelismConfig | None) -> None:
    """Raise UserError if processes would share sequences or layers: every one is a replica here."""
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise UserError(
            "coca train reads other blocks in every process: set cp_size, sp_size and tp_size of "
            "parallelism_config to 1, and shard the weights by FSDP2 instead"
        )


def check_options(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise UserError if the configuration of FSDP is not supported."""
    refuse(
        {
            f"FSDP version {plugin.fsdp_version} is not supported: set fsdp_version: 2 in the "
            "configuration of accelerate launch": plugin.fsdp_version != 2,
            "cpu_ram_efficient_loading leaves the weights empty on all processes except the first, "
            "but each has to convert its start and load its teacher: set "
            "fsdp_cpu_ram_efficient_loading: false": plugin.cpu_ram_efficient_loading,
            "activation checkpointing is controlled by the recipe: set "
            "fsdp_activation_checkpointing: false, and training.gradient_checkpointing": (
                plugin.activation_checkpointing
            ),
        }
    )


def check_layers(plugin: FullyShardedDataParallelPlugin, model: PreTrainedModel) -> None:
    """Raise UserError unless FSDP knows which layers to gather one at a time."""
    policy = plugin.auto_wrap_policy
    if policy is None:
        raise UserError(
            "FSDP would gather the whole model at once: set fsdp_auto_wrap_policy: "
            "TRANSFORMER_BASED_WRAP"
        )
    if getattr(policy, "__name__", "") != "transformer_auto_wrap_policy":
        return
    names = plugin.transformer_cls_names_to_wrap
    if names is None:
        names = sorted(model._no_split_modules or ())
    unknown = [name for name in names if get_module_class_from_name(model, name) is None]
    if unknown or not names:
        what = f"has no layers called {', '.join(unknown)}" if unknown else "names no layers"
        raise UserError(
            f"{type(model).__name__} {what} for FSDP to gather one at a time: set "
            "fsdp_transformer_layer_cls_to_wrap to the class of its layers"
        )


def own_part(weight: Tensor) -> Tensor:
    """The part of a weight on this process."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint was written in parts, by FSDP2."""
    return (checkpoint / f"{FSDP_MODEL_NAME}_0").is_dir()


def check_kind(checkpoint: Path, sharded: bool) -> None:
    """Raise UserError if a sharded run would resume from an unsharded checkpoint."""
    if sharded and not is_sharded(checkpoint):
        raise UserError(
            f"{checkpoint} was written without FSDP, and this run is sharded: resume without FSDP "
            "(with torchrun, or a configuration with MULTI_GPU), or start over in another --output"
        )


@contextmanager
def catch_read_errors(checkpoint: Path) -> Iterator[None]:
    """Turn errors in reading a checkpoint into a UserError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        cause = first_failure(error) if isinstance(error, CheckpointException) else error
        # What PyTorch says of a damaged file is advice to run code in it.
        safe = not isinstance(cause, UnpicklingError)
        reason = f" ({' '.join(str(cause).split())[:500]})" if safe else ""
        raise UserError(
            f"{checkpoint} cannot be read{reason}: restore its files, or remove the folder to "
            "resume from the previous checkpoint"
        ) from error


def first_failure(error: CheckpointException) -> BaseException:
    """The failure of the first process that failed; all of them raise the same exception."""
    return next(iter(error.failures.values()))[0] if error.failures else error


def load_parts(accelerator: Accelerator, model: Any, checkpoint: Path) -> None:
    """Load the weights of a sharded checkpoint into an unsharded model."""
    load_fsdp_model(_parts(), accelerator, model, str(checkpoint), adapter_only=True)


def load_optimizer_parts(
    accelerator: Accelerator, optimizer: Any, model: Any, checkpoint: Path
) -> None:
    """Load the optimizer states of a sharded checkpoint for an unsharded model."""
    load_fsdp_optimizer(_parts(), accelerator, optimizer, model, str(checkpoint), adapter_only=True)


def _parts() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
