"""Streams: every token attends to the first and the last ones, at their positions in the cache."""

import pytest
import torch

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import (
    AlibiGPTNeoXConfig,
    AlibiGPTNeoXForCausalLM,
    StreamingCache,
    set_rotary_scaling,
)
from coca_attention.models.configuration import has_own_roles
from coca_attention.models.fields import GLOBAL, LOCAL
from coca_attention.models.key_positions import KeyPositions
from coca_attention.testing import difference, logits, some_tokens
from families import SIZES, collinear, vanilla

SINKS, WINDOW = 2, 7
# Half-split and adjacent pairs, partial rotary, layer types, a fused projection, scores with norms.
ROTARY = ["Llama", "Qwen2", "Gemma 3", "GPT-NeoX", "Cohere", "GLM-4", "Phi-3"]


def prepared(model):
    """In float64, with rotary tables in float64 too: those of Transformers are in float32."""
    if hasattr(model.config, "coca_form"):
        model.config.kv_cache = "half"
    else:
        set_rotary_scaling(model, "none")
    return model.double().eval()


def with_roles(form):
    model = vanilla("GPT-NeoX", layer_types=[LOCAL, GLOBAL], sliding_window=5)
    added = {"turning_pairs": 0, "temperature": 16, "decay": 1.5, "decay_length": 4.0}
    model.config.rope_parameters |= added
    return prepared(convert(model, form, free_pairs={LOCAL: 0, GLOBAL: 4}))


def some_model(name):
    kind, _, family = name.partition(" ")
    if kind == "roles":
        return with_roles(family)
    changes = {"sliding_window": None} if family == "Phi-3" else {}
    return prepared(
        vanilla(family, **changes) if kind == "vanilla" else collinear(family, kind, **changes)
    )


MODELS = [
    *(f"vanilla {family}" for family in ROTARY),
    *(f"{form} Llama" for form in ("slack", "strict", "magnitude")),
    *(f"slack {family}" for family in ("Gemma 3", "GPT-NeoX", "GLM-4")),
    "roles strict",
    "roles slack",
]


@torch.no_grad()
def explicit_logits(model, ids, sinks=SINKS, window=WINDOW):
    """The definition, token by token and layer by layer, without a cache.

    Every layer of the model is called, as in training, with what a token may see and nothing else,
    at positions 0, 1, …; of its output only the last token is kept.
    """
    body, config = model.base_model, model.config
    kinds = getattr(config, "layer_types", None) or [GLOBAL] * len(body.layers)
    own_roles = has_own_roles(config)
    by_type = own_roles or "gemma3" in config.model_type
    first = []
    body.layers[0].register_forward_pre_hook(lambda m, a, k: first.append((a, k)), with_kwargs=True)
    model(ids, use_cache=False)
    body.layers[0]._forward_pre_hooks.clear()
    hidden = first[0][0][0]  # what enters the first layer
    for layer, kind in zip(body.layers, kinds, strict=True):
        outputs = []
        for last in range(ids.shape[1]):
            seen = [j for j in range(last + 1) if j < sinks or j > last - window]
            position = len(seen) - 1
            if kind == LOCAL:
                seen = list(range(last + 1))[-config.sliding_window :]
            positions = torch.arange(position - len(seen) + 1, position + 1).unsqueeze(0)
            part = hidden[:, seen]
            tables = body.rotary_emb(part, positions, *((kind,) if by_type else ()))
            arguments = {"attention_mask": None, "position_embeddings": tables}
            if own_roles:
                arguments["roles"] = {kind: (None, tables)}
                arguments["key_positions"] = KeyPositions(body, None, positions, None)
            output = layer(part, position_ids=positions, **arguments)
            outputs.append((output[0] if isinstance(output, tuple) else output)[:, -1:])
        hidden = torch.cat(outputs, dim=1)
    norm = body.final_layer_norm if hasattr(body, "final_layer_norm") else body.norm
    head = model.get_output_embeddings()
    found = head(norm(hidden))
    return found * getattr(model, "logit_scale", 1.0)


@torch.no_grad()
def streamed_logits(model, ids, pieces, sinks=SINKS, window=WINDOW):
    cache = StreamingCache(model, window=window, sinks=sinks)
    found = []
    for piece in ids.split(pieces, dim=1):
        found.append(model(piece, past_key_values=cache, use_cache=True).logits)
        for layer, kind in zip(cache.layers, cache.kinds, strict=True):
            most = sinks + window if kind == GLOBAL else model.config.sliding_window
            assert layer.keys.shape[-2] == layer.values.shape[-2] < most
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_definition_in_pieces_of_any_length(name):
    model = some_model(name)
    ids = some_tokens(model, batch=2, length=32)
    expected = explicit_logits(model, ids)
    assert difference(expected[:, : SINKS + WINDOW], logits(model, ids)[:, : SINKS + WINDOW]) < 1e-9
    for pieces in (1, 4, 13, [3, 1, 1, 20, 1, 6]):
        assert difference(streamed_logits(model, ids, pieces), expected) < 1e-9, pieces


@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (1, 1), (6, 3)])
@pytest.mark.parametrize("name", ["vanilla Llama", "slack Llama"])
def test_any_size(name, sinks, window):
    model = some_model(name)
    ids = some_tokens(model, length=20)
    expected = explicit_logits(model, ids, sinks, window)
    for pieces in (1, 6, 20):
        found = streamed_logits(model, ids, pieces, sinks, window)
        assert difference(found, expected) < 1e-9, pieces


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["vanilla Llama", "strict Llama", "roles slack"])
def test_generate_continues_a_long_prompt(name, attention):
    model = some_model(name)
    model.set_attn_implementation(attention)
    ids = some_tokens(model, length=21)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    outputs = [
        model.generate(
            ids,
            past_key_values=StreamingCache(model, window=WINDOW, sinks=SINKS),
            prefill_chunk_size=size,
            **settings,
        )
        for size in (1, 8, None)
    ]
    expected = explicit_logits(model, outputs[0][:, :-1])[:, 20:].argmax(-1)
    assert all(torch.equal(output[:, 21:], expected) for output in outputs)
    assert not torch.equal(outputs[0], model.generate(ids, **settings))
    beams = model.generate(
        ids,
        past_key_values=StreamingCache(model, window=60),
        **settings,
        num_beams=2,
    )
    assert torch.equal(beams, model.generate(ids, **settings, num_beams=2))


def test_memory_and_positions_stay_where_they_are():
    model = some_model("vanilla Llama").float()
    cache = StreamingCache(model, window=WINDOW, sinks=SINKS)
    ids, sizes, positions = some_tokens(model, batch=1, length=300), set(), []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda m, args, kwargs: positions.extend(x.max() for x in (*args[1:], *kwargs.values())),
        with_kwargs=True,
    )
    with torch.no_grad():
        for index, token in enumerate(ids.split(1, dim=1)):
            model(token, past_key_values=cache)
            if index > SINKS + WINDOW:
                sizes.add(cache.nbytes)
    assert cache.get_seq_length() == 300 and max(positions) == SINKS + WINDOW - 1
    # 2 layers, keys and values, 8 tokens kept, 2 heads of 8 numbers of 4 bytes
    assert sizes == {2 * 2 * (SINKS + WINDOW - 1) * 2 * 8 * 4}
    cache.reset()
    short = ids[:, : SINKS + WINDOW]
    with torch.no_grad():
        again = model(short, past_key_values=cache).logits
    assert difference(again, logits(model, short)) < 1e-5


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "message"),
    [
        ("Llama", {}, {"window": 0}, "window must be at least 1 token, got 0"),
        ("Llama", {}, {"sinks": -1}, "sinks must be 0 or more, got -1"),
        ("Mistral", {}, {}, "its memory is constant without streaming"),
        ("Qwen2", {}, {"window": 5, "sinks": 1}, "at least that, got 6"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "dynamic"),
    ],
)
def test_what_cannot_be_streamed_says_why(name, changes, sizes, message):
    with pytest.raises(UserError, match=message):
        StreamingCache(vanilla(name, **changes), **{"window": 8, "sinks": 2, **sizes})


def test_a_full_collinear_cache_padding_and_other_models_are_refused():
    with pytest.raises(UserError, match='kv_cache = "half"'):
        StreamingCache(collinear("Llama"), window=8)
    following = collinear("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    following.config.kv_cache = "half"
    with pytest.raises(UserError, match="'dynamic' changes its frequencies with the length"):
        StreamingCache(following, window=8)
    with pytest.raises(UserError, match="AlibiGPTNeoXForCausalLM cannot read a stream"):
        StreamingCache(AlibiGPTNeoXForCausalLM(AlibiGPTNeoXConfig(**SIZES)), window=8)
    model = some_model("vanilla Llama")
    cache = StreamingCache(model, window=8)
    ids = some_tokens(model, length=6)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(UserError, match="no padding"):
        model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(UserError, match="only in the model that it was made for"):
        vanilla("Llama", seed=1)(ids, past_key_values=cache)
