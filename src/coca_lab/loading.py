"""Loading a model from a folder or by name; incomplete weights are an error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as transformers_logging

from coca_attention.errors import UserError
from coca_attention.models.conversion import name_separate_head
from coca_attention.models.fused import use_fused_attention
from coca_lab.environment import usable_device
from coca_lab.files import Place, check_model_folder, find_model
from coca_lab.weights import (
    MODELOPT,
    check_are_numbers,
    check_loaded,
    checked_pieces,
    model_of_headers,
    quantised_by,
    tensor_headers,
    weight_files,
)

log = logging.getLogger(__name__)

READING = "transformers.modeling_utils"
"""Transformers' logger of what it finds in weight files, which is told here in one line."""


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


@contextmanager
def without_warnings(logger: str) -> Iterator[None]:
    """Hide what a logger of Transformers would warn of, where that is on purpose."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    theirs = logging.getLogger(logger)
    theirs.addFilter(is_error)  # by its level, Transformers decides what else to look at
    try:
        yield
    finally:
        theirs.removeFilter(is_error)


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | None = None,
    any_head: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode.

    Args:
        path: Folder of a Transformers model, or on the Hub ``NAME`` or ``NAME@REVISION``.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for that of the files.
        device: ``cpu``, ``cuda``, …; ``auto`` spreads layers over all accelerators, and what does
            not fit over the CPU's memory. Default: the accelerator if available.
        any_head: Load the class that was saved, for example a sequence classifier.

    Raises:
        UserError: Unless the files have all tensors of the model that the configuration describes,
            and no others (`model_without_weights`).
    """
    # With a device map, tensors are read one by one onto their device and in their dtype: memory
    # holds no second copy of the model, and a GPU's model is never in the CPU's memory.
    path = str(path)
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else "cpu"
    device_map: str | torch.device = "auto" if device == "auto" else usable_device(device)
    with _naming(path) as place, no_progress_bars(), without_warnings(READING):
        check_safetensors(place.path)
        config, auto = _config_and_class(place, any_head)
        _check_can_be_read(place, config)
        loaded: Any = auto.from_pretrained(
            place.path,
            revision=place.revision,
            device_map=device_map,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    model, info = use_fused_attention(loaded[0]), loaded[1]
    if getattr(model, "_hf_peft_config_loaded", False):  # of the Hub, which alone had it before
        check_no_adapter(path)
    if getattr(model, "hf_quantizer", None) is not None:  # which renames what it packed
        info = {**info, "unexpected_keys": ()}
    check_loaded(path, info)
    name_separate_head(model)
    vars(model.config).pop("auto_map", None)  # names code of the folder, which is never run
    model.eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    log.info("%s: %s, %s parameters on %s", path, type(model).__name__, f"{count:,}", device)
    return model


def model_without_weights(
    path: str | Path, dtype: str = "float32", *, any_head: bool = False
) -> PreTrainedModel:
    """A model on the meta device, to find out in a moment whether it can be loaded and used.

    Args:
        path: Folder of a Transformers model, or on the Hub ``NAME`` or ``NAME@REVISION``.
        dtype: As for `load_model`.
        any_head: As for `load_model`.

    Raises:
        UserError: If the files that are here have not all tensors of the model, or others, or
            tensors of other shapes; if they are damaged, or there is an adapter beside them. What
            a name has on the Hub alone is checked when it is loaded.
    """
    path = str(path)
    kind = "auto" if dtype == "auto" else getattr(torch, dtype)
    with _naming(path) as place, no_progress_bars(), without_warnings(READING):
        config, auto = _config_and_class(place, any_head)
        with torch.device("meta"):
            made: Any = auto.from_config(config, trust_remote_code=False)
        tensors = tensor_headers(weight_files(place, download=False))
        model = model_of_headers(path, made, tensors, kind) if tensors else None
    if model is None:
        model = made.to((config.dtype or torch.float32) if kind == "auto" else kind)
    vars(model.config).pop("auto_map", None)
    return model.eval()


def check_can_be_served(path: str | Path) -> None:
    """Raise UserError for what `load_model` would refuse, and for weights that are not finite.

    Files are read once, before the server reads them again, now from memory.
    """
    config = model_without_weights(path, "auto").config
    with _naming(str(path)) as place:
        check_safetensors(place.path)
        _check_can_be_read(place, config)
        for file in weight_files(place).values():
            for _ in checked_pieces(file):
                pass


def check_no_adapter(path: str | Path | Place) -> None:
    """Raise UserError if there is an adapter beside a model in its folder."""
    place = path if isinstance(path, Place) else find_model(path)
    is_folder = Path(place.path).is_dir()
    found = find_adapter_config_file(
        place.path, revision=place.revision, local_files_only=not is_folder
    )
    if found is not None:
        raise UserError(
            f"{place.path}: it has an adapter (adapter_config.json) beside the model, which some "
            "programs apply and others do not: merge it into the model (merge_and_unload in PEFT) "
            "and save that, or remove the adapter's files"
        )


def _check_can_be_read(place: Place, config: PreTrainedConfig) -> None:
    """Raise UserError for quantised weights that Transformers would take for numbers."""
    if getattr(config, "quantization_config", None) is not None:
        return
    if quantised_by(place, config) is not None:
        raise UserError(
            f"{place.path}: its weights are quantised as {MODELOPT} says, which Transformers does "
            "not read: load the model in full precision, or run it in vLLM (untried: SGLang)"
        )
    check_are_numbers(place.path, tensor_headers(weight_files(place, download=False)))


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, largest: int) -> None:
    """Raise UserError if a model has no embedding for the largest token id of a text.

    A tokenizer may have entries beyond the embeddings, as CodeLlama's, that no text contains. A
    module that is not Transformers' does not say which tokens it takes.
    """
    if isinstance(model, PreTrainedModel):
        _check_token(model.get_input_embeddings(), tokenizer, largest)


def guard_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a model raise the UserError of `check_vocabulary` when it reads such a token."""
    embeddings: Any = model.get_input_embeddings()

    def check(module: Any, inputs: Any) -> None:
        if inputs and inputs[0].numel():
            _check_token(module, tokenizer, int(inputs[0].max()))

    if len(tokenizer) > len(embeddings.weight):
        embeddings.register_forward_pre_hook(check)


def _check_token(embeddings: Any, tokenizer: PreTrainedTokenizerBase, largest: int) -> None:
    count = len(embeddings.weight)
    if largest >= count:
        raise UserError(
            f"the text has token {largest} ({tokenizer.decode([largest])!r}), the tokenizer "
            f"{len(tokenizer)} entries and the model embeddings for {count}: use the model's own "
            "tokenizer, or leave such tokens out of the text"
        )


@contextmanager
def _naming(path: str) -> Iterator[Place]:
    """Find a model, check its folder, and turn errors in loading from it into UserErrors."""
    place = find_model(path)
    if Path(place.path).is_dir():
        check_model_folder(path)
    try:
        yield place
    except SafetensorError as error:
        raise UserError(
            f"{path}: a weight file is damaged or truncated ({error}); copy or save it again"
        ) from error
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):  # which Transformers advises to set
            raise UserError(
                f"{path}: the model needs code of its folder, which is never run: choose a model "
                "whose classes Transformers or an installed package has"
            ) from error
        # Whatever a configuration says, Transformers believes, until something breaks.
        raise UserError(f"{path}: no model could be loaded: {_brief(error)}") from error


def _config_and_class(place: Place, any_head: bool) -> tuple[Any, Any]:
    """A model's configuration, and the Auto class of a language model, or of the head it names."""
    path = place.path
    check_no_adapter(place)
    config = AutoConfig.from_pretrained(path, revision=place.revision, trust_remote_code=False)
    task = (config.architectures or [""])[0].partition("For")[2] if any_head else ""
    auto = getattr(transformers, f"AutoModelFor{task}", AutoModelForCausalLM)
    if type(config) not in auto._model_mapping:
        parts = config.get_text_config() is not config
        hint = (
            ": it has one. Load it in Python, where convert(model.get_decoder()) converts its "
            "language model in place"
        )
        raise UserError(
            f"{path}: {config.model_type} is no causal language model{hint if parts else ''}"
        )
    # Transformers reads an encoder as a language model that sees what it is to predict.
    made: Any = auto._model_mapping[type(config)]
    saved = (config.architectures or [made.__name__])[0]
    encodes = getattr(config, "is_decoder", None) is False and not saved.endswith("ForCausalLM")
    if encodes and not any_head:
        raise UserError(f"{path}: {saved} reads in both directions: it is no causal language model")
    return config, auto


def check_safetensors(path: str | Path) -> None:
    """Raise UserError if a folder has its weights in another format alone."""
    folder = Path(path)
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{path}: its weights are .bin files, which can contain code and are not read: write "
            f"them as safetensors, by AutoModelForCausalLM.from_pretrained({str(path)!r})"
            ".save_pretrained(FOLDER) in Python, and copy its tokenizer"
        )


def _brief(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"Transformers {transformers.__version__} does not know, or does not find, {error}"
    is_of_values = isinstance(error, StrictDataclassError)  # whose cause says of which
    reason = error.__cause__ if is_of_values and error.__cause__ else error
    text = " ".join(str(reason).split()).rstrip(".") or type(error).__name__
    if "not a valid JSON file" in text:
        return "its config.json is damaged: download or save it again"
    if "no file named" in text:
        return "its folder has no weights, model.safetensors: download or save it again"
    text = text if len(text) < 300 else text[:300] + " …"
    # What a size of 0 or below leads to when the model is made, before any weights are read.
    if is_of_values or isinstance(error, ArithmeticError | IndexError) or "negative dim" in text:
        return f"its config.json has a wrong value ({text}): correct it, or copy the file again"
    return text
