"""Weight files: which a model has, whether its configuration describes them, and their bytes.

Names, shapes and dtypes are read from the headers of the files. Transformers says which tensors
are missing, unknown or of another shape: it loads them on the meta device, by all its renamings,
and no value is read.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from coca_attention.errors import UserError
from coca_lab.files import Place, belongs_to, find_model, read_json

MODELOPT = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt says how weights are quantised, which vLLM and SGLang read."""
OLD_BUFFERS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)(attn|attention)\.(masked_)?bias$"
)
"""Buffers that old versions of Transformers saved, which are computed now."""
HINTS = {
    r"(^|\.)_orig_mod\.": "they are of a compiled model: save the model in it, model._orig_mod",
    r"^module\.": "they are of a model in a wrapper for several devices: save model.module",
    r"lora_|\.base_layer\.|modules_to_save|original_module": "they are of an adapter: merge it "
    "into its model (merge_and_unload in PEFT), and save that",
    r"scale|zero|\.qweight": "weights are quantised: add quantization_config to config.json, or "
    "save them unpacked",
}
"""What to do about tensors that a model does not have, by their names."""
PACKED = re.compile(r"\.(qweight|weight_packed)$|_blocks$")
"""Ends of names of packed matrices, beside ``.weight`` of an unusual dtype."""
BESIDE_PACKED = re.compile(
    r"\.(qzeros|g_idx|SCB|weight_format|weight_shape|weight_g_idx)$|\.weight\.|[._]\w*(scale|zero_point)"
)
"""What quantisers save beside packed matrices."""
CHECKED_QUANTISERS = (
    "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4",
)  # fmt: skip
"""Those whose names are known; weights of others are taken as they are."""
CHUNK = 1 << 26
"""Bytes that are read at once: a multiple of the size of any number."""


def model_file(
    place: Place, name: str, *, download: bool = True, needed: bool = False
) -> Path | None:
    """A file of a model's folder or name; None if there is none, or OSError if it is needed.

    Without ``download`` files of a name that are not in the cache are none.
    """
    file = cached_file(
        place.path,
        name,
        revision=place.revision,
        local_files_only=not download,
        _raise_exceptions_for_missing_entries=needed,
        _raise_exceptions_for_connection_errors=download,
    )
    return None if file is None else Path(file)


def weight_files(path: str | Path | Place, *, download: bool = True) -> dict[str, Path]:
    """The files of a model's weights with their index, by name in the model's folder.

    Args:
        path: Folder or name of the model.
        download: Whether files of a name that are not in the cache are fetched; else they are
            left out.

    Raises:
        UserError: If a file lies outside of the model's folder.
    """
    place = path if isinstance(path, Place) else find_model(path)
    folder, found = Path(place.path), dict[str, Path]()

    def look_for(name: str, needed: bool) -> None:
        file = model_file(place, name, download=download, needed=needed)
        if file is not None:
            found[name] = file

    look_for(SAFE_WEIGHTS_NAME, False)
    if not found:
        look_for(SAFE_WEIGHTS_INDEX_NAME, download)
    if SAFE_WEIGHTS_INDEX_NAME in found:
        for name in indexed_files(found[SAFE_WEIGHTS_INDEX_NAME]):
            look_for(name, download or folder.is_dir())
    if folder.is_dir():
        for file in found.values():
            check_belongs(folder, file)
    return found


def indexed_files(index: Path) -> list[str]:
    """The names of the files that an index lists, relative to its folder; UserError if damaged."""
    content = read_json(index)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise UserError(f"{index} is damaged: it has no weight_map of names")
    names = sorted(set(named.values()))
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{index} names {name}, which is outside of the model's folder")
    return names


def check_belongs(folder: Path, file: Path) -> None:
    """Raise UserError for a file that a link brings into a model's folder from elsewhere."""
    if not belongs_to(folder, file):
        raise UserError(
            f"{file} is a link out of the model's folder: replace it by what it links to"
        )


def tensor_headers(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """All tensors of weight files by name, with shapes and dtypes, on the meta device."""
    found = dict[str, Tensor]()
    for file in files.values():
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, "pt") as content:  # checks the size, too
            for name in content.keys():  # noqa: SIM118 (no mapping)
                header = content.get_slice(name)
                dtype = str_to_torch_dtype.get(header.get_dtype(), torch.uint8)
                found[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
    return found


def quantised_by(path: str | Path | Place, config: PreTrainedConfig) -> str | None:
    """The method by which a model's weights are quantised, None if they are not."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings:
        values = settings if isinstance(settings, dict) else settings.to_dict()
        return str(values.get("quant_method") or "unknown")
    place = path if isinstance(path, Place) else find_model(path)
    found = model_file(place, MODELOPT, download=False)
    return None if found is None else "modelopt"


def model_of_headers(
    path: str | Path, made: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype | str
) -> PreTrainedModel | None:
    """A model on the meta device, of tensors that are all and only those that it has.

    Args:
        path: Where they are from, for messages.
        made: The model as its configuration says, on the meta device.
        tensors: From `tensor_headers`.
        dtype: Of the model; ``auto`` for that of the configuration, or else of the tensors.

    Returns:
        The model; None for quantised weights of which the names are not known.

    Raises:
        UserError: If tensors are missing, unknown or of another shape, or are packed numbers of
            which nothing says how.
    """
    config: PreTrainedConfig = made.config
    method, plain = quantised_by(path, config), copy.deepcopy(config)
    if method is not None:
        if method not in CHECKED_QUANTISERS:
            return None
        check_scales(path, tensors)
        tensors = unpacked(tensors)
        vars(plain).pop("quantization_config", None)
        dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
    else:
        check_are_numbers(path, tensors)
    try:
        model, info = type(made).from_pretrained(
            None,
            config=plain,
            state_dict=dict(tensors),
            device_map={"": "meta"},
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            trust_remote_code=False,
        )
    except RuntimeError:
        if method is None:
            raise
        return None  # matrices that only their quantiser can join
    if method is not None:
        kept = {each for each in info["mismatched_keys"] if 0 not in each[1]}
        info = {**info, "mismatched_keys": kept}
    check_loaded(path, info)
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        model.config.quantization_config = settings
    return model


def check_loaded(path: str | Path, info: Mapping[str, Any]) -> None:
    """Raise UserError if a model and its files differ, from Transformers' ``loading_info``."""
    unknown = sorted(name for name in info["unexpected_keys"] if not OLD_BUFFERS.search(name))
    missing = sorted(info["missing_keys"])
    shapes = sorted(info["mismatched_keys"])
    problems = list[str]()
    if unknown:
        problems.append(
            f"the model of config.json does not have all tensors of the weight files: "
            f"{len(unknown)} more, for example {unknown[0]}"
        )
    if missing:
        problems.append(
            f"{len(missing)} of the model's tensors are missing from the weight files, for "
            f"example {missing[0]}, and would be random"
        )
    if shapes:
        name, found, expected = shapes[0]
        problems.append(
            f"{len(shapes)} tensors of the weight files have other shapes than config.json gives, "
            f"for example {name} with {tuple(found)} in place of {tuple(expected)}"
        )
    if problems:
        hints = (hint for part, hint in HINTS.items() if any(re.search(part, n) for n in unknown))
        hint = next(hints, "copy config.json and the weight files again, from one model")
        raise UserError(f"{path}: {'; '.join(problems)}: {hint}")


def check_are_numbers(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for weights of a packed dtype: no configuration says how to read them."""
    for name, tensor in tensors.items():
        plain = tensor.is_floating_point() and tensor.element_size() > 1
        if name.endswith(".weight") and not plain:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{path}: {name} is {kind}, and config.json has no quantization_config that says "
                "how to read it: add it from the model's source, or save the weights unpacked"
            )


def check_scales(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if weights in float8 have no scales."""
    scaled = {
        re.sub(r"(\.weight)?[._](weight_)?scale.*$", "", name)
        for name in tensors
        if "scale" in name
    }
    for name, tensor in tensors.items():
        is_float8 = tensor.is_floating_point() and tensor.element_size() == 1
        if is_float8 and "scale" not in name and name.removesuffix(".weight") not in scaled:
            raise UserError(
                f"{path}: {name} is in float8 and has no scale beside it: copy the weights again"
            )


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of quantised files under the names of the full model; packed ones are empty."""
    found, nothing = dict[str, Tensor](), torch.empty(0, 0, device="meta")
    for name, tensor in tensors.items():
        if PACKED.search(name):
            whole = name.removesuffix("_blocks")
            found[re.sub(r"\.(qweight|weight_packed)$", ".weight", whole)] = nothing
        elif not BESIDE_PACKED.search(name):
            plain = tensor.is_floating_point() and tensor.element_size() > 1
            packed = not plain or f"{name}.absmax" in tensors
            found[name] = nothing if packed else tensor
    return found


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite; of its extremes, which is fast."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def check_finite(path: str | Path, model: PreTrainedModel) -> None:
    """Raise UserError if a parameter of a model from a path has NaN or infinity."""
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise _not_finite(path, name)


def checked_pieces(file: Path) -> Iterator[bytes | bytearray]:
    """The bytes of a file of weights, or of their index, piece by piece.

    Raises:
        UserError: If a number that a model uses is NaN or infinite. Packed numbers and old buffers
            are not looked at.
    """
    with open(file, "rb") as content:
        if file.suffix == ".safetensors":
            size = content.read(8)
            header = content.read(int.from_bytes(size, "little"))
            yield size + header
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            for name, about in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
                begin, end = about["data_offsets"]
                dtype = str_to_torch_dtype.get(about["dtype"], torch.uint8)
                are_numbers = dtype.is_floating_point and dtype.itemsize > 1
                checked = are_numbers and not OLD_BUFFERS.search(name)
                for place in range(begin, end, CHUNK):
                    piece = bytearray(content.read(min(CHUNK, end - place)))
                    if checked and not is_finite(torch.frombuffer(piece, dtype=dtype)):
                        raise _not_finite(file, name)
                    yield piece
        while piece := content.read(CHUNK):
            yield piece


def _not_finite(path: str | Path, name: str) -> UserError:
    return UserError(f"{path}: {name} has values that are not finite: it is damaged")
