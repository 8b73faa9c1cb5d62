"""`coca info`: a folder described without loading it, compared with the loaded model."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, Qwen2Config

from coca_attention.errors import UserError
from coca_attention.models import Roles, convert
from coca_attention.models.fields import head_width
from coca_lab.cli import main
from coca_lab.info import cache_bytes, machine, model_folder, read_weights
from conftest import tiny_model

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def saved(folder, form="slack", *, kv_cache="full", dtype=torch.float32, **changes):
    model = tiny_model("rope")
    if changes or form != "rope":
        model = convert(model, form, **changes)
        model.config.kv_cache = kv_cache
    model.to(dtype).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    ("form", "changes", "kv_cache", "dtype"),
    [
        ("rope", {}, "full", torch.float32),
        ("slack", {}, "full", torch.bfloat16),
        ("strict", {}, "half", torch.float32),
        ("strict", {"max_distance": 16}, "full", torch.float32),
        ("strict", {"roles": Roles("lg", window=8)}, "full", torch.float32),
        ("strict", {"roles": Roles("lg", window=8)}, "half", torch.float32),
    ],
)
def test_parameters_and_cache_are_those_of_the_model(tmp_path, form, changes, kv_cache, dtype):
    model = saved(tmp_path, form, kv_cache=kv_cache, dtype=dtype, **changes)
    weights = read_weights(tmp_path)
    assert weights is not None
    state = model.state_dict()
    # Transformers saves GPT-NeoX' head under its former name.
    shapes = {name.replace("embed_out", "lm_head"): s for name, s in weights.shapes.items()}
    assert shapes == {name: list(state[name].shape) for name in shapes}
    assert weights.kinds.total() == sum(p.numel() for p in model.parameters())
    cache = DynamicCache(config=model.config)
    length = 40
    with torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.long), past_key_values=cache)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert cache_bytes(model.config, weights, length) == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SMALL, sliding_window=8),
        MistralConfig(**SMALL, sliding_window=None),
        Qwen2Config(**SMALL, sliding_window=8, use_sliding_window=False),
    ],
    ids=["window", "no window", "window not used"],
)
def test_a_window_without_layer_types_is_that_of_all_layers(tmp_path, config):
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content.pop("layer_types", None)  # older files have none
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 40, dtype=torch.long), past_key_values=cache)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    found = cache_bytes(SimpleNamespace(**content), read_weights(tmp_path), 40)
    assert found == sum(t.nbytes for t in tensors)


def test_a_folder_is_described(tmp_path, capsys, tokenizer):
    model = saved(tmp_path, "strict", roles=Roles("lg", window=8))
    tokenizer.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    found = {name.strip(): text.strip() for name, text in rows.items()}
    assert found["model"] == "coca_llama" or found["model"].startswith("coca_")
    assert found["attention"] == "CoCA, form strict, full cache"
    assert found["layers"].startswith("lg") and "last 8 tokens" in found["layers"]
    assert f"of {head_width(model.config) // 2} per head" in found["free pairs"]
    assert "decay 1" in found["rotation"] and "turning_pairs 0" in found["rotation"]
    assert found["training length"].startswith(f"{model.config.max_position_embeddings:,} tokens")
    assert "float32" in found["parameters"] and found["tokenizer"] == "has no chat template"
    assert "run" not in found


def test_a_run_is_described_at_every_stage(tmp_path):
    recipe = "training: {steps: 100}\nstages: [{name: a, steps: 40}, {name: b}]\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert "in stage a, 0 of 140 steps" in dict(model_folder(tmp_path))["run"]
    (tmp_path / "stages" / "a").mkdir(parents=True)
    (tmp_path / "stages" / "a" / "stage.json").write_text("{}")
    for step in (5, 30):
        (tmp_path / "stages" / "b" / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
    assert "in stage b, 70 of 140 steps" in dict(model_folder(tmp_path))["run"]
    saved(tmp_path)
    summary = {"steps": 140, "tokens": 5000, "curve": [{"loss": 2.0}, {"loss": 1.25}]}
    (tmp_path / "training.json").write_text(json.dumps(summary))
    assert dict(model_folder(tmp_path))["run"] == (
        "finished: 140 steps, 5,000 tokens, last loss 1.250"
    )


def test_other_folders_and_damaged_files_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        model_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a model"):
        model_folder(tmp_path)
    saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-5], content[:20], b"", b"\xff" * 100, content + b"x"):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match="safetensors"):
            model_folder(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            model_folder(tmp_path)
    for text in ('{"text_config": 5}', '{"layer_types": 5, "coca_form": "slack"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError):
            model_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    weights.unlink()
    for text in ("5", "training: 3", "training: {steps: x}\nstages: [3]", "{"):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(UserError, match="copy"):
            model_folder(tmp_path)
    (tmp_path / "recipe.yaml").unlink()
    rows = dict(model_folder(tmp_path))
    assert rows["model"] == "other" and rows["parameters"] == "no safetensors files"


def test_weights_in_several_files(tmp_path):
    model = tiny_model("slack")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    weights = read_weights(tmp_path)
    assert weights is not None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights.kinds.total() == sum(p.numel() for p in loaded.parameters())


def test_the_kernels_and_the_reason(monkeypatch):
    info = "coca_lab.info."
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, cuda, expected in (
        ([], None, "no CUDA device"),
        (["H100, 80 GB"], None, "built without CUDA"),
        (["H100, 80 GB"], "12.8", "Triton"),
    ):
        monkeypatch.setattr(info + "_gpus", lambda gpus=gpus: list(gpus))
        monkeypatch.setattr(info + "_cuda_of_torch", lambda cuda=cuda: cuda)
        assert expected in dict(machine())["kernels"]
    assert f"torch {torch.__version__}" in dict(machine())["packages"]
