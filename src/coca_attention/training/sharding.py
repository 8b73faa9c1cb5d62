"""FSDP2 through Accelerate: what a run needs beyond the configuration of ``accelerate launch``.

The weights, gradients and optimizer states of a sharded run are spread over its processes. Its
checkpoints are those of torch.distributed.checkpoint: each process writes its part, and any number
of processes, sharded or not, reads what it needs.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType, PartialState
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


def prepare_sharding(
    accelerator: Accelerator, arguments: TrainingArguments
) -> FullyShardedDataParallelPlugin | None:
    """Make a new Accelerator ready for FSDP2 where it was asked for.

    Args:
        accelerator: Changed in place.
        arguments: The Trainer's.

    Returns:
        What says how the run is sharded; None where it is not.

    Raises:
        UserError: If it was asked for in a way that cannot be followed.
    """
    options: Any = arguments.fsdp_plugin_args
    if options is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate leaves a plugin aside on CPUs, where PyTorch shards as it does on GPUs.
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**(options or {}))
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        raise UserError(
            "FSDP was asked for and there is no process group: start with accelerate launch "
            "--config_file recipes/accelerate/NAME.yaml"
        )
    plugin: FullyShardedDataParallelPlugin = state.fsdp_plugin
    check_options(plugin)
    # One kind of checkpoint, which does not gather the whole state in one process.
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    # Autocast in its place, so that a run computes the same on one process and on many. Its cache
    # would hold the weights that are to be freed after each layer.
    plugin.mixed_precision_policy = None
    handler: Any = AutocastKwargs(cache_enabled=False)
    accelerator.autocast_handler = handler
    # Otherwise the gradients of all weights would be held whole until the last pass of a step.
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    return plugin


def check_options(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise UserError unless a run can be sharded so."""
    if plugin.fsdp_version != 2:
        raise UserError(
            f"FSDP version {plugin.fsdp_version} was asked for and 2 is what is known here: set "
            "fsdp_version: 2 in the configuration of accelerate launch"
        )
    if plugin.cpu_ram_efficient_loading:
        raise UserError(
            "cpu_ram_efficient_loading leaves the weights of all processes but the first empty, "
            "and each has to convert its start and load its teacher: set "
            "fsdp_cpu_ram_efficient_loading: false"
        )
    if plugin.activation_checkpointing:
        raise UserError(
            "activation checkpointing is the recipe's to say: set "
            "fsdp_activation_checkpointing: false, and training.gradient_checkpointing"
        )


def check_layers(plugin: FullyShardedDataParallelPlugin, model: PreTrainedModel) -> None:
    """Raise UserError unless the layers are named that are gathered one after the other."""
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
            f"a {type(model).__name__} {what} for FSDP to gather one after the other: set "
            "fsdp_transformer_layer_cls_to_wrap to the class of its layers"
        )


def own_part(weight: Tensor) -> Tensor:
    """What this process holds of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint is in parts."""
    return (checkpoint / f"{FSDP_MODEL_NAME}_0").is_dir()


def check_kind(checkpoint: Path, sharded: bool) -> None:
    """Raise UserError if a sharded run is to go on from a checkpoint that is not in parts."""
    if sharded and not is_sharded(checkpoint):
        raise UserError(
            f"{checkpoint} was written without FSDP, and this run is sharded: go on without FSDP "
            "(with torchrun, or a configuration of MULTI_GPU), or begin anew in another --output"
        )


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turn what fails with a part of a checkpoint into a UserError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise UserError(
            f"{checkpoint} cannot be read ({first_failure(error)}): bring its files back, or "
            "remove the folder to go on from the checkpoint before it"
        ) from error


def first_failure(error: CheckpointException) -> BaseException:
    """Why the first of the processes that failed did so; all of them raise the same exception."""
    return next(iter(error.failures.values()))[0] if error.failures else error


def load_parts(accelerator: Accelerator, model: Any, checkpoint: Path) -> None:
    """Read the weights of a checkpoint in parts into a model that is whole."""
    load_fsdp_model(_parts(), accelerator, model, str(checkpoint), adapter_only=True)


def load_optimizer_parts(
    accelerator: Accelerator, optimizer: Any, model: Any, checkpoint: Path
) -> None:
    """Read the optimizer's states of a checkpoint in parts for a model that is whole."""
    load_fsdp_optimizer(_parts(), accelerator, optimizer, model, str(checkpoint), adapter_only=True)


def _parts() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
