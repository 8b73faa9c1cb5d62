"""Every family and capability: one test per cell.

Score forms and kinds of caches alternate, so that every capability meets each with half of the
families.
"""

import copy
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from coca_attention import convert
from coca_attention.models import Roles
from coca_attention.models.configuration import rotation
from coca_attention.models.families import FAMILIES as TABLE
from coca_attention.ops import fold
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from covering import mostly_slow
from families import (
    ENCODERS,
    FAMILIES,
    VARIED,
    assert_reads_the_same,
    assert_reloads,
    attended,
    attentions,
    collinear,
    greedy,
    left_padded,
    oracle_scores,
    vanilla,
)
from public_models import loaded

ROUND_OFF = 1e-12  # float64, relative to the largest logit


@dataclass
class Cell:
    family: str
    form: str
    kind: str
    folder: Path

    def model(self, **changes):
        model = collinear(self.family, self.form, **changes).double()
        model.config.kv_cache = self.kind
        return model


def vanilla_projections(attention, x):
    """Queries, keys and values of a family's own attention module."""
    if hasattr(attention, "query_key_value"):
        return attention.query_key_value(x).view(2, 5, 4, 3, 8).unbind(-2)
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj(x).split((32, 16, 16), -1)
    return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)


def check_convert(cell):
    """Converts in place: other weights keep their tensors, T is the pair means of the keys."""
    model = vanilla(cell.family).requires_grad_(False)
    reference, kept = copy.deepcopy(model), dict(model.named_parameters())
    assert convert(model, "strict") is model
    assert type(model).is_backend_compatible() and model._can_set_attn_implementation()  # vLLM asks
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.config.model_type == "coca_" + reference.config.model_type
    assert type(model.config) is CONFIG_MAPPING[model.config.model_type]
    assert model.config.coca_form == "strict"
    for name in ("_attn_implementation", "_experts_implementation"):
        assert getattr(model.config, name) == getattr(reference.config, name)
    assert all(getattr(m, "config", model.config) is model.config for m in model.modules())
    for name, weight in model.named_parameters():
        replaced = any(part in name for part in ("_proj", "_norm.", "query_key_value"))
        if not replaced or any(part in name for part in ("o_proj", "mlp", "q_norm")):
            assert weight is kept[name], name
    # Queries, values and T of the first layer, computed from the vanilla projections.
    x, ours = torch.randn(2, 5, 32), attentions(model)[0]
    theirs = ours.layout.modules(reference.base_model)[0]
    q, k, v = vanilla_projections(theirs, x)
    width = rotation(model.config, getattr(ours, "layer_type", None)).width
    t = fold(k.reshape(2, 5, -1, 8), ours.layout.interleaved, width)
    for projection, expected in ((ours.q_proj, q), (ours.t_proj, t), (ours.v_proj, v)):
        assert torch.allclose(projection(x), expected.reshape(2, 5, -1), atol=1e-5)
    assert not hasattr(ours, "k_proj") and not hasattr(ours, "k_norm")
    if hasattr(theirs, "k_norm"):
        # The norm's weight becomes the pair means of that of the key norm, divided by √2.
        one = 1.0 if cell.family == "Gemma 3" else 0.0
        weights = (theirs.k_norm.weight + one).view(-1, 8)
        means = fold(weights, ours.layout.interleaved).flatten() / 2**0.5
        assert torch.allclose(ours.t_norm.weight.flatten() + one, means, atol=1e-6)
    # The Auto class builds a model of the same shapes from the configuration.
    again = AutoModelForCausalLM.from_config(model.config)
    assert type(again) is type(model)
    shapes, expected = ({n: w.shape for n, w in m.state_dict().items()} for m in (again, model))
    assert shapes == expected
    # The plan for tensor parallelism names modules, T among them.
    plan = type(model.config).base_model_tp_plan or {}
    modules = {n.replace("layers.0", "layers.*") for n, _ in model.base_model.named_modules()}
    planned = {name for name in plan if f".{ours.layout.module_name}." in name}
    assert planned <= modules, planned - modules
    # That of Granite MoE is about its experts alone.
    assert any("t_proj" in name for name in plan) == (cell.family != "Granite MoE")


def check_forward(cell):
    """Attention weights of every layer match the oracle; SDPA and eager attention agree."""
    for form in ("slack", "strict"):
        model = collinear(cell.family, form).double()
        ids = some_tokens(model)
        by_sdpa = logits(model, ids)
        by_eager, layers = attended(model, ids)
        assert difference(by_eager, by_sdpa) < ROUND_OFF
        assert len(layers) == 2
        for attention, q, t, weights in layers:
            positions = torch.arange(ids.shape[1])
            distance = positions.unsqueeze(-1) - positions
            window = getattr(model.config, "sliding_window", None)
            window = getattr(attention, "sliding_window", window) or 10**6
            hidden = (distance < 0) | (distance >= window)
            scores = oracle_scores(form, attention, q, t) * attention.scaling
            expected = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            assert (weights - expected).abs().max() < 1e-9
            # With uniform weights over the visible keys this test would prove nothing.
            assert (weights.max(-1).values * (~hidden).sum(-1)).median() > 1.2


def check_reading(cell):
    """In one pass, padded, with caches and beams alike; half a cache takes three quarters."""
    model, sizes = cell.model(), []
    ids = some_tokens(model)
    padded, mask = left_padded(ids, 5)
    for model.config.kv_cache in ("full", "half"):
        assert_reads_the_same(model, ids)
        alone = greedy(model, ids, use_cache=False)
        assert torch.equal(greedy(model, padded, attention_mask=mask), alone)
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        layers = cache.layers[: model.config.num_hidden_layers]  # without that of positions
        sizes.append(sum(x.keys.nbytes + x.values.nbytes for x in layers))
    assert sizes[1] == 0.75 * sizes[0]
    window = FAMILIES[cell.family][1].get("sliding_window")
    assert min(layer.keys.shape[-2] for layer in cache.layers) == (window - 1 if window else 24)
    model.config.kv_cache = cell.kind
    for first in (3, 20):  # within a window, and beyond
        static = StaticCache(config=model.config, max_cache_len=40)
        found = decoded_logits(model, ids, static, first)
        assert difference(found, logits(model, ids)) < ROUND_OFF
    beams = [greedy(model, ids, num_beams=3, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*beams)


def check_save_and_load(cell):
    model = cell.model().float()
    loaded, ids = assert_reloads(model, cell.folder), some_tokens(model)
    assert (loaded.config.coca_form, loaded.config.kv_cache) == (cell.form, cell.kind)
    kept = {"experts_implementation": model.config._experts_implementation}
    body = type(model.base_model).from_pretrained(cell.folder, **kept).eval()
    assert torch.equal(body(ids).last_hidden_state, model.base_model(ids).last_hidden_state)


def check_training_step(cell):
    """Every weight has a gradient, the same with gradient checkpointing; a step lowers the loss."""
    model = cell.model().train()
    ids = some_tokens(model)
    before = model(ids, labels=ids).loss
    before.backward()
    plain = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert torch.allclose(plain[name], weight.grad, rtol=1e-10, atol=1e-12), name
        if "embed" not in name:  # the row of the padding token has no gradient
            assert weight.grad.abs().max() > 0, name
        weight.data -= 1e-3 * weight.grad / (weight.grad.norm() + 1e-9)
    assert model(ids, labels=ids).loss < before


def check_compile(cell):
    """Prefill and decoding with a static cache, each one graph without breaks.

    A full cache takes the same path for both, so only its decoding is traced: traces take seconds.
    """
    torch._dynamo.reset()
    model = cell.model(
        **({} if "layer_types" in FAMILIES[cell.family][1] else {"num_hidden_layers": 1})
    )
    ids, pieces = some_tokens(model, length=18), []
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    cache = StaticCache(config=model.config, max_cache_len=32)
    for a, b in ((0, 16), (16, 17), (17, 18)):
        forward = model if cell.kind == "full" and a == 0 else compiled
        positions = torch.arange(a, b).unsqueeze(0)
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            pieces.append(forward(input_ids=ids[:, a:b], **options).logits.clone())
    assert difference(torch.cat(pieces, 1), logits(model, ids)) < 1e-10


def check_lora(cell):
    model = cell.model()
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "t_proj", "v_proj"])
    torch.manual_seed(0)
    adapted, ids = peft.get_peft_model(model, settings).train(), some_tokens(model)
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {n for n, w in adapted.named_parameters() if w.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert any("t_proj.lora_B" in name for name in trained)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.grad is not None:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    before = logits(adapted.eval(), ids)
    adapted.save_pretrained(cell.folder)
    again = peft.PeftModel.from_pretrained(cell.model(), cell.folder).eval()
    assert difference(logits(again, ids), before) < 1e-6  # adapters are stored in float32
    assert difference(logits(adapted.merge_and_unload(), ids), before) < ROUND_OFF


CHECKS = {name[6:]: check for name, check in [*globals().items()] if name.startswith("check_")}
# What takes longer is checked by default with the families that differ most; all families are read
# with pieces of attention in test_caches.py or saved and loaded with heads in test_heads.py.
SOME = {"compile": ["Qwen2"], "lora": VARIED, "reading": ["GPT-NeoX", "Gemma 3"]}
SOME["save_and_load"] = VARIED
CELLS = list(product(FAMILIES, CHECKS))
DEFAULT = [cell for cell in CELLS if cell[0] in SOME.get(cell[1], FAMILIES)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "capability"), mostly_slow(CELLS, DEFAULT))
def test_cell(family, capability, tmp_path):
    row, column = list(FAMILIES).index(family), list(CHECKS).index(capability)
    form = ("slack", "strict")[(row + column) % 2]
    kind = ("full", "half")[(row // 2 + column) % 2]
    CHECKS[capability](Cell(family, form, kind, tmp_path))


# From folder to folder: a model that was loaded, converted, saved and loaded is one in memory

WAYS = {
    "strict": ("strict", {}),
    "half of the pairs": ("slack", {"free_pairs": 2}),
    "limited": ("rope", {"near": 11}),
    "roles": ("rope", {"roles": Roles("lg", window=6, decay=1.0)}),
}
# Whose weights have other names on disk, or whose norms have an offset.
RENAMED = ["Mixtral", "Qwen3 MoE", "Granite MoE", "Gemma 3", "Phi-3"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_every_row_of_the_table_is_among_the_tests_families():
    tested = {kind for kind, _ in (FAMILIES | ENCODERS).values()}
    assert {family.vanilla.config_class.model_type for family in TABLE} == tested


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["Llama", *RENAMED]))
def test_a_converted_folder_is_the_model_in_memory(family, tied, tmp_path):
    """Whatever the names of its weights in the folder (experts, an untied head of GPT-NeoX)."""
    number = list(FAMILIES).index(family)
    dtype, size = DTYPES[(number + tied) % 3], ("1GB", "20KB")[number % 2]
    source = vanilla(family, tie_word_embeddings=tied).to(dtype)
    source.save_pretrained(tmp_path / "vanilla", max_shard_size=size)
    kept = {"experts_implementation": source.config._experts_implementation}
    ids = some_tokens(source)
    for way, (form, changes) in WAYS.items():
        if way == "roles" and "full_attention" in source.config.rope_parameters:
            continue  # which is refused: rotary parameters per layer type
        expected = logits(convert(copy.deepcopy(source), form, **changes), ids)
        model = convert(loaded(tmp_path / "vanilla", dtype="auto", **kept), form, **changes)
        assert torch.equal(logits(model, ids), expected), way
        model.save_pretrained(tmp_path / way, max_shard_size=size)
        again = loaded(tmp_path / way, dtype="auto", **kept)
        assert again.dtype == dtype and torch.equal(logits(again, ids), expected), way


def test_pairs_that_stay_keep_the_norm_of_their_keys_to_the_last_bit():
    """In bfloat16, where 1 + w - 1 has lost the smaller weights."""
    source = vanilla("Gemma 3").bfloat16()
    small = 1e-3 * torch.randn(8, generator=torch.Generator().manual_seed(0)).bfloat16()
    source.model.layers[1].self_attn.k_norm.weight.data = small
    convert(source, "rope")
    norm = source.model.layers[1].self_attn.t_norm.weight
    assert torch.equal(norm, small)
