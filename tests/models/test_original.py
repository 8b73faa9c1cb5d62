"""Checkpoints of the paper's authors, compared with the results of their implementation."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from coca_attention import load_original
from coca_attention.testing import logits
from families import assert_reloads, reloaded, vanilla

NAMES = [f"{f} {s}" for f in ("llama", "gpt_neox") for s in ("plain", "linear", "dynamic")]


def extract(name: str = "llama dynamic") -> tuple[dict, dict, dict]:
    """Configuration, weights, and figures: last rows of the authors' logits and attention."""
    family, scaling = name.split()
    path = Path(__file__).parent / "golden" / f"{family}.safetensors"
    with safe_open(path, "pt") as file:
        config, scalings = (json.loads(file.metadata()[n]) for n in ("config", "rope_scaling"))
    tensors = load_file(path)
    weights = {n[2:]: w for n, w in tensors.items() if n.startswith("w.")}
    figures = {n.partition(" ")[2]: x for n, x in tensors.items() if n.startswith(scaling)}
    figures["input_ids"] = tensors["input_ids"]
    return config | {"rope_scaling": scalings[scaling]}, weights, figures


def write(folder: Path, config: dict, weights: dict) -> Path:
    """A checkpoint's folder."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_the_authors(name, tmp_path):
    config, weights, figures = extract(name)
    model = load_original(write(tmp_path, config, weights))
    assert model.config.model_type == "coca_" + config["model_type"]
    assert model.config.coca_form == "slack"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(figures["input_ids"], output_attentions=True)
    for found, expected in (
        (output.logits, figures["logits"]),
        (output.attentions[0], figures["attn_layer0"]),
        (output.attentions[-1], figures["attn_last"]),
    ):
        assert (found[..., -expected.shape[-2] :, :] - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt_neox plain", "safetensors"), ("gpt_neox plain", "bin"), ("llama dynamic", "sharded")],
)
def test_a_folder_of_either_kind_of_file(name, kind, tmp_path):
    config, weights, figures = extract(name)
    expected = load_original(write(tmp_path, config, weights))(figures["input_ids"]).logits
    (tmp_path / "model.safetensors").unlink()
    if name == "gpt_neox plain":  # buffers that old versions of Transformers saved are ignored
        weights["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(3)
    if kind == "bin":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        largest = "100KB" if kind == "sharded" else "1GB"
        save_torch_state_dict(weights, tmp_path, max_shard_size=largest)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (kind == "sharded")
    model = load_original(tmp_path)
    assert torch.equal(model(figures["input_ids"]).logits, expected)
    assert_reloads(model, tmp_path / "saved")  # by the names of its class


def test_a_tied_head_may_be_missing_and_the_dtype_is_kept(tmp_path):
    config, weights, figures = extract()
    config["tie_word_embeddings"], ids = True, figures["input_ids"]
    weights = {n: w for n, w in weights.items() if n != "lm_head.weight"}
    model = load_original(write(tmp_path, config, weights), dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(reloaded(model, tmp_path / "saved"), ids), logits(model, ids))


T = "model.layers.1.self_attn.t_proj.weight"


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({}, {T: None}, r"model\.layers\.1\.self_attn\.t_proj\.weight is missing"),
        ({}, {T: torch.zeros(16, 64)}, r"t_proj\.weight has shape \(16, 64\), expected \(32, 64\)"),
        ({}, {"model.extra": torch.zeros(1)}, r"model\.extra is not known"),
        ({"model_type": "gpt2"}, {}, "expected model_type llama or gpt_neox, .* got 'gpt2'"),
        ({"model_type": None}, {}, "model_type .* got None"),
        ({"hidden_size": "wide"}, {}, "the configuration cannot be used"),
        ({"rope_scaling": {"type": "cubic", "factor": 2.0}}, {}, "cannot be used: .*cubic"),
        ({"rotary_pct": 0.25}, {}, r"less than the head width 16.*would not be collinear"),
    ],
)
def test_invalid_checkpoints_are_refused(settings, change, message, tmp_path):
    config, weights, _ = extract("gpt_neox plain" if "rotary_pct" in settings else "llama dynamic")
    weights = {n: w for n, w in {**weights, **change}.items() if w is not None}
    with pytest.raises(ValueError, match=message):
        load_original(write(tmp_path, {**config, **settings}, weights))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_keys_of_a_vanilla_llama_are_not_taken_for_t(kind, tmp_path):
    config, weights, _ = extract("llama dynamic")
    keys = {name.replace("t_proj", "k_proj"): weight for name, weight in weights.items()}
    write(tmp_path, config, keys)
    if kind == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(keys, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj.weight is not .* t_proj"):
        load_original(tmp_path)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("GPT-NeoX", "has rope_parameters"),
        ("Llama", r"layers\.0\.self_attn\.k_proj\.weight is not"),
    ],
)
def test_what_transformers_5_wrote_is_no_checkpoint_of_the_authors(family, message, tmp_path):
    vanilla(family, rotary_pct=1.0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{message}.*coca convert --form"):
        load_original(tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("llama")])
def test_a_llama_that_was_saved_again_by_transformers_5_is_the_same(name, tmp_path):
    config, weights, figures = extract(name)
    expected = load_original(write(tmp_path, config, weights))(figures["input_ids"]).logits
    LlamaConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_scaling" not in saved
    assert torch.equal(load_original(tmp_path)(figures["input_ids"]).logits, expected)


def test_unreadable_folders_are_named(tmp_path):
    for content, message in (
        (None, "config.json cannot be read: .*No such file"),
        ("{", "config.json cannot be read: Expecting property name"),
        ("[]", "expected model_type llama or gpt_neox, .* got None"),
        (json.dumps(extract()[0]), "no weights could be loaded"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_original(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(ValueError, match=r"a file is damaged .* header"):
        load_original(tmp_path)


class Payload:
    """Its pickle would run code when loaded."""

    def __reduce__(self):
        return (print, ("executed",))


def test_code_in_a_checkpoint_is_not_executed(tmp_path, capsys):
    config, weights, _ = extract()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({**weights, "x": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="contains more than tensors"):
        load_original(tmp_path)
    assert "executed" not in capsys.readouterr().out
