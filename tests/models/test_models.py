"""The registered models: configurations, initial weights and files; ALiBi, the paper's baseline."""

import json
from importlib.metadata import entry_points

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import oracle
from coca_attention.errors import UserError
from coca_attention.models import CoCAGPTNeoXConfig, CoCALlamaConfig, alibi
from coca_attention.ops import attend
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.loading import load_model
from conftest import CONFIGS, tiny_model
from covering import covering
from families import assert_reads_the_same, assert_reloads, made

COCA = ["slack", "llama-strict"]


def test_alibi_reads_the_same_in_every_way_and_trains(tmp_path):
    model = tiny_model("alibi").double()
    ids = some_tokens(model)
    assert_reloads(model, tmp_path)
    assert_reads_the_same(model, ids)
    by_sdpa = logits(model, ids)
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True)
    # GPT-NeoX's own eager attention takes the softmax in float32.
    assert difference(output.logits, by_sdpa) < 1e-6 and len(output.attentions) == 2
    model.train()(ids, labels=ids).loss.backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters())


@pytest.mark.parametrize("kind", [*COCA, "limited"])
def test_bfloat16_autocast_stays_near_float32(kind):
    model = made(kind) if kind == "limited" else tiny_model(kind)
    for weight in model.parameters():
        weight.data /= 4 if weight.dim() == 2 else 1
    ids = some_tokens(model)
    exact = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(logits(model, ids), exact) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 12, "num_attention_heads": 4}, "head width must be even"),
        ({"rotary_pct": 0.29}, "rotary width must be even and at least 2, .* got 27"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 0.5}}, "number from 1, got 0.5"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "mscale is not supported; set attention_factor",
        ),
        *(({"coca_free_pairs": n}, f"between 0 and 48, got {n}") for n in (-1, 49)),
    ],
)
def test_invalid_configurations_are_refused(changes, message):
    with pytest.raises(Exception, match=message):
        CoCAGPTNeoXConfig(**changes)


def test_ntk_is_registered_and_heads_must_divide(capfd):
    rope = {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0, "length": 128}
    CoCAGPTNeoXConfig(rope_parameters=rope)
    assert "Missing validation" not in capfd.readouterr().err
    with pytest.raises(Exception, match="heads must divide"):
        CoCALlamaConfig(num_attention_heads=4, num_key_value_heads=3)


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


def test_a_folder_without_a_tensor_is_a_user_error(tmp_path):
    tiny_model("slack").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[next(name for name in tensors if "t_proj.weight" in name)]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="1 of the model's tensors are missing"):
        load_model(tmp_path)


def test_slopes_between_powers_of_two_take_every_other_of_the_finer_series():
    for heads, exponents in ((8, range(1, 9)), (6, (2, 4, 6, 8, 1, 3))):
        assert alibi.slopes(heads).tolist() == pytest.approx([2.0**-i for i in exponents])


@pytest.mark.parametrize(
    ("heads", "queries", "dtype"),
    covering([3, 8], [1, 40, 600], [torch.float64, torch.float32]),
    ids=str,
)
def test_columns_give_the_bias(heads, queries, dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, queries, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, heads, 600, 16, generator=generator, dtype=torch.float64)
    distance = torch.arange(600 - queries, 600)[:, None] - torch.arange(600)
    scores = q @ k.mT * 0.25 - alibi.slopes(heads)[:, None, None] * distance
    expected = oracle.attention(scores, v, scale=1.0)
    augmented = alibi.augment(q.to(dtype), k.to(dtype), 0.25)
    ours = attend(*augmented, v.to(dtype), scale=0.25)
    assert (ours - expected).abs().max() <= (1e-12 if dtype == torch.float64 else 3e-5)


def test_bfloat16_distinguishes_all_distances():
    """Positions above 256 are not exact in bfloat16, so they are split into two columns."""
    q = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16)
    k = torch.zeros(1, 4, 5000, 16, dtype=torch.bfloat16)
    augmented_q, augmented_k = alibi.augment(q, k, 1.0)
    scores = (augmented_q.float() @ augmented_k.float().mT)[0, :, 0]
    steps = scores.diff(dim=-1)
    assert torch.equal(steps, alibi.slopes(4).float()[:, None].expand_as(steps))


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_engines_register_the_models_by_an_entry_point(group):
    (point,) = [each for each in entry_points(group=group) if each.value.startswith("coca")]
    point.load()()
    assert AutoConfig.for_model("coca_llama").model_type == "coca_llama"


@pytest.mark.parametrize("kind", COCA)
def test_the_t_projection_is_drawn_with_a_smaller_deviation(kind):
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.hidden_size = 128
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    found = [weight for name, weight in weights.items() if name.endswith("t_proj.weight")]
    assert len(found) == 2
    spread = torch.cat([t.flatten() for t in found]).std()
    assert spread == pytest.approx(0.02 / 2**0.5, rel=0.1)
