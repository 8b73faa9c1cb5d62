"""Loading a model from a folder or by name; incomplete weights are an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from coca_attention.errors import UserError


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable Transformers' progress bars for reading and writing files."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | None = None,
    any_head: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode.

    Args:
        path: Folder of a Transformers model, or a name that Transformers resolves.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for that of the files.
        device: ``cpu``, ``cuda``, …; default: the accelerator if available.
        any_head: Load the class that was saved, for example a sequence classifier.

    Raises:
        UserError: If there is no model, its files are damaged, or weights are missing.
    """
    path = str(path)
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        hint = (
            "; its training has not finished: run coca train again with the same recipe"
            if (Path(path) / "recipe.yaml").is_file()
            else ""
        )
        raise UserError(f"{path}: not a model folder, it has no config.json{hint}")
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else "cpu"
    try:
        with no_progress_bars():
            auto = _auto_class(path) if any_head else AutoModelForCausalLM
            loaded: Any = auto.from_pretrained(
                path,
                dtype="auto" if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except SafetensorError as error:
        raise UserError(
            f"{path}: a weight file is damaged or truncated ({error}); copy or save it again"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{path}: no model could be loaded: {_brief(error)}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of the model's tensors are missing from the weight files, for "
            f"example {missing[0]}, and would be random"
        )
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} cannot be used: {_brief(error)}") from error


def _auto_class(path: str) -> Any:
    """The Auto class of the head that a folder's configuration names."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    task = (config.architectures or [""])[0].partition("For")[2]
    return getattr(transformers, f"AutoModelFor{task}", AutoModelForCausalLM)


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 300 else text[:300] + " …"
