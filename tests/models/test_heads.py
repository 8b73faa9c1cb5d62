"""Heads for tasks: every family classifies texts and tokens, and answers questions."""

import pickle
from itertools import cycle, product

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from coca_attention import convert
from coca_attention.models.families import HEAD_CLASSES
from coca_attention.testing import difference, some_tokens
from covering import mostly_slow
from families import FAMILIES, configuration, left_padded, losses, reloaded, vanilla

TASKS = dict(zip(("sequence", "token", "answer"), HEAD_CLASSES, strict=True))
LABELS = {"sequence": 3, "token": 3, "answer": 2}


def collinear_head(family, task):
    """Converted from the vanilla head, or built, where Transformers has none for the family."""
    torch.manual_seed(0)
    auto, config = TASKS[task], configuration(family, num_labels=LABELS[task])
    if type(config) in auto._model_mapping:
        return convert(auto.from_config(config), "strict").eval()
    body = convert(vanilla(family), "strict")
    body.config.num_labels = LABELS[task]
    return auto.from_config(body.config).eval()


def labels(task, ids):
    if task == "sequence":
        return {"labels": ids[:, 0] % 3}
    if task == "token":
        return {"labels": ids % 3}
    return {"start_positions": ids[:, 0] % 8, "end_positions": ids[:, 1] % 8}


def outputs(model, ids, mask=None):
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask)
    return found.logits if "logits" in found else torch.stack(found[:2], -1)


@pytest.mark.parametrize(
    ("family", "task"),
    mostly_slow(
        product([*FAMILIES, "ModernBERT"], TASKS),
        [*product(["Llama", "ModernBERT"], TASKS), *zip(FAMILIES, cycle(TASKS), strict=False)],
    ),
)
def test_a_head_is_trained_saved_and_reloaded(family, task, tmp_path):
    model = collinear_head(family, task)
    assert model.config.coca_form == "strict" and model.config.num_labels == LABELS[task]
    assert type(model).__name__.startswith("CoCA")
    assert pickle.loads(pickle.dumps(type(model))) is type(model)
    ids = some_tokens(model, batch=4, length=12)
    first, *_, last = losses(model, 6, input_ids=ids, **labels(task, ids))
    assert last < first
    expected = outputs(model, ids)
    padded = outputs(model, *left_padded(ids, 3))
    padded = padded if task == "sequence" else padded[:, 3:]
    assert difference(padded.double(), expected.double()) < 1e-5
    loaded = reloaded(model, tmp_path, TASKS[task])
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded, ids), expected)


def test_a_language_model_becomes_a_classifier(tmp_path):
    model = convert(vanilla("Qwen3"), "slack")
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    ours = classifier.base_model.state_dict()
    assert all(torch.equal(w, ours[n]) for n, w in model.base_model.state_dict().items())
    assert classifier.score.weight.shape == (3, 32)
