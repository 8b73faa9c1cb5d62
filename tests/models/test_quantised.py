"""Models whose files are quantised: GGUF, and packed weights as others write them."""

import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from coca_attention import convert, extend_context
from coca_attention.errors import UserError
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.folders import extend_folder
from coca_lab.loading import model_without_weights
from coca_lab.weights import weight_files
from families import vanilla
from public_models import packed

PACKED = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GGUF_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    ".self_attn.q_proj": ".attn_q",
    ".self_attn.k_proj": ".attn_k",
    ".self_attn.v_proj": ".attn_v",
    ".self_attn.o_proj": ".attn_output",
    ".mlp.gate_proj": ".ffn_gate",
    ".mlp.up_proj": ".ffn_up",
    ".mlp.down_proj": ".ffn_down",
    ".input_layernorm": ".attn_norm",
    ".post_attention_layernorm": ".ffn_norm",
}


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory):
    """A folder with a Llama in GGUF's Q8_0, written by the format's own package."""
    gguf = pytest.importorskip("gguf")
    model, folder = vanilla("Llama"), tmp_path_factory.mktemp("gguf")
    config = model.config
    writer = gguf.GGUFWriter(folder / "llama.gguf", "llama")
    for theirs, its in GGUF_FIELDS.items():
        getattr(writer, f"add_{theirs}")(getattr(config, its))
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, weight in model.state_dict().items():
        for theirs, its in GGUF_NAMES.items():
            name = name.replace(theirs, its)
        values = weight.numpy()
        packs = weight.dim() == 2 and weight.shape[1] % 32 == 0
        packed = gguf.quants.quantize(values, q8) if packs else values
        writer.add_tensor(name, packed, raw_dtype=q8 if packs else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda model: extend_context(model, "yarn"),
        lambda model: extend_context(model, "limited"),
        lambda model: convert(model, "strict"),
    ],
    ids=["yarn", "limited", "strict"],
)
def test_what_was_read_from_gguf_is_changed_and_saved(change, gguf_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file="llama.gguf", dtype=torch.float32
    ).eval()
    ids = some_tokens(model, length=100)
    before = logits(model, ids)
    after = logits(change(model), ids)
    assert difference(after, before) > 1e-4
    model.save_pretrained(tmp_path)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path), "quantization_config")
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(model) and difference(logits(again, ids), after) < 1e-5


def test_folders_that_are_no_models_say_what_they_are(gguf_folder, tmp_path, capsys):
    model = get_peft_model(vanilla("Llama"), LoraConfig(target_modules="all-linear"))
    model.save_pretrained(tmp_path / "adapter")
    vanilla("Llama").save_pretrained(tmp_path / "run" / "checkpoint-20")
    told = {
        gguf_folder: "write llama.gguf as one first",
        tmp_path / "adapter": "it is an adapter: merge it",
        tmp_path / "run": "it has checkpoints, such as checkpoint-20",
    }
    for folder, what in told.items():
        assert main(["info", str(folder)]) == 2
        assert f"it has no config.json; {what}" in capsys.readouterr().err


@pytest.fixture
def packed_folder(tmp_path):
    """A folder of shards with weights that nothing here can load, as quantisers write them."""
    folder = tmp_path / "packed"
    vanilla("Llama").save_pretrained(folder, max_shard_size="50KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": PACKED}))
    for file in folder.glob("*.safetensors"):
        save_file(packed(load_file(file)), file, metadata={"format": "pt"})
    assert len(weight_files(folder)) == 3
    return folder


def test_stock_methods_copy_packed_weights(packed_folder, tmp_path, capsys):
    target = tmp_path / "extended"
    assert main(["extend", str(packed_folder), str(target), "--method", "yarn", "--to", "640"]) == 0
    assert "runs in Transformers, vLLM (untried: SGLang)\n" in capsys.readouterr().out
    for name, file in weight_files(packed_folder).items():
        assert (target / name).read_bytes() == file.read_bytes()
    config = AutoConfig.from_pretrained(target)
    assert config.rope_parameters["rope_type"] == "yarn" and config.max_position_embeddings == 640
    assert config.quantization_config == PACKED
    assert main(["info", str(target)]) == 0
    assert "(awq)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["convert", "--form", "strict"], ["extend", "--method", "limited"]]
)
def test_packed_weights_are_not_converted(words, packed_folder, tmp_path, capsys):
    command, *options = words
    assert main([command, str(packed_folder), str(tmp_path / "target"), *options]) == 2
    assert "is quantised: convert it in full precision" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_weights_are_those_of_the_folder(packed_folder, tmp_path):
    index, *files = weight_files(packed_folder).values()
    generation = packed_folder / "generation_config.json"
    outside = tmp_path / "outside.safetensors"
    settings = shutil.move(generation, tmp_path / "settings.json")
    generation.symlink_to(settings)
    with pytest.raises(UserError, match=r"generation_config.json is a link out of"):
        extend_folder(packed_folder, tmp_path / "extended", "yarn")
    generation.unlink()
    shutil.move(files[0], outside)
    files[0].symlink_to(outside)
    with pytest.raises(UserError, match="is a link out of the model's folder"):
        extend_folder(packed_folder, tmp_path / "extended", "yarn")
    files[0].unlink()
    named = json.loads(index.read_text())
    named["weight_map"] = dict.fromkeys(named["weight_map"], f"../{outside.name}")
    index.write_text(json.dumps(named))
    with pytest.raises(UserError, match=re.escape(outside.name)):
        extend_folder(packed_folder, tmp_path / "extended", "yarn")
    assert not (tmp_path / "extended").exists()


def gptq(name, matrix):
    rows, width = matrix.shape
    return {
        f"{name}.qweight": torch.ones(width // 8, rows, dtype=torch.int32),
        f"{name}.qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
        f"{name}.scales": torch.ones(1, rows, dtype=torch.float16),
        f"{name}.g_idx": torch.zeros(width, dtype=torch.int32),
    }


def bitsandbytes(name, matrix):
    state = {f"{name}.weight.quant_state.bitsandbytes__nf4": torch.ones(8, dtype=torch.uint8)}
    sizes = {f"{name}.weight.{end}": torch.ones(16) for end in ("absmax", "quant_map")}
    return {f"{name}.weight": torch.ones(matrix.numel() // 2, 1, dtype=torch.uint8)} | state | sizes


def fp8(name, matrix):
    scale = {f"{name}.weight_scale_inv": torch.ones(1, 1)}
    return {f"{name}.weight": matrix.to(torch.float8_e4m3fn)} | scale


def compressed(name, matrix):
    return {
        f"{name}.weight_packed": torch.ones(len(matrix), 4, dtype=torch.int32),
        f"{name}.weight_scale": torch.ones(len(matrix), 1),
        f"{name}.weight_shape": torch.tensor(matrix.shape),
    }


WRITERS = {"gptq": gptq, "bitsandbytes": bitsandbytes, "fp8": fp8, "compressed-tensors": compressed}


@pytest.mark.parametrize("family", ["Llama", "Qwen3 MoE", "Mixtral", "Phi"])
@pytest.mark.parametrize("method", WRITERS)
def test_names_of_packed_weights_are_compared_with_the_model(method, family, tmp_path):
    """As each quantiser writes them, experts apart, without any of them installed."""
    model = vanilla(family)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file, found = tmp_path / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        layer = re.search(r"layers.*(proj|dense|w1|w2|w3|fc\d)\.weight$", name)
        packed_ones = WRITERS[method](name.removesuffix(".weight"), tensor) if layer else {}
        found |= packed_ones or {name: tensor}
    assert len(found) > len(load_file(file))

    def checked(tensors):
        save_file({name: x.contiguous() for name, x in tensors.items()}, file, {"format": "pt"})
        return model_without_weights(tmp_path, "auto")

    assert checked(found).num_parameters() == model.num_parameters()
    fewer = {name: x for name, x in found.items() if "layers.1." not in name}
    with pytest.raises(UserError, match="tensors are missing"):
        checked(fewer)
    more = {n.replace("layers.1.", "layers.9."): x.clone() for n, x in found.items()}
    with pytest.raises(UserError, match=r"more, for example .*layers\.9\."):
        checked(found | more)
