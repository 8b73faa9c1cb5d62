"""Self-Extend by its definition; test_pages.py has the tables of results/extension."""

import copy

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AttentionInterface

import oracle
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from families import vanilla
from operands import normal
from studies.smollm2.run import last
from studies.smollm2.self_extend import self_extend

TRAINED, LENGTH, NEAR, SIZE = 16, 40, 4, 3


def test_self_extend_scores_far_keys_by_the_distance_of_their_groups():
    model = vanilla("Llama", max_position_embeddings=TRAINED).double()
    self_extend(model, LENGTH, window=NEAR)
    q, k, v = normal(1, 4, LENGTH, 8), normal(1, 2, LENGTH, 8, seed=1), normal(1, 2, LENGTH, 8)
    attend = AttentionInterface()["self_extend"]
    found, _ = attend(model.model.layers[0].self_attn, q, k, v, None, 0.3)
    m, n = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    distance = torch.where(m - n < NEAR, m - n, m // SIZE + NEAR - NEAR // SIZE - n // SIZE)
    assert distance.max() <= TRAINED
    turned = torch.exp(1j * distance[..., None] * 10000.0 ** (-torch.arange(4.0).double() / 4))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    pairs = (oracle.pairs_of(q), oracle.pairs_of(k).conj(), turned)
    scores = 0.3 * torch.einsum("bhmp,bhnp,mnp->bhmn", *pairs).real
    expected = scores.masked_fill(n > m, -torch.inf).softmax(-1) @ v
    assert difference(found, expected.transpose(1, 2)) < 1e-6  # Transformers' cosines are float32


@pytest.mark.parametrize("family", ["Llama", "GPT-NeoX"])
def test_self_extend_changes_nothing_within_the_training_length(family):
    whole = {"rotary_pct": 1.0} if family == "GPT-NeoX" else {}
    model = vanilla(family, max_position_embeddings=TRAINED, **whole).double()
    ids = some_tokens(model, length=LENGTH)
    before = logits(model, ids)
    self_extend(model, LENGTH, window=NEAR)
    after = logits(model, ids)
    assert difference(decoded_logits(model, ids), after) < 1e-12
    assert difference(after[:, :NEAR], before[:, :NEAR]) < 1e-12 < difference(after, before)


def test_the_last_tokens_of_a_book_stand_behind_its_beginning_of_sequence(tokenizer):
    ids = torch.arange(100, 110)
    assert last(ids, 4, tokenizer).tolist() == [106, 107, 108, 109]
    begins = copy.deepcopy(tokenizer)
    bos = begins.bos_token, begins.bos_token_id
    begins._tokenizer.post_processor = TemplateProcessing(f"{bos[0]} $A", special_tokens=[bos])
    assert last(ids, 4, begins).tolist() == [100, 107, 108, 109]
    assert torch.equal(last(ids, 10, begins), ids)
