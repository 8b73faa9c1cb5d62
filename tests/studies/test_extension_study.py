"""Ways to read farther: Self-Extend by its definition, and the tables of results/extension."""

import json
import math

import pytest
import torch
from transformers import AttentionInterface

import oracle
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from families import vanilla
from operands import normal
from studies import extension
from studies.pages import BEGIN, END
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


def test_tables_compare_ways_over_the_bases(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "RESULTS", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(f"Before\n{BEGIN}\nold\n{END}\nafter")
    found = {"limited distances": 20, "base": 40, "limited distances, trained": 30}
    cells = [
        {"model": way, "scaling": "none", "training_seed": seed, **cell}
        for way, perplexity in found.items()
        for seed in range(3)
        for cell in (
            {"task": "perplexity", "window": 4096, "nats": 7 * math.log(perplexity), "tokens": 7},
            {"task": "passkey", "length": 256, "accuracy": 0.5},
        )
    ]
    (tmp_path / "trials").mkdir()
    for name, of in (("results.json", cells), (extension.SELF_EXTEND, [])):
        (tmp_path / name).write_text(json.dumps({"results": of}))
    extension.write_tables()
    text = page.read_text()
    assert text.startswith("Before") and text.endswith("after") and "old" not in text
    assert "| as it is | 40.0 | 0.50 | 2.00 (2.00 to 2.00) |" in text
    assert "| limited distances | 20.0 | 0.50 | 0.67 (0.67 to 0.67) |" in text
