"""Caches keep the positions of their tokens: what else is done with a cache leaves them right."""

import copy
from functools import partial
from unittest.mock import MagicMock, Mock

import pytest
import torch
from transformers import DynamicCache, StaticCache

from coca_attention import convert
from coca_attention.ops import DistanceMap
from coca_attention.testing import difference, logits, some_tokens
from families import MAPS, set_map, vanilla

KINDS = {
    "half": lambda: convert(vanilla("Llama"), "slack", kv_cache="half"),
    "limited": lambda: set_map(convert(vanilla("Llama"), "rope", near=5), DistanceMap.limited(5)),
    "shifted": lambda: set_map(convert(vanilla("Llama"), "rope", near=5), MAPS["shifted"]),
}
GAPS = torch.tensor([0, 1, 2, 3, 20, 21, 22, 40, 41, 42, 43, 90, 91, 92])
ROWS = torch.stack((GAPS, GAPS + torch.arange(14)))  # of which the second skips others


@pytest.fixture(params=KINDS)
def model(request):
    return KINDS[request.param]().double().eval()


def read(model, ids, cache, start, stop, places, mask=None):
    """Logits of some tokens of a text, (B, stop - start, vocabulary)."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model(
            ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True,
            position_ids=places[:, start:stop],
        )  # fmt: skip


def whole(model, ids, places):
    return logits(model, ids, attention_mask=torch.ones_like(ids), position_ids=places)


def test_a_cache_that_transformers_makes_keeps_them(model):
    ids = some_tokens(model, length=14)
    first = read(model, ids, None, 0, 9, ROWS)
    found = read(model, ids, first.cache, 9, 14, ROWS).logits
    assert difference(found, whole(model, ids, ROWS)[:, 9:]) < 1e-12


def test_copied_and_cropped_caches_keep_them(model):
    ids, cache = some_tokens(model, length=14), DynamicCache()
    read(model, ids, cache, 0, 12, ROWS)
    cache = copy.deepcopy(cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 7
    expected = whole(model, ids, ROWS)
    for start, stop in ((7, 8), (8, 14)):
        found = read(model, ids, cache, start, stop, ROWS).logits
        assert difference(found, expected[:, start:stop]) < 1e-12


def test_rows_of_one_prompt_are_repeated(model):
    ids, cache = some_tokens(model, batch=1, length=14), DynamicCache()
    read(model, ids, cache, 0, 9, GAPS[None])
    cache.batch_repeat_interleave(3)
    ids, places = ids.expand(3, -1), GAPS.expand(3, -1)
    found = read(model, ids, cache, 9, 14, places).logits
    assert difference(found, whole(model, ids, places)[:, 9:]) < 1e-12


def test_moved_rows_keep_theirs(model):
    """As beam search moves them."""
    ids, cache = some_tokens(model, length=14), DynamicCache()
    expected = whole(model, ids, ROWS)
    read(model, ids, cache, 0, 9, ROWS)
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    found = read(model, ids[order], cache, 9, 14, ROWS[order]).logits
    assert difference(found, expected[order][:, 9:]) < 1e-12
    cache.batch_select_indices(order[:1])
    assert cache.layers[-1].positions.tolist() == ROWS[:1].tolist()


def test_an_offloaded_cache_fetches_its_first_layer_after_the_last(model, monkeypatch):
    """Not the positions, which stay where they are."""
    stream = MagicMock()
    monkeypatch.setattr(torch, "Stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: stream)
    ids = some_tokens(model, length=14)
    cache = DynamicCache(config=model.config, offloading=True)
    read(model, ids, cache, 0, 12, ROWS)
    fetched = Mock()
    for index, layer in enumerate(cache.layers[:2]):
        monkeypatch.setattr(layer, "prefetch", partial(fetched, index))
    found = read(model, ids, cache, 12, 13, ROWS).logits
    assert [call.args[0] for call in fetched.call_args_list] == [1, 0]
    assert difference(found, whole(model, ids, ROWS)[:, 12:13]) < 1e-12


@pytest.mark.parametrize("compiled", [False, True])
def test_static_caches_keep_them(model, compiled):
    ids = some_tokens(model, length=14)
    cache = StaticCache(config=model.config, max_cache_len=20)
    expected = whole(model, ids, ROWS)
    read(model, ids, cache, 0, 9, ROWS)
    if compiled:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    for at in range(9, 14):
        with torch.no_grad():
            found = model(
                ids[:, at : at + 1], cache=cache, position_ids=ROWS[:, at : at + 1],
                attention_mask=torch.ones(2, at + 1, dtype=torch.long),
            ).logits  # fmt: skip
        assert difference(found, expected[:, at : at + 1]) < 1e-12
    cache.reset()
    found = read(model, ids, cache, 0, 9, ROWS + 7).logits
    assert difference(found, whole(model, ids, ROWS + 7)[:, :9]) < 1e-12
