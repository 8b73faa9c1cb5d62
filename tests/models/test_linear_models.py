"""Models and layers with linear attention: the state, padding, and what is refused."""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from coca_attention import CoCAAttention, set_rotary_scaling
from coca_attention.errors import UserError
from coca_attention.models import CoCAGPTNeoXConfig, CoCALlamaConfig
from coca_attention.models.attention import CACHE
from coca_attention.models.families import FAMILIES, decoders
from coca_attention.ops import Rotation
from coca_attention.testing import logits, some_tokens
from covering import mostly_slow
from families import SIZES, greedy, left_padded, read_in_pieces, reloaded

GLM, MIXTRAL = (decoders()[name] for name in ("glm", "mixtral"))
LINEAR = {"coca_form": "strict", "coca_linear": True}


def make(config_class=CoCALlamaConfig, **fields):
    torch.manual_seed(0)
    # Mistral has a window unless its configuration says otherwise.
    config = config_class(**SIZES | LINEAR | {"sliding_window": None} | fields)
    # Other implementations of experts know no float64.
    options = {"dtype": torch.float64, "experts_implementation": "batched_mm"}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    for parameter in model.parameters():  # larger than initial ones, so that attention matters
        parameter.data.mul_(3)
    return model, some_tokens(model, length=20)


CONFIGS = [family.config for family in FAMILIES]
CONFIGS = [config for config in CONFIGS if "layer_types" not in config.__dataclass_fields__]
# By default a plain family, interleaved pairs, and experts, whose weights are renamed on disk.
UNTYPED = mostly_slow(CONFIGS, [CoCALlamaConfig, GLM.config, MIXTRAL.config])


@pytest.mark.parametrize("config_class", UNTYPED, ids=lambda config: config.__name__)
def test_generation_with_a_state_is_generation_without(config_class, tmp_path):
    model, prompt = make(config_class)
    expected = greedy(model, prompt, use_cache=False)
    padded, mask = left_padded(prompt, 6)
    assert torch.equal(greedy(model, prompt), expected)
    assert torch.equal(greedy(model, padded, attention_mask=mask), expected)
    beams = [greedy(model, prompt, num_beams=3, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*beams)
    assert torch.equal(logits(reloaded(model, tmp_path), prompt), logits(model, prompt))


@pytest.mark.parametrize(
    ("config_class", "kind"),
    mostly_slow(
        product(CONFIGS, ["growing", "static"]),
        [(CoCALlamaConfig, "growing"), (GLM.config, "static")],
    ),
)
def test_generation_continues_a_cache(config_class, kind):
    """From an empty cache and from one of the beginning of the text, padded on the left too."""
    model, prompt = make(config_class)
    make_cache = {
        "growing": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=64),
    }[kind]
    expected = greedy(model, prompt, use_cache=False)
    padded, mask = left_padded(prompt, 6)
    for text, seen in ((prompt, torch.ones_like(prompt)), (padded, mask)):
        cache = make_cache()
        assert torch.equal(greedy(model, text, attention_mask=seen, **{CACHE: cache}), expected)
        cache = make_cache()
        with torch.no_grad():
            model(text[:, :-4], attention_mask=seen[:, :-4], **{CACHE: cache})
        assert int(cache.get_seq_length()) == text.shape[1] - 4
        assert torch.equal(greedy(model, text, attention_mask=seen, **{CACHE: cache}), expected)


def test_padding_between_the_passes_of_a_text_counts_for_nothing():
    """As in a batch of conversations: the shorter turns are padded."""
    model, prompt = make()
    whole = logits(model, prompt)
    text = torch.cat((prompt[:, :8], prompt.new_full((2, 3), 5), prompt[:, 8:]), 1)
    seen = torch.ones_like(text)
    seen[:, 8:11] = 0
    places = (seen.cumsum(-1) - 1).masked_fill(seen == 0, 0)  # as those of `generate`
    for edges in ((8, 23), (10, 23), (11, 23), (9, 10, 12, 23)):
        for given in (None, places):
            cache, found, start = DynamicCache(config=model.config), [], 0
            for stop in edges:
                step = None if given is None else given[:, start:stop]
                options = {"attention_mask": seen[:, :stop], "position_ids": step}
                with torch.no_grad():
                    found.append(model(text[:, start:stop], **{CACHE: cache}, **options).logits)
                start = stop
            found = torch.cat(found, 1)[seen.bool()].view_as(whole)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config_class", UNTYPED, ids=lambda config: config.__name__)
def test_what_a_state_cannot_hide_is_refused(config_class):
    model, prompt = make(config_class)
    batch, length = prompt.shape
    dense = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, -1, -1)
    with pytest.raises(UserError, match=r"attention_mask \(batch, tokens\); got shape"):
        model(prompt, attention_mask=dense)
    places = torch.arange(length)[None].expand(batch, -1)
    assert torch.equal(logits(model, prompt, position_ids=places + 7), logits(model, prompt))
    with pytest.raises(UserError, match="a row of its own"):
        model(prompt, position_ids=places % 9)
    if "sliding_window" in config_class.__dataclass_fields__:
        with pytest.raises(Exception, match="set sliding_window=None"):
            make(config_class, sliding_window=8, use_sliding_window=True)


@pytest.mark.slow
@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda config: config.__name__)
def test_a_graph_which_cannot_see_documents_takes_no_positions(config_class):
    model, prompt = make(config_class)
    torch.compiler.reset()  # the families have different bases
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(prompt).logits, logits(model, prompt))
    with pytest.raises(Exception, match="a row of its own"):
        compiled(prompt, position_ids=torch.arange(prompt.shape[1])[None] % 9)


def test_the_cache_is_a_state_whatever_the_length():
    model, prompt = make()
    whole = logits(model, prompt)
    for edges in ((3, 4, 13, 20), (3,)):
        cache = DynamicCache(config=model.config)
        found = read_in_pieces(model, prompt, edges, cache=cache)
        torch.testing.assert_close(found, whole[:, : edges[-1]], rtol=0, atol=1e-12)
        # Batch 2 and two key heads: 2 P Dv + P numbers each, with P = 4 and Dv = 8.
        layer = cache.layers[0]
        assert layer.recurrent_states[0].numel() == 2 * 2 * (8 * 8 + 4)
        assert layer.keys.nbytes + layer.values.nbytes == 2 * 2 * edges[-1]  # they count tokens


def test_attention_sees_the_past_alone_and_has_gradients():
    model, prompt = make(CoCAGPTNeoXConfig, num_key_value_heads=None, coca_form="magnitude")
    changed = prompt.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 97
    different = (model(prompt).logits - model(changed).logits).abs().amax((0, 2)) > 1e-6
    assert not different[:12].any() and different[12:].all()
    model(prompt, labels=prompt).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"coca_form": "slack"}, "shift-invariant"),
        ({"kv_cache": "half"}, "no cache of keys"),
        ({"coca_free_pairs": 1}, "no free pairs"),
        ({"layer_types": ["full_attention"] * 2}, "coca_linear is for"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "decay": 1.0}}, "decay"),
    ],
)
def test_what_linear_models_cannot_be_is_refused(fields, words):
    with pytest.raises(Exception, match=words):
        make(**fields)


def test_other_caches_and_scalings_are_refused():
    model, prompt = make()
    set_rotary_scaling(model, "ntk", factor=4.0)
    assert model(prompt).logits.isfinite().all()
    set_rotary_scaling(model, "dynamic", factor=2.0)
    with pytest.raises(ValueError, match="follows the length"):
        model(prompt)
    set_rotary_scaling(model, "none")
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model(prompt, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="does not support linear attention"):
        model.generate_batch([[3, 4, 5]])


def test_a_layer_for_any_model():
    torch.manual_seed(0)
    layer = CoCAAttention(32, 4, 2, form="strict", linear=True, layer_idx=0).double()
    x, cache = torch.randn(2, 17, 32, dtype=torch.float64), DynamicCache(config=make()[0].config)
    whole = layer(x)
    parts = [layer(part, cache=cache) for part in x.split([8, 1, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0), value=2.0)
    mask = torch.arange(20).expand(2, -1) >= 3
    masked = layer(padded, attention_mask=mask)[:, 3:]
    torch.testing.assert_close(masked, whole, rtol=0, atol=1e-12)
    for options, words in (
        ({"window": 4}, "no window"),
        ({"form": "slack"}, "shift-invariant"),
        ({"rotation": Rotation(8, decay=1.0)}, "a decay"),
    ):
        with pytest.raises(ValueError, match=words):
            CoCAAttention(32, 4, **{"form": "strict", "linear": True} | options)
    with pytest.raises(ValueError, match="is causal"):
        layer(x, is_causal=False)
    with pytest.raises(ValueError, match="keeps a state"):
        layer(x, cache=Cache(layers=[]))
