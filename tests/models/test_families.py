"""Every family and capability: one test per cell of the table in docs/families.md."""

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import oracle
from coca_attention import convert
from coca_attention.models.configuration import rotation
from coca_attention.ops import fold
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from families import CAPABILITIES, CELLS, FAMILIES, collinear, vanilla

ROUND_OFF = 1e-12  # float64, relative to the largest logit
FORMS = ["slack", "strict"]
GREEDY = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}


def attentions(model):
    """The attention modules in the order of the layers."""
    return [
        layer.attention if hasattr(layer, "attention") else layer.self_attn
        for layer in model.base_model.layers
    ]


def generated(model, ids, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, attention_mask=mask, **GREEDY, **options)[:, ids.shape[1] :]
    assert out.shape[1] == 14
    return out


def check_convert(family):
    """Converts in place: other weights keep their tensors, T is the pair means of the keys."""
    model = vanilla(family)
    reference = copy.deepcopy(model)
    kept = dict(model.named_parameters())
    result = convert(model, "strict")
    assert result is model
    assert type(model) is type(AutoModelForCausalLM.from_config(model.config))
    assert model.config.model_type == "coca_" + reference.config.model_type
    assert type(model.config) is CONFIG_MAPPING[model.config.model_type]
    assert model.config.coca_form == "strict"
    assert all(getattr(m, "config", model.config) is model.config for m in model.modules())
    for name, weight in model.named_parameters():
        if not any(part in name for part in ("_proj", "_norm.", "query_key_value")) or (
            "o_proj" in name or "mlp" in name or "q_norm" in name
        ):
            assert weight is kept[name], name
    # Queries, values and T of the first layer, computed from the vanilla projections.
    x = torch.randn(2, 5, 32)
    ours, theirs = attentions(model)[0], attentions(reference)[0]
    width, heads = 8, 4
    if hasattr(theirs, "query_key_value"):
        q, k, v = theirs.query_key_value(x).view(2, 5, heads, 3, width).unbind(-2)
    elif hasattr(theirs, "qkv_proj"):
        q, k, v = theirs.qkv_proj(x).split((32, 16, 16), -1)
    else:
        q, k, v = theirs.q_proj(x), theirs.k_proj(x), theirs.v_proj(x)
    kind = getattr(ours, "layer_type", None)
    t = fold(
        k.reshape(2, 5, -1, width), ours.layout.interleaved, rotation(model.config, kind).width
    )
    for projection, expected in ((ours.q_proj, q), (ours.t_proj, t), (ours.v_proj, v)):
        assert torch.allclose(projection(x), expected.reshape(2, 5, -1), atol=1e-5)
    assert not hasattr(ours, "k_proj") and not hasattr(ours, "k_norm")
    if hasattr(theirs, "k_norm"):
        # The norm's weight becomes the pair means of that of the key norm, divided by √2.
        one = 1.0 if family == "Gemma 3" else 0.0
        weights = (theirs.k_norm.weight + one).view(-1, width)
        means = fold(weights, ours.layout.interleaved).flatten() / 2**0.5
        assert torch.allclose(ours.t_norm.weight.flatten() + one, means, atol=1e-6)
    # The Auto class builds a model of the same shapes from the configuration.
    again = AutoModelForCausalLM.from_config(model.config)
    assert {n: w.shape for n, w in again.state_dict().items()} == {
        n: w.shape for n, w in model.state_dict().items()
    }


def check_forward(family):
    """Attention weights of every layer match the oracle; SDPA and eager attention agree."""
    for form in FORMS:
        model = collinear(family, form).double()
        ids = some_tokens(model)
        by_sdpa = logits(model, ids)
        model.set_attn_implementation("eager")
        inputs = {}

        def remember(module, args, kwargs, inputs=inputs):
            inputs[module] = args[0] if args else kwargs["hidden_states"]

        for attention in attentions(model):
            attention.register_forward_pre_hook(remember, with_kwargs=True)
        with torch.no_grad():
            output = model(ids, output_attentions=True)
        assert difference(output.logits, by_sdpa) < ROUND_OFF
        assert len(output.attentions) == 2
        for index, attention in enumerate(attentions(model)):
            kind = getattr(attention, "layer_type", None)
            with torch.no_grad():
                q, t, _ = attention.project(inputs[attention])
            t = t.repeat_interleave(attention.num_key_value_groups, 1)
            found = rotation(model.config, kind)
            width = found.width
            positions = torch.arange(ids.shape[1])
            options = {"theta": found.frequencies(), "interleaved": attention.layout.interleaved}
            if width == attention.head_dim:
                scores = oracle.SCORES[form](q, t, positions, positions, **options)
            else:
                scores = oracle.partial_scores(
                    form, q, t, positions, positions, rotary_width=width, **options
                )
            distance = positions.unsqueeze(-1) - positions
            window = getattr(model.config, "sliding_window", None)
            window = getattr(attention, "sliding_window", window) or 10**6
            hidden = (distance < 0) | (distance >= window)
            scores = (scores * attention.scaling).masked_fill(hidden, float("-inf"))
            weights = output.attentions[index]
            assert (weights - scores.softmax(-1)).abs().max() < 1e-9
            # With uniform weights over the visible keys this test would prove nothing.
            assert (weights.max(-1).values * (~hidden).sum(-1)).median() > 1.2


def check_generate(family):
    """Greedy decoding with a cache gives the same tokens and logits as without."""
    for form in FORMS:
        model = collinear(family, form).double()
        ids = some_tokens(model)
        assert torch.equal(generated(model, ids), generated(model, ids, use_cache=False))
        assert difference(decoded_logits(model, ids), logits(model, ids)) < ROUND_OFF


def check_static_cache(family):
    for form in FORMS:
        model = collinear(family, form).double()
        ids = some_tokens(model)
        static = generated(model, ids, cache_implementation="static")
        assert torch.equal(static, generated(model, ids, use_cache=False))
        cache = StaticCache(config=model.config, max_cache_len=40)
        assert difference(decoded_logits(model, ids, cache), logits(model, ids)) < ROUND_OFF


def check_sliding_cache(family):
    """Texts of three windows in dynamic and static sliding caches, full and half."""
    for form in FORMS:
        model = collinear(family, form).double()
        ids = some_tokens(model)
        assert ids.shape[1] > 2 * model.config.sliding_window
        whole = logits(model, ids)
        for kind in ("full", "half"):
            model.config.kv_cache = kind
            cache = DynamicCache(config=model.config)
            assert difference(decoded_logits(model, ids, cache), whole) < ROUND_OFF
            assert any(layer.is_sliding for layer in cache.layers)
            assert min(layer.keys.shape[-2] for layer in cache.layers) == 7
            for first in (3, 20):
                cache = StaticCache(config=model.config, max_cache_len=40)
                pieces = decoded_logits(model, ids, cache, first)
                assert difference(pieces, whole) < ROUND_OFF


def check_beam_search(family):
    model = collinear(family).double()
    ids = some_tokens(model)
    assert torch.equal(generated(model, ids, num_beams=1), generated(model, ids))
    beams = generated(model, ids, num_beams=3)
    assert torch.equal(beams, generated(model, ids, num_beams=3, use_cache=False))
    model.config.kv_cache = "half"
    assert torch.equal(beams, generated(model, ids, num_beams=3))


def check_left_padding(family):
    for form in FORMS:
        for kind in ("full", "half"):
            model = collinear(family, form).double()
            model.config.kv_cache = kind
            ids = some_tokens(model)
            pads = torch.zeros(2, 5, dtype=torch.long)
            padded = torch.cat((pads, ids), 1)
            mask = torch.cat((pads, torch.ones_like(ids)), 1)
            together = logits(model, padded, attention_mask=mask)[:, 5:]
            assert difference(together, logits(model, ids)) < ROUND_OFF
            tokens = generated(model, padded, attention_mask=mask)
            assert torch.equal(tokens, generated(model, ids))


def check_save_and_load(family, folder):
    model = collinear(family, "strict")
    model.config.kv_cache = "half"
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(loaded) is type(model)
    assert (loaded.config.coca_form, loaded.config.kv_cache) == ("strict", "half")
    ids = some_tokens(model)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    body = type(model.base_model).from_pretrained(folder).eval()
    assert torch.equal(body(ids).last_hidden_state, model.base_model(ids).last_hidden_state)


def check_training_step(family):
    for form in FORMS:
        model = collinear(family, form).train()
        ids = some_tokens(model)
        before = model(ids, labels=ids).loss
        before.backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None and weight.grad.isfinite().all(), name
            if "embed" not in name:  # the row of the padding token has no gradient
                assert weight.grad.abs().max() > 0, name
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 1e-3 * weight.grad / (weight.grad.norm() + 1e-9)
        assert model(ids, labels=ids).loss < before


def check_gradient_checkpointing(family):
    def gradients(checkpointing):
        model = collinear(family).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = some_tokens(model)
        model(ids, labels=ids).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    for name, gradient in plain.items():
        assert torch.allclose(gradient, checkpointed[name], rtol=1e-10, atol=1e-12), name


def check_compile(family):
    """Prefill and decoding with a static cache, each one graph without breaks.

    A full cache takes the same path for both, so only its decoding is traced: traces take seconds.
    """
    layers = {} if "layer_types" in FAMILIES[family][1] else {"num_hidden_layers": 1}
    for kind in ("full", "half"):
        torch._dynamo.reset()
        model = collinear(family, **layers).double()
        model.config.kv_cache = kind
        ids = some_tokens(model, length=18)
        whole = logits(model, ids)
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        cache = StaticCache(config=model.config, max_cache_len=32)
        pieces = []
        with torch.no_grad():
            for a, b in ((0, 16), (16, 17), (17, 18)):
                positions = torch.arange(a, b).unsqueeze(0)
                forward = model if kind == "full" and a == 0 else compiled
                output = forward(
                    input_ids=ids[:, a:b],
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                )
                pieces.append(output.logits.clone())
        assert difference(torch.cat(pieces, 1), whole) < 1e-10


def check_lora(family, folder):
    model = collinear(family).double()
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "t_proj", "v_proj"])
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, settings)
    ids = some_tokens(model)
    adapted.train()
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {n for n, w in adapted.named_parameters() if w.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert any("t_proj.lora_B" in name for name in trained)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.grad is not None:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    adapted.eval()
    before = logits(adapted, ids)
    adapted.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(collinear(family).double(), folder).eval()
    assert difference(logits(again, ids), before) < 1e-6  # adapters are stored in float32
    assert difference(logits(adapted.merge_and_unload(), ids), before) < ROUND_OFF


def check_half_cache(family):
    for form in FORMS:
        model = collinear(family, form).double()
        ids = some_tokens(model)
        whole, tokens, sizes = logits(model, ids), generated(model, ids), {}
        for kind in ("full", "half"):
            model.config.kv_cache = kind
            cache = DynamicCache(config=model.config)
            assert difference(decoded_logits(model, ids, cache), whole) < ROUND_OFF
            assert torch.equal(generated(model, ids), tokens)
            sizes[kind] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert sizes["half"] == 0.75 * sizes["full"]
        static = generated(model, ids, cache_implementation="static")
        assert torch.equal(static, tokens)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "capability"), CELLS)
def test_cell(family, capability, tmp_path):
    check = globals()["check_" + capability.lower().replace(" ", "_")]
    if "folder" in check.__code__.co_varnames[: check.__code__.co_argcount]:
        check(family, tmp_path)
    else:
        check(family)


def test_every_capability_has_a_check():
    checks = {name for name in globals() if name.startswith("check_")}
    assert checks == {"check_" + c.lower().replace(" ", "_") for c in CAPABILITIES}
