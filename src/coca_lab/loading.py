"""Loading a model from a folder or by name; incomplete weights are an error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)
from transformers.utils import logging as transformers_logging

from coca_attention.errors import UserError
from coca_attention.models.conversion import name_separate_head
from coca_attention.models.fused import use_fused_attention
from coca_lab.files import Place, belongs_to, find_model, read_json

log = logging.getLogger(__name__)

INSTEAD = {
    "recipe.yaml": "its training has not finished: run coca train again with the same recipe",
    "adapter_config.json": "it is an adapter: merge it into its model, and save that",
    "*.gguf": "write {} as one first, see docs/troubleshooting.md",
    "checkpoint-*": "it has checkpoints, such as {}: name one of them",
}
"""What to do with folders that are no model's, by a file in them."""


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
    theirs = logging.getLogger(logger)
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(level)


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | None = None,
    any_head: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode; UserError unless all its weights are there.

    Args:
        path: Folder of a Transformers model, or on the Hub ``NAME`` or ``NAME@REVISION``.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for that of the files.
        device: ``cpu``, ``cuda``, …; ``auto`` spreads layers over all accelerators, and what does
            not fit over the CPU's memory. Default: the accelerator if available.
        any_head: Load the class that was saved, for example a sequence classifier.
    """
    # With a device map, tensors are read one by one onto their device and in their dtype: memory
    # holds no second copy of the model, and a GPU's model is never in the CPU's memory.
    path = str(path)
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else "cpu"
    device_map: str | torch.device = "auto" if device == "auto" else usable_device(device)
    with _naming(path) as place, no_progress_bars():
        _, auto = _config_and_class(place, any_head)
        _check_safetensors(place.path)
        loaded: Any = auto.from_pretrained(
            place.path,
            revision=place.revision,
            device_map=device_map,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    model, info = use_fused_attention(loaded[0]), loaded[1]
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of the model's tensors are missing from the weight files, for "
            f"example {missing[0]}, and would be random"
        )
    name_separate_head(model)
    model.eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    log.info("%s: %s, %s parameters on %s", path, type(model).__name__, f"{count:,}", device)
    return model


def usable_device(name: str) -> torch.device:
    """The device of a name; UserError if there is none, or nothing can be put on it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {_brief(error)}") from error


def model_without_weights(
    path: str | Path, dtype: str = "float32", *, any_head: bool = False
) -> PreTrainedModel:
    """A model on the meta device, to find out in a moment whether it can be loaded and used."""
    path = str(path)
    with _naming(path) as place:
        config, auto = _config_and_class(place, any_head)
        for file in sorted(Path(place.path).glob("*.safetensors")):
            with safe_open(file, "pt"):  # checks the size
                pass
        with torch.device("meta"):
            model: Any = auto.from_config(config, trust_remote_code=False)
    kind = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return model.to(kind or torch.float32).eval()


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
    if len(tokenizer) > len(embeddings.weight):
        embeddings.register_forward_pre_hook(partial(_check_tokens, tokenizer))


def _check_tokens(tokenizer: PreTrainedTokenizerBase, embeddings: Any, inputs: Any) -> None:
    if inputs and inputs[0].numel():
        _check_token(embeddings, tokenizer, int(inputs[0].max()))


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
    folder = Path(place.path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        hints = (
            f"; {what.format(found[0].name)}"
            for pattern, what in INSTEAD.items()
            if (found := sorted(folder.glob(pattern)))
        )
        raise UserError(f"{path}: not a model folder, it has no config.json{next(hints, '')}")
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


def weight_files(path: str | Path) -> list[Path]:
    """The files of a model's weights with their index, and its generation_config.json if any.

    UserError unless they are safetensors in its folder.
    """

    def file(name: str, needed: bool) -> list[Path]:
        found = cached_file(
            place.path,
            name,
            revision=place.revision,
            _raise_exceptions_for_missing_entries=needed,
        )
        return [Path(found)] if found else []

    with _naming(str(path)) as place:
        _check_safetensors(place.path)
        weights = file(SAFE_WEIGHTS_NAME, False)
        if not weights:
            weights = file(SAFE_WEIGHTS_INDEX_NAME, True)
            names = sorted(set(read_json(weights[0])["weight_map"].values()))
            weights += [each for name in names for each in file(Path(name).name, True)]
        files = weights + file(GENERATION_CONFIG_NAME, False)
    for each in files:
        if not belongs_to(each.parent, each):
            raise UserError(f"{each} is a link out of the model's folder")
    return files


def _check_safetensors(path: str) -> None:
    """Raise UserError if a folder has its weights in another format alone."""
    folder = Path(path)
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{path}: its weights are .bin files, which can contain code and are not read: write "
            f"them as safetensors, by AutoModelForCausalLM.from_pretrained({path!r})"
            ".save_pretrained(FOLDER) in Python, and copy its tokenizer"
        )


def _brief(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"Transformers {transformers.__version__} does not know, or does not find, {error}"
    if "ignore_mismatched_sizes" in str(error):
        return (
            "weights have other shapes than its configuration says; Transformers lists them above"
        )
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 300 else text[:300] + " …"
