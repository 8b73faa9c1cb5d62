"""Checkpoints of the paper's authors, compared with the results of their implementation."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from coca_attention import load_original
from coca_attention.testing import logits
from families import assert_reloads, reloaded

# Extracts kept here: two of six models, with the last rows of logits and attention weights.
EXTRACTS = Path(__file__).parent / "golden"
WHOLE = Path(__file__).parents[3] / "shared" / "golden"
NAMES = [f"{f}_{s}" for f in ("llama", "gpt_neox") for s in ("plain", "linear", "dynamic")]


def read(path: Path) -> tuple[dict, dict, dict]:
    """Configuration, weights and figures."""
    tensors = load_file(path)
    beside = path.with_suffix(".json")
    if beside.exists():
        config = json.loads(beside.read_text())
    else:
        with safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
    weights = {name[2:]: w for name, w in tensors.items() if name.startswith("w.")}
    return config, weights, {n: t for n, t in tensors.items() if not n.startswith("w.")}


def extract(name: str = "llama_dynamic") -> tuple[dict, dict, dict]:
    return read(EXTRACTS / f"{name}.safetensors")


def write(folder: Path, config: dict, weights: dict) -> Path:
    """A checkpoint's folder."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def error(folder, config, weights, figures):
    """Largest difference from the authors' figures, of logits and of attention weights."""
    model = load_original(write(folder, config, weights))
    assert model.config.model_type == "coca_" + config["model_type"]
    assert model.config.coca_form == "slack"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(figures["input_ids"], output_attentions=True)
    pairs = [
        (output.logits, figures["logits"]),
        (output.attentions[0], figures["attn_layer0"]),
        (output.attentions[-1], figures["attn_last"]),
    ]
    # The extracts have the last rows alone.
    return max((x[..., -y.shape[-2] :, :] - y).abs().max().item() for x, y in pairs)


@pytest.mark.parametrize("name", ["llama_dynamic", "gpt_neox_plain"])
def test_extracts_of_the_authors_figures(name, tmp_path):
    assert error(tmp_path, *extract(name)) < 1e-5


@pytest.mark.skipif(not WHOLE.is_dir(), reason="the authors' six models are not at hand")
@pytest.mark.parametrize("name", NAMES)
def test_the_authors_figures(name, tmp_path):
    assert error(tmp_path, *read(WHOLE / f"{name}.safetensors")) < 1e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt_neox_plain", "safetensors"), ("gpt_neox_plain", "bin"), ("llama_dynamic", "sharded")],
)
def test_a_folder_of_either_kind_of_file(name, kind, tmp_path):
    config, weights, figures = extract(name)
    expected = load_original(write(tmp_path, config, weights))(figures["input_ids"]).logits
    (tmp_path / "model.safetensors").unlink()
    if name == "gpt_neox_plain":  # buffers that old versions of Transformers saved are ignored
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
    config, weights, _ = extract("gpt_neox_plain" if "rotary_pct" in settings else "llama_dynamic")
    weights = {n: w for n, w in {**weights, **change}.items() if w is not None}
    with pytest.raises(ValueError, match=message):
        load_original(write(tmp_path, {**config, **settings}, weights))


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
