"""Encoders: ModernBERT sees both directions, in local layers a window."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles
from coca_attention.models.configuration import LOCAL
from coca_attention.models.families import HEADS
from coca_attention.ops import FORMS
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from families import SIZES, attended, oracle_scores, reloaded

MASK, ROUND_OFF = 3, 1e-12
SETTINGS = SIZES | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "layer_types": ["full_attention", LOCAL, LOCAL, "full_attention"],
    "cls_token_id": 1,
    "sep_token_id": 2,
}


def vanilla(auto=AutoModelForMaskedLM, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model("modernbert", **{**SETTINGS, **changes})
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6.0)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_attention_weights_match_the_oracle_in_both_directions(form):
    model = convert(vanilla(), form).double()
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
    model = vanilla().double()
    ids = some_tokens(model)
    expected = logits(copy.deepcopy(model), ids)
    # Transformers' own rotary tables are in float32.
    assert difference(logits(convert(model, free_pairs=4), ids), expected) < 1e-5


@pytest.mark.parametrize(("form", "first"), [("slack", 5), ("strict", 0)])
def test_padding_changes_nothing(form, first):
    model = convert(vanilla(), form).double()
    ids, padded = some_tokens(model), torch.zeros(2, 29, dtype=torch.long)
    padded[:, first : first + 24] = ids
    found = logits(model, padded, attention_mask=(padded != 0).long())
    assert difference(found[:, first : first + 24], logits(model, ids)) < ROUND_OFF


def test_masked_tokens_are_learned_saved_and_reloaded(tmp_path):
    model = convert(vanilla(), "strict").train()
    labels, hidden = some_tokens(model, batch=4), torch.arange(24) % 4 == 0
    ids = labels.clone()
    ids[:, hidden], labels[:, ~hidden] = MASK, -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        assert all(w.grad is not None for n, w in model.named_parameters() if "t_proj" in n)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    loaded = reloaded(model.eval(), tmp_path, AutoModelForMaskedLM)
    assert type(loaded) is type(model) and loaded.config.coca_form == "strict"
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    body = AutoModel.from_pretrained(tmp_path).eval()  # for embeddings of texts
    with torch.no_grad():
        assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("auto", HEADS)
def test_heads(auto, tmp_path):
    model = convert(vanilla(auto), "strict").eval()
    ids = some_tokens(model)
    loaded = reloaded(model, tmp_path, auto)
    with torch.no_grad():
        ours, theirs = model(ids)[0], loaded(ids)[0]
    assert type(loaded) is type(model) and torch.equal(ours, theirs)
    assert auto.from_config(model.config).config.model_type == "coca_modernbert"


def test_the_command_converts_an_encoder(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    model = vanilla()
    model.save_pretrained(source)
    assert main(["convert", str(source), str(target)]) == 0
    ids = some_tokens(model)
    loaded = AutoModelForMaskedLM.from_pretrained(target).eval()
    assert torch.equal(logits(loaded, ids), logits(convert(model), ids))


def test_what_is_for_causal_models_is_refused():
    model = vanilla()
    with pytest.raises(UserError, match="roles need one set of rotary parameters"):
        convert(model, roles=Roles("lg"))
    rope = copy.deepcopy(model.config.rope_parameters)
    rope["full_attention"]["temperature"] = 16
    model.config.rope_parameters = rope
    with pytest.raises(UserError, match="max_distance count the tokens before a query"):
        convert(model)
