"""Loading a model from a folder or by name; incomplete weights are an error."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import logging as transformers_logging

import coca_lab.baselines  # noqa: F401 (registers them with Transformers)
from coca_attention.errors import UserError
from coca_attention.models.context_parallel import split_sequences
from coca_attention.models.hub import check_name
from coca_lab.settings import CONTEXT_PARALLEL, TENSOR_PARALLEL

log = logging.getLogger(__name__)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable Transformers' progress bars for reading and writing files."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | None = None,
    any_head: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode.

    Tensors are read from the files one by one, each right onto its device and in its dtype: memory
    holds no second copy of the model, and a GPU's model is never in the CPU's memory.

    Args:
        path: Folder of a Transformers model, or a name that Transformers resolves.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for that of the files.
        device: ``cpu``, ``cuda``, …; ``auto`` spreads layers over all accelerators, and what does
            not fit over the CPU's memory; ``tensor-parallel`` splits every layer among the
            processes of a launch, and ``context-parallel`` every text (`split_sequences`); they
            have to make the same calls. Default: the accelerator if available.
        any_head: Load the class that was saved, for example a sequence classifier.

    Raises:
        UserError: If there is no model, its files are damaged, or weights are missing.
    """
    path = str(path)
    split = device == CONTEXT_PARALLEL
    if device is None or split:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else "cpu"
        if split:
            _check_launch(CONTEXT_PARALLEL)
            device += f":{os.environ['LOCAL_RANK']}" if accelerator is not None else ""
    spread = _spread(device)
    own = None if spread else usable_device(device)
    if own is not None and own.type != "cpu" and not is_deepspeed_zero3_enabled():
        spread = {"device_map": {"": own}}
    with _naming(path), no_progress_bars():
        auto = _auto_class(path) if any_head else AutoModelForCausalLM
        loaded: Any = auto.from_pretrained(
            path,
            **spread,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of the model's tensors are missing from the weight files, for "
            f"example {missing[0]}, and would be random"
        )
    model.eval()
    if own is not None and hasattr(model, "hf_device_map"):
        del model.hf_device_map  # an ordinary model, which can be moved
    if split:
        if not dist.is_initialized():
            dist.init_process_group()
        assert dist.group.WORLD is not None  # since then
        split_sequences(model, dist.group.WORLD)
    log.info("%s: %s, %s parameters on %s", path, type(model).__name__, _count(model), device)
    return model


def usable_device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        UserError: If there is none, or nothing can be put on it.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {_brief(error)}") from error


def _spread(device: str) -> dict[str, Any]:
    """Arguments of Transformers that put parts of a model in several places."""
    if device == "auto":
        return {"device_map": "auto"}
    if device != TENSOR_PARALLEL:
        return {}
    _check_launch(TENSOR_PARALLEL)
    from transformers.distributed import DistributedConfig

    size = int(os.environ["WORLD_SIZE"])
    return {"distributed_config": DistributedConfig(tp_size=size)}


def _check_launch(device: str) -> None:
    if "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"device {device} needs several processes: torchrun --nproc-per-node N -m "
            "coca_lab.cli …"
        )


def model_without_weights(
    path: str | Path, dtype: str = "float32", *, any_head: bool = False
) -> PreTrainedModel:
    """A model on the meta device, to find out in a moment whether it can be loaded and used.

    Arguments as for `load_model`.

    Raises:
        UserError: As `load_model`, except for what only reading the weights shows.
    """
    path = str(path)
    with _naming(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, "pt"):  # checks the size
                pass
        auto = _auto_class(path) if any_head else AutoModelForCausalLM
        with torch.device("meta"):
            model: Any = auto.from_config(config, trust_remote_code=False)
    kind = _dtype_of_files(path, config) if dtype == "auto" else getattr(torch, dtype)
    return model.to(kind).eval()


def _dtype_of_files(path: str, config: Any) -> torch.dtype:
    """What Transformers' ``auto`` chooses: the configuration's dtype, or that of the weights."""
    if config.dtype is not None:
        return config.dtype
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                found = str_to_torch_dtype[weights.get_slice(name).get_dtype()]
                if found.is_floating_point:
                    return found
    return torch.float32


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if a tokenizer has tokens that a model has no embedding for."""
    embeddings: Any = model.get_input_embeddings()
    if len(tokenizer) > len(embeddings.weight):
        raise UserError(
            f"the tokenizer has {len(tokenizer)} entries and the model embeddings for "
            f"{len(embeddings.weight)}: use the model's own tokenizer"
        )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Check the folder, and turn errors in loading from it into UserErrors."""
    check_name(path)
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        hint = (
            "; its training has not finished: run coca train again with the same recipe"
            if (Path(path) / "recipe.yaml").is_file()
            else ""
        )
        raise UserError(f"{path}: not a model folder, it has no config.json{hint}")
    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"{path}: a weight file is damaged or truncated ({error}); copy or save it again"
        ) from error
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):  # which Transformers advises to set
            raise UserError(
                f"{path}: the model needs code of its folder, which is never run: choose a model "
                "whose classes Transformers or an installed package has"
            ) from error
        # Whatever a configuration says, Transformers believes, until something breaks.
        raise UserError(f"{path}: no model could be loaded: {_brief(error)}") from error


def _count(model: PreTrainedModel) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,}"


def _auto_class(path: str) -> Any:
    """The Auto class of the head that a folder's configuration names."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    task = (config.architectures or [""])[0].partition("For")[2]
    composite = AutoModelForImageTextToText
    if task == "ConditionalGeneration" and type(config) in composite._model_mapping:
        return composite
    return getattr(transformers, f"AutoModelFor{task}", AutoModelForCausalLM)


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 300 else text[:300] + " …"
