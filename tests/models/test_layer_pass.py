"""Masks formed by the layers themselves: as Transformers' own, in linear memory, in one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from coca_attention import convert
from coca_attention.models import Roles
from coca_attention.ops import attention
from coca_attention.testing import difference, some_tokens
from covering import mostly_slow
from families import MAPS, VARIED, assert_compiles_and_trains, set_map, vanilla
from operands import Largest

KINDS = {
    "roles": {"roles": Roles("lg", window=6, decay=1.0)},
    "limited": {"near": 16},
    "leaky": {"near": 16},
    "shifted": {"near": 16},
    "grouped": {"near": 16},
    "windows": {},
    "neither": {},
}


def model_of(kind, family="Llama"):
    windows = ["sliding_attention" if kind == "windows" else "full_attention"] * 2
    changes = {"layer_types": windows} if family == "Qwen2" else {}
    model = convert(vanilla(family, **changes), "strict", **KINDS[kind]).double().eval()
    if kind in MAPS:
        set_map(model, MAPS[kind])
    return model


def hidden(case, ids):
    """Arguments of the model, and the tokens whose outputs mean something."""
    real, length = torch.ones_like(ids), ids.shape[1]
    if case == "packing":
        return {"position_ids": (torch.arange(length) % (length // 3 + 1))[None]}, real.bool()
    if case == "padding":
        real[0, : length // 8], real[1, -length // 4 :] = 0, 0
    return {} if case == "plain" else {"attention_mask": real}, real.bool()


def read(model, reader, ids, options, real):
    """Logits of the real tokens, and the gradients of all weights."""
    found = reader(input_ids=ids, use_cache=False, **options).logits[real]
    model.zero_grad()
    found.square().mean().backward()
    return found.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


CASES = [
    *(("roles", f, ("padding", "packing")[i % 2]) for i, f in enumerate(VARIED)),
    ("limited", "Llama", "padding"),
    ("limited", "GPT-NeoX", "packing"),
    ("leaky", "Mistral", "packing"),
    ("shifted", "GLM-4", "padding"),
    ("grouped", "Llama", "packing"),
    ("windows", "Qwen2", "padding"),
    ("neither", "GLM-4", "packing"),
]


@pytest.mark.parametrize(("kind", "family", "case"), mostly_slow(CASES, [CASES[0], *CASES[5:]]))
def test_no_tensor_has_an_element_for_every_pair_of_tokens(kind, family, case):
    model = model_of(kind, family).float()
    ids = some_tokens(model, batch=2, length=2048)
    options, _ = hidden(case, ids)
    with Largest() as largest:
        out = model.base_model(ids, use_cache=False, **options).last_hidden_state
        out.square().mean().backward()
    assert largest.elements < 2048 * 2048


@pytest.mark.parametrize(("kind", "family", "case"), CASES)
def test_outputs_and_gradients_are_those_of_whole_masks(kind, family, case, monkeypatch):
    model = model_of(kind, family)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 32)
    ids = some_tokens(model, batch=2, length=150)
    ours = read(model, model, ids, *hidden(case, ids))
    # Then Transformers makes the masks.
    monkeypatch.setattr(type(model.base_model), "_band", lambda *_: None)
    theirs = read(model, model, ids, *hidden(case, ids))
    assert all(difference(a, b) < 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("kind", "family"),
    mostly_slow(
        [("limited", "GPT-NeoX"), ("leaky", "Llama"), ("shifted", "Llama"), ("roles", "GLM-4")],
        [("limited", "GPT-NeoX")],
    ),
)
def test_one_graph_without_breaks_and_training(kind, family):
    assert_compiles_and_trains(model_of(kind, family).float())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "padding"])
@pytest.mark.parametrize("kind", ["roles", "limited", "leaky", "shifted", "grouped"])
def test_one_graph_serves_all_lengths(kind, case, monkeypatch):
    """One for the first length, which torch.compile takes for fixed, and one for all others."""
    model = model_of(kind)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 64)
    graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for length in (24, 37, 50, 130, 70, 200):
        ids = some_tokens(model, batch=2, length=length)
        ours, theirs = (read(model, by, ids, *hidden(case, ids)) for by in (compiled, model))
        assert all(difference(a, b) < 1e-12 for a, b in zip(ours, theirs, strict=True))
    assert graphs.frame_count <= 2
