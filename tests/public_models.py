"""Folders like those of public models on the Hugging Face Hub, small and with random weights."""

import json
from pathlib import Path

import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGS = Path(__file__).with_name("models") / "public_configs.yaml"
CASES = {case["name"]: case for case in yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))}


def class_of(case):
    """The class that the configuration names, or the Auto class where Transformers lacks it."""
    return getattr(transformers, case["config"]["architectures"][0], AutoModelForCausalLM)


def write_public(case, folder):
    """Write a case as it is on the Hub, with weights by which attention is far from uniform."""
    folder.mkdir(parents=True)
    text = json.dumps(case["config"])
    (folder / "config.json").write_text(text)
    if case["files"] == "config":
        tensors = {"any": torch.zeros(2)}  # it has to be refused before
        if "quantization_config" in case["config"]:
            plain = {n: x for n, x in case["config"].items() if n != "quantization_config"}
            config = AutoConfig.for_model(**plain)
            tensors = packed(AutoModelForCausalLM.from_config(config).state_dict())
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    config, made = AutoConfig.from_pretrained(folder), class_of(case)
    model = made(config) if made is not AutoModelForCausalLM else made.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        drawn = torch.randn(weight.shape, generator=generator)
        weight.data = drawn * scale if weight.dim() > 1 else weight.data + 0.1 * drawn
    model.tie_weights()
    model = model.to(getattr(torch, case["config"]["torch_dtype"]))
    size = "60KB" if case["files"] == "sharded" else "1GB"
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(text)
    _add_tensors(case, folder, model)
    if case["files"] == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def packed(tensors):
    """Tensors as AWQ writes them: matrices of layers in three each, others as they are."""
    found = {}
    for name, tensor in tensors.items():
        base, _, end = name.rpartition(".")
        if tensor.dim() < 2 or end != "weight" or "embed" in name or "lm_head" in name:
            found[name] = tensor.clone()
            continue
        width, rows = tensor.shape[1], tensor.shape[0]
        found[f"{base}.qweight"] = torch.ones(width, rows // 8, dtype=torch.int32)
        found[f"{base}.qzeros"] = torch.ones(1, rows // 8, dtype=torch.int32)
        found[f"{base}.scales"] = torch.ones(1, rows, dtype=torch.float16)
    return found


def _add_tensors(case, folder, model):
    """Add what files on the Hub have besides the model's own tensors."""
    first = min(folder.glob("*.safetensors"))
    tensors = load_file(first)
    prefix, layers = model.base_model_prefix, model.config.get_text_config().num_hidden_layers
    for name in case.get("buffers", ()):
        tensors |= {f"{prefix}.layers.{i}.{name}": torch.ones(1, 1, 4, 4) for i in range(layers)}
    if case.get("tied_copy"):
        tensors["lm_head.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, first, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(tensors, first.name)
        index.write_text(json.dumps(content))


def loaded(folder, made=AutoModelForCausalLM, dtype=torch.float32, unknown=(), **options):
    """A folder's model, which has all tensors and no others than those that end in `unknown`."""
    model, info = made.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    rest = [name for name in info["unexpected_keys"] if not name.endswith(tuple(unknown))]
    assert (info["missing_keys"], info["mismatched_keys"], rest) == (set(), set(), [])
    return model.eval()
