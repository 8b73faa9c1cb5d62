"""GraniteSWA, which has a sink per head, through SDPA in blocks in place of `eager`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteSWAConfig, GraniteSWAForCausalLM

from coca_attention.models.sinks import SINKS, use_fused_attention
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.loading import load_model
from families import SIZES, WINDOWED, assert_compiles_and_trains, assert_reads_the_same

WINDOW = 6


def granite(implementation=SINKS, dtype=torch.float64):
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


def test_every_way_of_reading_gives_the_same_and_one_graph_trains():
    model = granite(dtype=torch.float32)  # like Transformers' angles, which padding shifts
    assert_reads_the_same(model, some_tokens(model, length=40))
    assert_compiles_and_trains(model)


@pytest.mark.parametrize("length", [1, WINDOW, WINDOW + 1, 300])
def test_logits_and_gradients_are_those_of_eager(length):
    # In float64, too, `eager` takes softmax and sinks in float32.
    ids, found = some_tokens(granite(), length=length), []
    for implementation in (SINKS, "eager"):
        model = granite(implementation)
        read = model(ids, use_cache=False).logits
        read.logsumexp(-1).sum().backward()
        found.append((read.detach(), [w.grad for w in model.parameters()]))
    assert difference(found[0][0], found[1][0]) < 1e-5
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert theirs.abs().max() > 1e-6 and difference(ours, theirs) < 1e-5  # sinks matter


def test_packed_documents_stay_apart():
    model, positions = granite(), torch.arange(10).repeat(1, 2)
    first = some_tokens(model, batch=1, length=20)
    second = first.clone()
    second[:, :10] = first[:, :10].flip(-1)
    read = [logits(model, ids, position_ids=positions)[:, 10:] for ids in (first, second)]
    assert difference(*read) < 1e-12
    assert difference(read[0], logits(model, first[:, 10:])) < 1e-12


def test_half_precision_is_as_exact_as_eager():
    """In bfloat16, the error against float64 is at most twice that of `eager`."""
    exact = granite()
    ids = some_tokens(exact, length=200)
    expected = logits(exact, ids)
    ours, theirs = (
        difference(logits(granite(name, torch.bfloat16), ids), expected)
        for name in (SINKS, "eager")
    )
    assert ours <= 2 * theirs


def test_folders_stay_transformers_own(tmp_path):
    use_fused_attention(granite("eager")).save_pretrained(tmp_path)
    plain, ours = AutoModelForCausalLM.from_pretrained(tmp_path), load_model(tmp_path)
    assert plain.config._attn_implementation == "eager"
    assert ours.config._attn_implementation == SINKS
    ids = some_tokens(ours)
    assert difference(logits(ours, ids), logits(plain, ids)) < 1e-5
