"""GGUF files: read back, and run by the graph that docs/llama-cpp.md describes, in NumPy."""

import numpy as np
import pytest
import torch

from coca_attention import convert
from coca_attention.models import Roles, set_rotary_scaling
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from conftest import some_text, tiny_model
from families import collinear, vanilla

gguf = pytest.importorskip("gguf")
LOCAL_AND_GLOBAL = Roles("lg", window=5, turning_pairs=2, temperature=True, decay=0.0)


def scaled(rule, **parameters):
    model = convert(vanilla("Llama"), "strict", free_pairs=1)
    set_rotary_scaling(model, rule, **parameters)
    return model


def linear():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    return vanilla("Llama", rope_parameters=rope)


MODELS = {
    "slack": lambda: collinear("Llama"),
    "strict": lambda: collinear("Llama", "strict"),
    "magnitude": lambda: collinear("Llama", "magnitude"),
    "free pairs, slack": lambda: convert(vanilla("Llama"), free_pairs=1),
    "free pairs, magnitude": lambda: convert(vanilla("Llama"), "magnitude", free_pairs=3),
    "all pairs free": lambda: convert(vanilla("Llama"), "strict", free_pairs=4),
    "biases, tied embeddings": lambda: collinear(
        "Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "roles": lambda: convert(vanilla("Llama"), roles=LOCAL_AND_GLOBAL),
    "rotary roles": lambda: convert(vanilla("Llama"), "rope", roles=LOCAL_AND_GLOBAL),
    "no turning": lambda: convert(vanilla("Llama"), roles=Roles("lg", window=5, decay=0.0)),
    "ntk": lambda: scaled("ntk", factor=4.0),
    "yarn": lambda: scaled("yarn", factor=4.0),
}


class Read:
    """Metadata and tensors of a file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.types = {t.name: t.tensor_type.name for t in reader.tensors}
        self.tensors = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors
        }

    def __getitem__(self, name):
        return self.fields[f"coca-llama.{name}"]


def exported(model, folder, *options):
    model.save_pretrained(folder / "model")
    path = folder / "model.gguf"
    assert main(["export", str(folder / "model"), str(path), "--gguf", *options]) == 0
    return Read(path)


def run(file, ids):
    """The documented graph, in float32: ids (T,) to logits (T, vocabulary)."""
    heads, kv_heads, width = (
        file[f"attention.{name}"] for name in ("head_count", "head_count_kv", "key_length")
    )
    tensors, positions = file.tensors, np.arange(len(ids))

    def linear(x, name):
        y = x @ tensors[f"{name}.weight"].T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def norm(x, name):
        square = (x * x).mean(-1, keepdims=True)
        epsilon = np.float32(file["attention.layer_norm_rms_epsilon"])
        return x / np.sqrt(square + epsilon) * tensors[f"{name}.weight"]

    def rope(x, divisors):
        theta = file["rope.freq_base"] ** (-np.arange(0, width, 2) / width) / divisors
        angles = positions[:, None, None] * theta
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(x, 2, -1)
        return np.concatenate((first * cos - second * sin, first * sin + second * cos), -1)

    x = tensors["token_embd.weight"][ids]
    for layer, free in enumerate(file["free_pairs"]):
        block, still = f"blk.{layer}", width // 2 - free
        local = file.fields.get("coca-llama.attention.sliding_window_pattern")
        local = local is not None and local[layer]
        divisors = 1.0 if local else tensors.get("rope_freqs.weight", 1.0)
        h = norm(x, f"{block}.attn_norm")
        q = linear(h, f"{block}.attn_q").reshape(len(ids), heads, width)
        t = linear(h, f"{block}.attn_k").reshape(len(ids), kv_heads, width // 2 + free)
        v = linear(h, f"{block}.attn_v").reshape(len(ids), kv_heads, width)
        t = np.concatenate((np.maximum(t[..., :still], 0), t[..., still:]), -1)
        first, second = np.split(q, 2, -1)
        collinear, squares = t[..., :still], (first**2 + second**2)[..., :still]
        if file["form"] == "slack":
            ones = np.ones_like(q[..., :free])
            factor = np.concatenate((first[..., :still], ones, second[..., :still], ones), -1)
            query, half = factor * rope(q, divisors), collinear
        else:
            size = squares if file["form"] == "strict" else np.sqrt(squares)
            query = rope(
                np.concatenate(
                    (size, first[..., still:], np.zeros_like(size), second[..., still:]), -1
                ),
                divisors,
            )
            half = np.zeros_like(collinear)
        key = rope(np.concatenate((t[..., : width // 2], half, t[..., width // 2 :]), -1), divisors)
        if not local and "coca-llama.attention.temperature_length" in file.fields:
            length = file["attention.temperature_length"]
            query = query * (np.log(positions + 2) / np.log(length + 1))[:, None, None]
        key, v = (y.repeat(heads // kv_heads, 1) for y in (key, v))
        scores = np.einsum("thd,shd->hts", query, key).astype(np.float32) / np.float32(width**0.5)
        distance = positions[:, None] - positions
        hidden = distance < 0
        if local:
            hidden |= distance >= file["attention.sliding_window"]
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        output = np.einsum("hts,shd->thd", weights, v).reshape(len(ids), -1)
        x = x + linear(output, f"{block}.attn_output")
        h = norm(x, f"{block}.ffn_norm")
        gate = linear(h, f"{block}.ffn_gate")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, f"{block}.ffn_up"), f"{block}.ffn_down"
        )
    output = "output" if "output.weight" in tensors else "token_embd"
    return linear(norm(x, "output_norm"), output)


@pytest.mark.parametrize("name", MODELS)
def test_the_documented_graph_gives_the_logits(name, tmp_path):
    model = MODELS[name]().eval()
    file = exported(model, tmp_path)
    ids = some_tokens(model, batch=1, length=40)
    ours = logits(model, ids)
    exact = logits(model.double(), ids)
    found = torch.from_numpy(run(file, ids[0].numpy()))[None]
    assert difference(found, exact) < 4 * difference(ours, exact)


def test_settings_and_types(tmp_path, tokenizer):
    model = tiny_model("llama-strict")
    tokenizer.save_pretrained(tmp_path / "model")
    file = exported(model, tmp_path, "--dtype", "float16")
    assert file.fields["general.architecture"] == "coca-llama"
    assert (file["form"], file["free_pairs"]) == ("strict", [0, 0])
    assert (file["context_length"], file["embedding_length"], file["vocab_size"]) == (32, 32, 300)
    assert file.types["blk.0.attn_k.weight"] == "F16"
    assert file.types["blk.0.attn_norm.weight"] == "F32"
    assert "rope_freqs.weight" not in file.types
    weight = model.model.layers[1].self_attn.t_proj.weight.detach()
    assert np.array_equal(file.tensors["blk.1.attn_k.weight"], weight.half().float().numpy())
    assert file.fields["tokenizer.ggml.pre"] == "gpt-2"
    tokens = file.fields["tokenizer.ggml.tokens"]
    size = len(tokenizer)
    assert tokens[:size] == tokenizer.convert_ids_to_tokens(range(size))
    assert tokens[-1] == "[PAD299]"
    assert len(file.fields["tokenizer.ggml.merges"]) > 10


def test_bfloat16_and_no_tokenizer(tmp_path, capsys):
    model = tiny_model("llama-slack")
    file = exported(model, tmp_path, "--dtype", "bfloat16")
    assert file.types["blk.0.attn_q.weight"] == "BF16"
    weight = model.model.layers[0].self_attn.q_proj.weight.detach()
    assert np.array_equal(file.tensors["blk.0.attn_q.weight"], weight.bfloat16().float().numpy())
    assert file.fields["tokenizer.ggml.model"] == "none"
    assert "without a tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: collinear("Qwen2"), "Llama family (coca_llama); this is a coca_qwen2"),
        (lambda: convert(vanilla("Llama"), "rope"), "max_distance, which needs two scores"),
        (lambda: convert(vanilla("Llama"), roles=Roles("lg", window=4)), "a decay, a bias on"),
        (lambda: scaled("dynamic", factor=2.0), "dynamic scaling, which follows the text's length"),
        (lambda: collinear("Llama", hidden_act="gelu"), "the activation gelu"),
        (
            lambda: convert(linear(), roles=Roles("lg", window=4, decay=0)),
            "a scaling rule in local layers",
        ),
    ],
    ids=["family", "max_distance", "decay", "dynamic", "activation", "local rule"],
)
def test_what_the_graph_cannot_compute_is_refused(make, message, tmp_path, capsys):
    make().save_pretrained(tmp_path / "model")
    target = tmp_path / "model.gguf"
    assert main(["export", str(tmp_path / "model"), str(target), "--gguf"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_is_not_overwritten(tmp_path, capsys):
    target = tmp_path / "model.gguf"
    target.write_text("mine")
    assert main(["export", str(tmp_path), str(target), "--gguf"]) == 2
    assert "model.gguf exists: name a new file" in capsys.readouterr().err
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_logits(name, tmp_path):
    """Prompt and single tokens, where the bindings were built with docs/llama-cpp.patch."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python with our patch")
    model = MODELS[name]().eval()
    exported(model, tmp_path)
    ids = some_tokens(model, batch=1, length=40)
    ours = logits(model, ids)
    exact = logits(model.double(), ids)
    # 0: float32 keys and values; the default is float16.
    settings = {"n_ctx": 64, "type_k": 0, "type_v": 0, "logits_all": True, "verbose": False}
    engine = llama_cpp.Llama(str(tmp_path / "model.gguf"), flash_attn=False, **settings)
    engine.eval(ids[0, :30].tolist())
    for token in ids[0, 30:].tolist():
        engine.eval([token])
    found = torch.from_numpy(engine.scores[:40].copy())[None]
    assert difference(found, exact) < 4 * difference(ours, exact)


@pytest.mark.parametrize("split_digits", [False, True])
def test_llama_cpp_splits_text_alike(split_digits, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python with our patch")
    text = some_text(3000)
    tokenizer = train_tokenizer([Document("a", text)], 300, split_digits=split_digits)
    tokenizer.save_pretrained(tmp_path / "model")
    file = exported(tiny_model("llama-slack"), tmp_path)
    assert file.fields["tokenizer.ggml.pre"] == ("smollm" if split_digits else "gpt-2")
    engine = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    text = text[:500] + " It's 1234 naïve  tokens,\n\n\tno?<|endoftext|>x"
    found = engine.tokenize(text.encode(), add_bos=False, special=True)
    assert found == tokenizer(text, add_special_tokens=False).input_ids
