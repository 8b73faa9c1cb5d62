"""What this machine and a model's folder have, read in a moment: without torch, without weights."""

import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from coca_attention import __version__
from coca_attention.errors import UserError
from coca_attention.models.fields import (
    GLOBAL,
    LOCAL,
    attention_of,
    free_pairs,
    head_width,
    layer_types,
    rope_parameters,
    training_length,
)
from coca_lab.environment import PACKAGES, available_cores, processor

Rows = list[tuple[str, str]]
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NOT_AS_EXPECTED = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


def machine() -> Rows:
    """Versions, devices, threads, and the kernels that attention will use here, with the reason."""
    found = [f"coca-attention {__version__}"]
    for package in (*PACKAGES[1:], "triton"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} missing")
    cores, threads = available_cores(), os.environ.get("OMP_NUM_THREADS")
    gpus, build = _gpus(), _cuda_of_torch()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and gpus:
        gpus.append(f"of which CUDA_VISIBLE_DEVICES shows {hidden or 'none'}")
    if not gpus or hidden == "":
        kernels = "PyTorch's operations and scaled_dot_product_attention: no CUDA device"
    elif build is None:
        kernels = "PyTorch's operations, on the CPU: this PyTorch was built without CUDA"
    elif importlib.util.find_spec("triton") is None:
        kernels = "PyTorch's operations: Triton is missing (pip install triton)"
    else:
        kernels = "fused Triton kernels on CUDA, PyTorch's operations under torch.compile"
    return [
        ("python", platform.python_version()),
        ("packages", ", ".join(found)),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", f"{processor()}, {cores} core{'s' * (cores != 1)}"),
        ("threads", f"{threads} (OMP_NUM_THREADS)" if threads else "as PyTorch chooses"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("CUDA of torch", build or "none"),
        ("kernels", kernels),
    ]


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.splitlines() if line.strip()]


def _cuda_of_torch() -> str | None:
    """The CUDA version that torch was built for; None for none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    line = next((x for x in text.splitlines() if x.startswith(("cuda:", "cuda ="))), "= None")
    return None if line.endswith("None") else line.rpartition("=")[2].strip(" '\"")


@dataclass
class Weights:
    """What the headers of safetensors files say.

    Attributes:
        shapes: Shape of every tensor by name.
        kinds: Numbers of elements by the format's names of dtypes.
        size: Bytes of all files.
    """

    shapes: dict[str, list[int]]
    kinds: Counter[str]
    size: int


def read_weights(folder: Path) -> Weights | None:
    """The headers of a folder's weights; None if there are none.

    Raises:
        UserError: If a file is missing, truncated or damaged.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = [single] if single.is_file() else []
    if index.is_file():
        names = _json(index).get("weight_map", {}).values()
        files = [folder / Path(name).name for name in sorted(set(names))]
    if not files:
        return None
    weights = Weights({}, Counter(), 0)
    for file in files:
        for name, tensor in _header(file).items():
            if name != "__metadata__":
                weights.shapes[name] = tensor["shape"]
                weights.kinds[tensor["dtype"]] += math.prod(tensor["shape"])
        weights.size += file.stat().st_size
    return weights


def _header(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: Any = json.loads(stream.read(length)) if length <= LARGEST_HEADER else None
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (OSError, *NOT_AS_EXPECTED) as error:
        raise UserError(f"{file}: not a whole safetensors file; copy or save it again") from error
    if file.stat().st_size != end:
        raise UserError(
            f"{file}: has {file.stat().st_size:,} bytes and its header describes {end:,}: it is "
            "truncated or damaged; copy or save it again"
        )
    return header


def model_folder(path: str | Path) -> Rows:
    """What a folder holds: model, roles, rotation, parameters, size of the cache, state of a run.

    Raises:
        UserError: If there is no such folder, it holds neither a model nor a run, or a file is
            damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; coca info reads folders on this machine")
    try:
        return _describe(folder)
    except UserError:
        raise
    except NOT_AS_EXPECTED as error:
        raise UserError(
            f"{path}: a file in it does not say what it should ({type(error).__name__}: {error}); "
            "copy or save the folder again"
        ) from error


def _describe(folder: Path) -> Rows:
    run = _run(folder)
    if not (folder / "config.json").is_file():
        if not run:
            raise UserError(f"{folder}: neither a model (config.json) nor a run (recipe.yaml)")
        return [("model", "none yet: the run has not finished"), *run]
    content = _json(folder / "config.json")
    config = SimpleNamespace(**content.get("text_config", content))
    weights = read_weights(folder)
    try:
        rows = _attention(config) + _sizes(config, weights)
    except AttributeError as error:  # Transformers would fill in the field
        rows = [("attention", f"not described by config.json alone ({error})")]
    if weights is not None:
        kinds = [f"{DTYPES.get(kind, kind)}" for kind, _ in weights.kinds.most_common()]
        rows.append(
            ("parameters", f"{weights.kinds.total():,} stored, in {', '.join(kinds)}, "
                           f"{weights.size / 1e6:,.1f} MB")
        )  # fmt: skip
    else:
        rows.append(("parameters", "no safetensors files"))
    tokenizer = (folder / "tokenizer.json").is_file() or (
        folder / "tokenizer_config.json"
    ).is_file()
    chat = (folder / "chat_template.jinja").is_file()
    kind = "with a chat template" if chat else "has no chat template"
    return [
        ("model", content.get("model_type", "unknown")),
        *rows,
        ("tokenizer", kind if tokenizer else "none in this folder"),
        *run,
    ]


def _attention(config: Any) -> Rows:
    config.model_type = getattr(config, "model_type", "")
    if not getattr(config, "rope_parameters", None) and hasattr(config, "rope_theta"):
        # As Transformers wrote it before version 5.
        scaling = getattr(config, "rope_scaling", None) or {}
        config.rope_parameters = {"rope_theta": config.rope_theta, **scaling}
    kind = attention_of(config)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    names = {None: "not known to this project", "rope": "rotary (RoPE)", "alibi": "ALiBi"}
    attention = names.get(kind, f"CoCA, form {kind}")
    if hasattr(config, "coca_form"):
        attention += f", {config.kv_cache} cache"
    rows = [("attention", attention)]
    if LOCAL in kinds:
        letters = "".join({LOCAL: "l", GLOBAL: "g"}.get(one, "?") for one in config.layer_types)
        window = getattr(config, "sliding_window", None)
        rows.append(("layers", f"{letters} (l: local, the last {window:,} tokens; g: global)"))
    pairs = [free_pairs(config, k) for k in (LOCAL, GLOBAL)] if hasattr(config, "coca_form") else []
    if any(pairs):
        of = (
            f"{pairs[0]} in local layers, {pairs[1]} in global ones" if LOCAL in kinds else pairs[1]
        )
        rows.append(("free pairs", f"{of}, of {head_width(config) // 2} per head"))
    shown: list[str] = []
    for layer_type in kinds or [GLOBAL]:
        rope = dict(rope_parameters(config, layer_type))
        for name, usual in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
            if rope.get(name) == usual:
                del rope[name]
        shown.append(", ".join(f"{name} {_figure(value)}" for name, value in rope.items()))
    rows += [("rotation", text) for text in dict.fromkeys(shown) if text]
    length = training_length(config)
    return [*rows, ("training length", f"{length:,} tokens" if length else "not in config.json")]


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def cache_bytes(config: Any, weights: Weights | None, tokens: int) -> int:
    """Bytes of keys and values that a text leaves in the cache, in the dtype of the weights.

    Args:
        config: The fields of ``config.json``.
        weights: The headers of its weights, for the dtype and the width of cached coefficients.
        tokens: Length of the text. Local layers keep as much of it as their window needs.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = layer_types(config)
    limited = rope_parameters(config).get("max_distance") is not None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width, shapes = head_width(config), {} if weights is None else weights.shapes
    stored = next(iter(weights.kinds.most_common(1)), ("F32", 0))[0] if weights else "F32"
    numbers = 0
    for index, kind in enumerate(kinds):
        keys = heads * width
        if limited or getattr(config, "kv_cache", "full") == "half":
            pattern = f".{index}.self_attn.t_proj.weight", f".{index}.attention.t_proj.weight"
            keys = next((s[0] for name, s in shapes.items() if name.endswith(pattern)), keys)
        kept = min(tokens, window - 1) if window and kind == LOCAL else tokens
        numbers += kept * (keys + heads * width)
    return numbers * BITS.get(stored, 32) // 8


def _sizes(config: Any, weights: Weights | None) -> Rows:
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = (
        f"{config.num_hidden_layers} layers of {config.hidden_size:,}, {heads} heads of "
        f"{head_width(config)}" + (f" ({groups} for keys and values)" if groups != heads else "")
    )
    first, second = (cache_bytes(config, weights, tokens) / 1e6 for tokens in (1000, 2000))
    cache = f"{first:,.2f} MB for 1,000 tokens, {second - first:,.2f} MB for every 1,000 more"
    return [("size", size), ("cache", cache)]


def _run(folder: Path) -> Rows:
    """The state of a training run, from what it writes as it goes on; empty if it is none."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        return []
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not readable YAML; copy it again") from error
    steps = recipe["training"]["steps"]
    stages: list[dict[str, Any]] = recipe.get("stages") or [{"name": ""}]
    wanted = sum(stage.get("steps") or steps for stage in stages)
    if (folder / "training.json").is_file():
        summary = _json(folder / "training.json")
        last = (summary.get("curve") or [{}])[-1].get("loss")
        done = (
            f"finished: {summary.get('steps', wanted):,} steps, {summary.get('tokens', 0):,} tokens"
        )
        return [("run", done + (f", last loss {last:.3f}" if last is not None else ""))]
    before = 0
    for stage in stages:
        name = stage["name"]
        work = folder / "stages" / name if name else folder
        if name and (work / "stage.json").is_file():
            before += stage.get("steps") or steps
            continue
        numbers = [path.name.partition("-")[2] for path in work.glob("checkpoints/checkpoint-*")]
        saved = [int(number) for number in numbers if number.isdecimal()]
        done = before + max(saved, default=0)
        where = f"in stage {name}, " if name else ""
        again = "run the same coca train again to go on"
        return [("run", f"not finished: {where}{done:,} of {wanted:,} steps are saved; {again}")]
    return [("run", f"not finished: all {wanted:,} steps are trained, the result is not saved yet")]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable JSON; copy or save it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content
