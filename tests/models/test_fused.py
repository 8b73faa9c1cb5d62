"""Transformers' models with windows or sinks: attention in blocks in place of their own."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
)

from coca_attention import convert
from coca_attention.models.fused import FUSED, use_fused_attention
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.loading import load_model
from families import (
    SIZES,
    WINDOWED,
    assert_compiles_and_trains,
    assert_reads_the_same,
    left_padded,
    read_in_pieces,
    vanilla,
)
from natives import cohere
from operands import Largest

WINDOW = 6
EDGES = (1, WINDOW, WINDOW + 1, 63, 64, 65, 64 + WINDOW, 65 + WINDOW, 300)
"""Lengths: of the window, of a block of queries (`WINDOW_BLOCK`), of both, and one more."""
NAMES = ["GraniteSWA", "Cohere2", "Gemma 3", "Mistral", "Phi-3", "Qwen2 MoE"]


def granite(implementation=FUSED, dtype=torch.float64):
    """A local layer with positions and a global one without, both with sinks far from 0."""
    torch.manual_seed(0)
    config = GraniteSWAConfig(
        **SIZES, attention_multiplier=8**-0.5, sliding_window=WINDOW, layer_types=WINDOWED,
        layer_rope_theta=[10000.0, 0], initializer_range=0.3,
    )  # fmt: skip
    model = GraniteSWAForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(std=2.0)
    model.set_attn_implementation(implementation)
    return model


def stock(name):
    """One of `NAMES` with its own attention."""
    if name == "GraniteSWA":
        return granite("eager", torch.float32)
    windows = {"sliding_window": WINDOW}
    if name == "Qwen2 MoE":  # tells attention functions nothing of its windows
        windows |= {"use_sliding_window": True, "layer_types": WINDOWED}
    return cohere() if name == "Cohere2" else vanilla(name, **windows)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    theirs, ours = stock(name), use_fused_attention(stock(name))
    assert (theirs.config._attn_implementation, ours.config._attn_implementation) == (
        "eager" if name == "GraniteSWA" else "sdpa", FUSED,
    )  # fmt: skip
    long = some_tokens(ours, length=EDGES[-1])
    for length in EDGES:
        ids = long[:, :length]
        assert difference(logits(ours, ids), logits(theirs, ids)) < 1e-5
    expected = logits(theirs, long)
    for cut in ((1, 2, 3, 80, 81, 300), (200, 300)):  # a token and several after a cache
        assert difference(read_in_pieces(ours, long, cut).double(), expected) < 1e-5
    ids, mask = left_padded(long, 70)
    mask[1, :35] = 1  # rows with unlike padding
    apart = [logits(model, ids, attention_mask=mask) * mask[..., None] for model in (ours, theirs)]
    assert difference(*apart) < 1e-5
    pieces = read_in_pieces(ours, ids, (100, 101, 370), mask).double() * mask[..., None]
    assert difference(pieces, apart[1]) < 1e-5


@pytest.mark.parametrize("name", ["GraniteSWA", "Cohere2"])
def test_every_way_of_reading_gives_the_same_and_one_graph_trains(name):
    model = use_fused_attention(stock(name))
    assert_reads_the_same(model, some_tokens(model, length=40))
    assert_compiles_and_trains(model)


class Scores(Largest):
    """Also the scores that attention computes."""

    scores = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(operator):
            self.scores += args[0].shape[:-1].numel() * args[1].shape[-2]
        return super().__torch_dispatch__(operator, types, args, kwargs)


def test_layers_with_windows_take_linear_time_and_memory():
    model, length = use_fused_attention(stock("Mistral")), 8192
    ids = some_tokens(model, batch=1, length=length)
    with Scores() as found:
        logits(model, ids)
    # A block of 64 queries sees as many keys and a window; the mask alone had length².
    heads = SIZES["num_hidden_layers"] * SIZES["num_attention_heads"]
    assert heads * length * WINDOW < found.scores < 1.1 * heads * length * (64 + WINDOW)
    assert found.elements < 3 * length * SIZES["vocab_size"]  # of float64 logits


@pytest.mark.parametrize("length", [1, WINDOW, WINDOW + 1, 300])
def test_logits_and_gradients_are_those_of_eager(length):
    # In float64, too, `eager` takes softmax and sinks in float32.
    ids, found = some_tokens(granite(), length=length), []
    for implementation in (FUSED, "eager"):
        model = granite(implementation)
        read = model(ids, use_cache=False).logits
        read.logsumexp(-1).sum().backward()
        found.append((read.detach(), [w.grad for w in model.parameters()]))
    assert difference(found[0][0], found[1][0]) < 1e-5
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert theirs.abs().max() > 1e-6 and difference(ours, theirs) < 1e-5  # sinks matter


@pytest.mark.parametrize("name", ["GraniteSWA", "Cohere2"])
def test_packed_documents_stay_apart(name):
    model, positions = use_fused_attention(stock(name)).double(), torch.arange(10).repeat(1, 2)
    first = some_tokens(model, batch=1, length=20)
    second = first.clone()
    second[:, :10] = first[:, :10].flip(-1)
    read = [logits(model, ids, position_ids=positions)[:, 10:] for ids in (first, second)]
    assert difference(*read) < 1e-12
    # In float64, too, GraniteSWA takes softmax and sinks in float32.
    tolerance = 1e-6 if name == "GraniteSWA" else 1e-12
    assert difference(read[0], logits(model, first[:, 10:])) < tolerance


def test_half_precision_is_as_exact_as_eager():
    """In bfloat16, the error against float64 is at most twice that of `eager`."""
    exact = granite()
    ids = some_tokens(exact, length=200)
    expected = logits(exact, ids)
    ours, theirs = (
        difference(logits(granite(name, torch.bfloat16), ids), expected)
        for name in (FUSED, "eager")
    )
    assert ours <= 2 * theirs


@pytest.mark.parametrize("name", ["GraniteSWA", "Cohere2", "Gemma 3"])
def test_folders_stay_transformers_own(name, tmp_path):
    own = stock(name).config._attn_implementation
    use_fused_attention(stock(name)).save_pretrained(tmp_path)
    plain, ours = AutoModelForCausalLM.from_pretrained(tmp_path), load_model(tmp_path)
    assert plain.config._attn_implementation == own
    assert ours.config._attn_implementation == FUSED
    ids = some_tokens(ours)
    assert difference(logits(ours, ids), logits(plain, ids)) < 1e-5


def test_models_without_windows_or_with_their_own_ways_keep_their_attention():
    capped = Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8)
    converted = convert(use_fused_attention(stock("Gemma 3")), "strict")
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    several = Gemma3Config(vision_config=vision, text_config=stock("Gemma 3").config.to_dict())
    assert use_fused_attention(Gemma2ForCausalLM(capped)).config._attn_implementation == "eager"
    for model in (converted, vanilla("Llama"), Gemma3ForConditionalGeneration(several)):
        assert use_fused_attention(model).config._attn_implementation == "sdpa"
