"""The registered models: saving, caches, generation, positions, backends."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

import oracle
from coca_attention.models import CoCAGPTNeoXConfig, CoCALlamaConfig
from coca_lab.loading import load_model
from conftest import CONFIGS, VOCABULARY, tiny_model

OURS = ["slack", "strict", "llama-slack", "llama-strict", "alibi"]
COCA = OURS[:4]


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", OURS)
def test_saved_and_loaded_by_the_auto_class_gives_the_same_logits(kind, tmp_path):
    model = tiny_model(kind)
    before = model(tokens()).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    ours, theirs = (
        {key: value for key, value in m.config.to_dict().items() if key != "_name_or_path"}
        for m in (model, loaded)
    )
    assert ours == theirs
    assert torch.equal(loaded.eval()(tokens()).logits, before)


@pytest.mark.parametrize("kind", COCA)
def test_the_t_projection_is_folded_with_a_smaller_deviation(kind, tmp_path):
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.hidden_size = 128
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    found = {name: w for name, w in weights.items() if name.endswith("t_proj.weight")}
    values = {name: w for name, w in weights.items() if name.endswith("v_proj.weight")}
    assert len(found) == 2
    for (_, t), (_, v) in zip(found.items(), values.items(), strict=True):
        assert t.shape == (v.shape[0] // 2, v.shape[1])
    spread = torch.cat([t.flatten() for t in found.values()]).std()
    assert spread == pytest.approx(0.02 / 2**0.5, rel=0.1)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_decoding_with_a_cache_equals_one_pass(kind, backend):
    model = tiny_model(kind)
    model.set_attn_implementation(backend)
    ids = tokens(length=24)
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    pieces = [
        model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits
        for start, stop in ((0, 9), (9, 10), (10, 16), *((i, i + 1) for i in range(16, 24)))
    ]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", OURS)
def test_backends_agree(kind):
    model = tiny_model(kind)
    by_sdpa = model(tokens()).logits
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True)
    assert torch.allclose(output.logits, by_sdpa, rtol=0, atol=2e-4)
    assert len(output.attentions) == 2
    assert torch.allclose(output.attentions[0].sum(-1), torch.ones(2, 4, 20), atol=1e-5)


@pytest.mark.parametrize("kind", ["slack", "strict", "llama-slack", "llama-strict"])
def test_attention_weights_match_the_oracle(kind):
    """The first layer's weights, from its projections and the paper's printed equations."""
    model = tiny_model(kind)
    model.set_attn_implementation("eager")
    ids = tokens(batch=1)
    body = model.base_model
    layer = body.layers[0]
    attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
    weights = model(ids, output_attentions=True).attentions[0][0]
    x = layer.input_layernorm(body.get_input_embeddings()(ids))

    def heads(projected: torch.Tensor, width: int) -> torch.Tensor:
        return projected.view(1, 20, -1, width).transpose(1, 2).double()

    q = heads(attention.q_proj(x), 8)
    t = (
        heads(attention.t_proj(x), 4)
        .relu()
        .repeat_interleave(4 // (attention.t_proj.out_features // 4), 1)
    )
    scores = oracle.SCORES[model.config.coca_form](q, t, torch.arange(20), torch.arange(20))
    scores = scores * 8**-0.5
    scores = scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), float("-inf"))
    assert torch.allclose(weights.double(), scores.softmax(-1)[0], rtol=0, atol=1e-5)
    assert weights.max(-1).values[:, 10:].mean() > 0.11  # the test would be void were it uniform


@pytest.mark.parametrize("kind", OURS)
def test_generate_is_the_same_with_and_without_a_cache(kind):
    model = tiny_model(kind)
    ids = tokens()
    options = {
        "max_new_tokens": 20,
        "min_new_tokens": 20,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    cached = model.generate(ids, **options)
    plain = model.generate(ids, use_cache=False, **options)
    assert cached.shape == (2, 40)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(kind, side):
    """The slack form depends on true positions, so left padding must not shift them."""
    model = tiny_model(kind)
    ids = tokens()
    padding = torch.zeros(2, 5, dtype=torch.long)
    ones = torch.ones_like(ids)
    order = (padding, ids) if side == "left" else (ids, padding)
    marks = (padding, ones) if side == "left" else (ones, padding)
    padded = model(torch.cat(order, 1), attention_mask=torch.cat(marks, 1)).logits
    padded = padded[:, 5:] if side == "left" else padded[:, :20]
    assert torch.allclose(padded, model(ids).logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", OURS)
def test_left_padded_generation_equals_unpadded(kind):
    model = tiny_model(kind)
    ids = tokens(batch=1)
    padded = torch.cat((torch.zeros(1, 6, dtype=torch.long), ids), 1)
    mask = torch.cat((torch.zeros(1, 6, dtype=torch.long), torch.ones_like(ids)), 1)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 20:]
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 26:], plain)


def test_shifted_positions_change_slack_and_not_strict():
    ids = tokens()
    positions = torch.arange(20).expand(2, 20)
    changes = {}
    for kind in ("slack", "strict"):
        model = tiny_model(kind).double()
        plain = model(ids, position_ids=positions).logits
        shifted = model(ids, position_ids=positions + 1000).logits
        changes[kind] = (plain - shifted).abs().max().item()
    assert changes["strict"] < 1e-8
    assert changes["slack"] > 1e-2


@pytest.mark.parametrize("kind", OURS)
def test_a_training_step_reaches_every_weight(kind):
    model = tiny_model(kind).train()
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", COCA)
def test_bfloat16_autocast_stays_near_float32(kind):
    model = tiny_model(kind)
    for weight in model.parameters():
        weight.data /= 4 if weight.dim() == 2 else 1
    exact = model(tokens()).logits
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(tokens()).logits
    assert (exact - rough.float()).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 12, "num_attention_heads": 4}, "head width must be even"),
        ({"coca_form": "loose"}, "unknown score form"),
        ({"rotary_pct": 0.29}, "an even rotary width between 2 and"),
        ({"kv_cache": "third"}, "kv_cache must be one of full, half"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 0.5}}, "number from 1, got 0.5"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "mscale is not supported; set attention_factor",
        ),
    ],
)
def test_invalid_configurations_are_refused(changes, message):
    with pytest.raises(Exception, match=message):
        CoCAGPTNeoXConfig(**changes)


def test_ntk_is_registered_and_heads_must_divide(capfd):
    rope = {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0, "length": 128}
    CoCAGPTNeoXConfig(rope_parameters=rope)
    assert "Missing validation" not in capfd.readouterr().err
    with pytest.raises(Exception, match="num_key_value_heads must divide"):
        CoCALlamaConfig(num_attention_heads=4, num_key_value_heads=3)


def test_invalid_saved_configurations_and_devices_are_user_errors(tmp_path):
    tiny_model("slack").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device 'foo' cannot be used"):
        load_model(tmp_path, device="foo")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"slack"', '"loose"'))
    with pytest.raises(ValueError, match="unknown score form"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["strict", "alibi"])
def test_loading_never_runs_code_of_the_folder(kind, tmp_path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model"}
    config["auto_map"] = {auto: f"foreign.{name}" for auto, name in names.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "foreign.py").write_text("raise SystemExit('foreign code')")
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(loaded) is type(model)


def test_a_truncated_weight_file_is_named(tmp_path):
    tiny_model("slack").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_model(tmp_path)


def test_missing_weights_are_an_error(tmp_path):
    from safetensors.torch import save_file

    tiny_model("slack").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    removed = next(name for name in weights if "t_proj.weight" in name)
    del weights[removed]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 of the model's tensors are missing"):
        load_model(tmp_path)


def test_an_empty_folder_is_not_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path)
