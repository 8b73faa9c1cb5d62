"""FSDP2, which needs more than the configuration of Accelerate."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers import TrainingArguments

from coca_attention.errors import UserError


def prepare_sharding(
    accelerator: Accelerator, arguments: TrainingArguments, is_sharded: bool
) -> None:
    """Adjust a new Accelerator where FSDP is configured; UserError if it cannot be used so."""
    parallel = accelerator.parallelism_config
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
