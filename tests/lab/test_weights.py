"""Weight files that are not those of the model that config.json describes, and copies of files."""

import json
import math
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.fingerprints import model_fingerprint
from coca_lab.loading import load_model
from coca_lab.weights import checked_pieces, is_finite
from conftest import tiny_model

UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tokenizer):
    """A rotary Llama's folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("sound") / "model"
    tiny_model("llama-rope").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rewrite(folder, change):
    """Write the weights of a folder again under other names, or with other values."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def renamed(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def without(part):
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def changed(name, change):
    return lambda tensors: {n: change(x) if n == name else x for n, x in tensors.items()}


def with_a_layer_more(tensors):
    more = {n.replace("layers.1.", "layers.2."): x.clone() for n, x in tensors.items()}
    return tensors | more


def with_scales(tensors):
    """Matrices in float8 with a scale each, as ModelOpt writes them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            found[name] = (tensor / 8).to(torch.float8_e4m3fn)
            found[name.replace("weight", "weight_scale")] = torch.tensor(8.0)
        else:
            found[name] = tensor
    return found


def in_float8(tensors):
    return {name: x for name, x in with_scales(tensors).items() if not name.endswith("scale")}


def as_adapter(tensors):
    """A PEFT model's own state: base layers beside the adapter's."""
    name = "model.layers.0.self_attn.q_proj."
    found = {n.replace(name, name + "base_layer."): x for n, x in tensors.items()}
    found[name + "lora_A.default.weight"] = torch.zeros(2, 32)
    found[name + "lora_B.default.weight"] = torch.zeros(32, 2)
    return found


EMBEDDINGS = "model.embed_tokens.weight"
DAMAGES = {
    "compiled": (renamed("_orig_mod."), "it, model._orig_mod"),
    "wrapped": (renamed("module."), "save model.module"),
    "a layer missing": (without("layers.1."), "tensors are missing from the weight files"),
    "a layer more": (with_a_layer_more, "more, for example model.layers.2."),
    "head missing": (without("lm_head"), "example lm_head.weight, and would be random"),
    "embeddings": (changed(EMBEDDINGS, lambda x: x[:-4].clone()), "other shapes than config.json"),
    "adapter names": (as_adapter, "they are of an adapter: merge it"),
    "scales": (with_scales, "no quantization_config"),
    "float8": (in_float8, "no quantization_config"),
}
COMMANDS = {
    "yarn": ["extend", "--method", "yarn"],
    "limited": ["extend", "--method", "limited"],
    "convert": ["convert", "--form", "strict"],
    "perplexity": ["eval", "perplexity", "--windows", "16"],
    "generate": ["generate"],
    "export": ["export"],
    "train": ["train"],
}


def words(command, folder, target, text):
    """The command line of a command for a model, and for training on a text from it."""
    name, *options = COMMANDS[command]
    if name == "train":
        content = {
            "model": {"start": str(folder)},
            "data": {"source": str(text), "block_length": 16},
            "training": {"steps": 1, "precision": "float32", "report_to": []},
        }
        recipe = folder.with_name("recipe.yaml")
        recipe.write_text(json.dumps(content))
        return [name, recipe, "--output", target]
    if name == "eval":
        return [name, options[0], folder, *options[1:], "--source", text, "--output", target]
    return [name, folder, "alpha" if name == "generate" else target, *options]


@pytest.fixture
def refused(tmp_path, text_folder, capfd, monkeypatch):
    """A function that runs a command on a folder, and returns its one line."""
    monkeypatch.chdir(tmp_path)

    def run(command, folder):
        target = tmp_path / "target.json"
        line = words(command, folder, target, text_folder)
        assert main([str(word) for word in line]) == 2
        said = capfd.readouterr().err.strip().splitlines()
        assert said[-1].startswith("coca: error: ") and "LOAD REPORT" not in "".join(said)
        assert not target.exists() and not (tmp_path / f".{target.name}.coca-partial").exists()
        return said[-1]

    return run


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_another_model_are_refused_by_every_command(
    damage, command, sound, tmp_path, refused
):
    change, message = DAMAGES[damage]
    folder = shutil.copytree(sound, tmp_path / "model")
    rewrite(folder, change)
    assert message in refused(command, folder)


@pytest.mark.parametrize("command", ["yarn", "perplexity"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 280, "lm_head.weight with (300, 32) in place of (280, 32): copy"),
        ("vocab_size", 0, "config.json has a wrong value (index 0"),
        ("hidden_size", 48, "lm_head.weight with (300, 32) in place of (300, 48): copy"),
        ("hidden_size", 30, "wrong value (The hidden size (30) is not a multiple of the number of"),
        ("hidden_size", "32", "wrong value (Field 'hidden_size' expected int, got str"),
        ("intermediate_size", 63, "down_proj.weight with (32, 64) in place of (32, 63): copy"),
        ("intermediate_size", -1, "wrong value (Trying to create tensor with negative dimension"),
        ("num_hidden_layers", 1, "9 more, for example model.layers.1.input_layernorm.weight: copy"),
        (
            "num_hidden_layers",
            3,
            "layers.2.input_layernorm.weight, and would be random: copy",
        ),
        ("num_key_value_heads", 1, "k_proj.weight with (16, 32) in place of (8, 32): copy"),
        ("num_key_value_heads", 0, "wrong value (integer division or modulo by zero): correct it"),
    ],
)
def test_a_size_that_does_not_fit_is_told_with_what_to_do(
    field, value, message, command, sound, tmp_path, refused
):
    folder = shutil.copytree(sound, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    said = refused(command, folder)
    assert message in said and "validation error" not in said.lower()
    assert said.startswith(f"coca: error: {folder}: ")  # the model's name is said once


@pytest.mark.parametrize("command", COMMANDS)
def test_an_adapter_beside_a_model_is_refused_by_every_command(command, sound, tmp_path, refused):
    folder = shutil.copytree(sound, tmp_path / "model")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert "beside the model" in refused(command, folder)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("command", ["yarn", "limited", "convert", "train"])
def test_values_that_are_not_finite_are_not_written(command, value, sound, tmp_path, refused):
    folder = shutil.copytree(sound, tmp_path / "model")
    rewrite(folder, changed("model.norm.weight", lambda x: x.index_fill(0, torch.tensor(9), value)))
    assert "model.norm.weight has values that are not finite" in refused(command, folder)


def test_finiteness_is_that_of_every_value():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for size in (1, 17, 100_003):
            values = torch.randn(size).to(dtype)
            assert is_finite(values)
            for value in (math.nan, math.inf, -math.inf):
                values[size // 2] = value
                assert not is_finite(values)
    assert is_finite(torch.empty(0))


def test_a_copy_has_the_same_bytes_whatever_the_pieces(sound, monkeypatch):
    monkeypatch.setattr("coca_lab.weights.CHUNK", 256)
    file = sound / "model.safetensors"
    pieces = [*checked_pieces(file)]
    assert max(map(len, pieces[1:])) == 256  # after the header
    assert b"".join(pieces) == file.read_bytes()


def test_old_buffers_are_no_unknown_tensors(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "model")
    names = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "attention.masked_bias", "attn.bias")
    buffers = {f"model.layers.0.self_attn.{name}": torch.ones(4) for name in names}
    rewrite(folder, lambda tensors: tensors | buffers)
    load_model(folder, device="cpu")
    assert main(["extend", str(folder), str(tmp_path / "target"), "--method", "yarn"]) == 0


@pytest.mark.parametrize("command", ["yarn", "limited"])
def test_a_head_beside_tied_embeddings_stays_and_is_said(command, sound, tmp_path):
    """As merging an adapter that trained the head leaves it: config.json calls them tied."""
    folder, target = shutil.copytree(sound, tmp_path / "model"), tmp_path / "target"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert main([str(word) for word in words(command, folder, target, "")]) == 0
    assert torch.equal(load_file(target / "model.safetensors")["lm_head.weight"], head)
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    model = load_model(target, device="cpu")
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.get_input_embeddings().weight, head)


@pytest.fixture
def modelopt(sound, tmp_path):
    """A folder whose weights are quantised as a file beside config.json says."""
    folder = shutil.copytree(sound, tmp_path / "model")
    rewrite(folder, with_scales)
    settings = {"quantization": {"quant_algo": "FP8"}, "producer": {"name": "modelopt"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    return folder


def test_stock_methods_copy_what_modelopt_quantised(modelopt, tmp_path, capsys):
    target = tmp_path / "target"
    assert main(["extend", str(modelopt), str(target), "--method", "yarn"]) == 0
    for name in ("hf_quant_config.json", "model.safetensors"):
        assert (target / name).read_bytes() == (modelopt / name).read_bytes()
    assert "runs in vLLM (untried: SGLang)\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["limited", "convert", "perplexity", "generate"])
def test_others_do_not_take_its_numbers_for_weights(command, modelopt, refused):
    assert "hf_quant_config.json says" in refused(command, modelopt)


def test_float8_without_scales_is_refused_although_it_is_said(modelopt, refused):
    rewrite(modelopt, lambda tensors: {n: x for n, x in tensors.items() if "scale" not in n})
    assert "has no scale beside it" in refused("yarn", modelopt)


def test_a_quantised_layer_that_is_missing_is_found(sound, tmp_path, refused):
    folder = shutil.copytree(sound, tmp_path / "model")
    rewrite(folder, lambda tensors: with_scales(without("layers.1.")(tensors)))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "tensors are missing" in refused("yarn", folder)


@pytest.mark.parametrize("command", ["yarn", "limited", "convert"])
@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
def test_what_a_link_brings_into_a_folder_is_not_published(command, name, sound, tmp_path, refused):
    folder = shutil.copytree(sound, tmp_path / "model")
    outside = tmp_path.with_name(f"outside of {tmp_path.name}")
    shutil.copy(folder / name, outside) if (folder / name).exists() else outside.write_text("key")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    assert f"{name} is a link out of the model's folder" in refused(command, folder)


@pytest.mark.parametrize("command", ["yarn", "limited"])
def test_code_of_a_folder_is_neither_run_nor_named(command, sound, tmp_path):
    folder, target = shutil.copytree(sound, tmp_path / "model"), tmp_path / "target"
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    for file, names in (
        ("config.json", {"AutoConfig": "mine.A", "AutoModelForCausalLM": "mine.B"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["mine.C", None]}),
    ):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | {"auto_map": names}))
    assert main([str(word) for word in words(command, folder, target, "")]) == 0
    assert not ran.exists() and not (target / "mine.py").exists()
    for file in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((target / file).read_text())


@pytest.mark.parametrize("command", ["yarn", "limited", "convert"])
def test_a_dtype_that_is_not_said_is_that_of_the_files(command, sound, tmp_path):
    folder, target = shutil.copytree(sound, tmp_path / "model"), tmp_path / "target"
    rewrite(folder, lambda tensors: {name: x.bfloat16() for name, x in tensors.items()})
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert main([str(word) for word in words(command, folder, target, "")]) == 0
    assert {x.dtype for x in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("command", ["yarn", "limited"])
def test_weights_in_a_folder_below_are_read_and_written_alike(command, sound, tmp_path):
    folder, target = shutil.copytree(sound, tmp_path / "model"), tmp_path / "target"
    (folder / "parts").mkdir()
    names = load_file(folder / "model.safetensors")
    shutil.move(folder / "model.safetensors", folder / "parts" / "one.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "parts/one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main([str(word) for word in words(command, folder, target, "")]) == 0
    model, extended = (load_model(each, device="cpu") for each in (folder, target))
    if command == "limited":
        ids = some_tokens(model, length=30)
        assert difference(logits(extended, ids), logits(model, ids)) < 1e-5
    else:
        assert (target / "parts" / "one.safetensors").is_file()
        assert type(extended) is type(AutoModelForCausalLM.from_pretrained(target))


@pytest.mark.parametrize("command", ["yarn", "limited"])
def test_a_tokenizer_that_needs_another_package_is_kept(command, sound, tmp_path, capsys):
    """A folder with SentencePiece's file alone, where that package is not installed."""
    if find_spec("sentencepiece") is not None:
        pytest.skip("sentencepiece is installed")
    folder, target = shutil.copytree(sound, tmp_path / "model"), tmp_path / "target"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"what only sentencepiece reads")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main([str(word) for word in words(command, folder, target, "")]) == 0
    said = capsys.readouterr().err
    assert "needs the package sentencepiece" in said and "copied as they are" in said
    for name in ("tokenizer.model", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    assert main(["generate", str(folder), "alpha"]) == 2
    assert "pip install sentencepiece" in capsys.readouterr().err


def test_weights_in_a_folder_below_are_part_of_the_fingerprint(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "model")
    (folder / "parts").mkdir()
    file = folder / "parts" / "one.safetensors"
    shutil.move(folder / "model.safetensors", file)
    index = {"metadata": {}, "weight_map": {EMBEDDINGS: "parts/one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = model_fingerprint(folder)
    assert model_fingerprint(folder) == before
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_fingerprint(folder) != before
