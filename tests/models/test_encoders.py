"""Encoders: ModernBERT sees both directions, in local layers a window."""

import copy
from functools import partial

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles
from coca_attention.models.configuration import LOCAL
from coca_attention.ops import FORMS
from coca_attention.testing import difference, logits, some_tokens
from families import attended, losses, oracle_scores, reloaded, vanilla

MASK, ROUND_OFF = 3, 1e-12
encoder = partial(vanilla, "ModernBERT", auto=AutoModelForMaskedLM)


@pytest.mark.parametrize("form", FORMS)
def test_attention_weights_match_the_oracle_in_both_directions(form):
    model = convert(encoder(), form).double()
    ids = some_tokens(model)
    by_sdpa = logits(model, ids)
    by_eager, layers = attended(model, ids)
    assert difference(by_eager, by_sdpa) < ROUND_OFF
    positions = torch.arange(ids.shape[1])
    distance = (positions.unsqueeze(-1) - positions).abs()
    for attention, q, t, weights in layers:
        scores = oracle_scores(form, attention, q, t) * 8**-0.5
        if attention.layer_type == LOCAL:
            scores = scores.masked_fill(distance > 4, float("-inf"))
        assert (weights - scores.softmax(-1)).abs().max() < 1e-9
        assert weights.triu(1).max() > 0.05  # tokens after the query are seen


def test_with_all_pairs_free_the_model_is_the_rotary_one():
    model = encoder().double()
    ids = some_tokens(model)
    expected = logits(copy.deepcopy(model), ids)
    # Transformers' own rotary tables are in float32.
    assert difference(logits(convert(model, "slack", free_pairs=4), ids), expected) < 1e-5


@pytest.mark.parametrize(("form", "first"), [("slack", 5), ("strict", 0)])
def test_padding_changes_nothing(form, first):
    model = convert(encoder(), form).double()
    ids, padded = some_tokens(model), torch.zeros(2, 29, dtype=torch.long)
    padded[:, first : first + 24] = ids
    found = logits(model, padded, attention_mask=(padded != 0).long())
    assert difference(found[:, first : first + 24], logits(model, ids)) < ROUND_OFF


def test_masked_tokens_are_learned_saved_and_reloaded(tmp_path):
    model = convert(encoder(), "strict").train()
    labels, hidden = some_tokens(model, batch=4), torch.arange(24) % 4 == 0
    ids = labels.clone()
    ids[:, hidden], labels[:, ~hidden] = MASK, -100
    before = {n: w.clone() for n, w in model.named_parameters() if "t_proj" in n}
    first, *_, last = losses(model, 20, input_ids=ids, labels=labels)
    assert last < first / 2
    assert before and not any(torch.equal(w, model.get_parameter(n)) for n, w in before.items())
    loaded = reloaded(model.eval(), tmp_path, AutoModelForMaskedLM)
    assert type(loaded) is type(model) and loaded.config.coca_form == "strict"
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    body = AutoModel.from_pretrained(tmp_path).eval()  # for embeddings of texts
    with torch.no_grad():
        assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_what_is_for_causal_models_is_refused():
    model = encoder()
    with pytest.raises(UserError, match="roles need one set of rotary parameters"):
        convert(model, "slack", roles=Roles("lg"))
    rope = copy.deepcopy(model.config.rope_parameters)
    rope["full_attention"]["temperature"] = 16
    model.config.rope_parameters = rope
    with pytest.raises(UserError, match="distance_map count the tokens before a query"):
        convert(model, "slack")
