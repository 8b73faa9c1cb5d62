"""Heads for tasks: every family classifies texts and tokens, and answers questions."""

import pickle

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from coca_attention import convert
from coca_attention.models.families import HEADS
from coca_attention.testing import difference, some_tokens
from coca_lab.cli import main
from families import FAMILIES, SIZES, vanilla

TASKS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "answer": AutoModelForQuestionAnswering,
}
# Heads that Transformers has for a family; ours exist for all.
WITHOUT = {
    "Gemma 3": ("token", "answer"),
    "Phi-3": ("answer",),
    "OLMo 2": ("token", "answer"),
    "Cohere": ("sequence", "token", "answer"),
    "GLM-4": ("answer",),
}


def configuration(family):
    model_type, differences = FAMILIES[family]
    settings = {**SIZES, **differences, "num_labels": 3}
    return AutoConfig.for_model(
        model_type, **{name: value for name, value in settings.items() if value is not None}
    )


def collinear_head(family, task):
    """Converted from the vanilla head, or built, where Transformers has none."""
    torch.manual_seed(0)
    if task not in WITHOUT.get(family, ()):
        return convert(TASKS[task].from_config(configuration(family)), "strict").eval()
    body = convert(vanilla(family), "strict")
    body.config.num_labels = 3
    return TASKS[task].from_config(body.config).eval()


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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_trained_saved_and_reloaded(family, task, tmp_path):
    model = collinear_head(family, task)
    assert model.config.coca_form == "strict" and model.config.num_labels == 3
    assert type(model).__name__.startswith("CoCA")
    assert pickle.loads(pickle.dumps(type(model))) is type(model)
    ids = some_tokens(model, batch=4, length=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, **labels(task, ids)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = outputs(model, ids)
    pads = torch.zeros(4, 3, dtype=torch.long)
    padded = outputs(model, torch.cat((pads, ids), 1), torch.cat((pads, torch.ones_like(ids)), 1))
    padded = padded if task == "sequence" else padded[:, 3:]
    assert difference(padded.double(), expected.double()) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = TASKS[task].from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded, ids), expected)


def test_every_head_is_tested():
    assert list(TASKS.values()) == list(HEADS)


def test_a_language_model_becomes_a_classifier(tmp_path):
    model = convert(vanilla("Qwen3"))
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    ours = classifier.base_model.state_dict()
    assert all(torch.equal(w, ours[n]) for n, w in model.base_model.state_dict().items())
    assert classifier.score.weight.shape == (3, 32)


def test_the_command_converts_a_classifier(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(configuration("Llama"))
    model.save_pretrained(source)
    assert main(["convert", str(source), str(target), "--form", "strict"]) == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(target).eval()
    ids = some_tokens(loaded)
    assert torch.equal(outputs(loaded, ids), outputs(convert(model, "strict").eval(), ids))


@pytest.mark.filterwarnings("ignore")
def test_reward_trainer_takes_a_path(tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl, which is not among the requirements")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"pad": 0, "a": 1, "b": 2, "c": 3, "d": 4}
    words = Tokenizer(models.WordLevel(vocabulary, "pad"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="pad", eos_token="d"
    )
    model = convert(vanilla("Llama"))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = {"chosen": ["a b c", "a c c"] * 4, "rejected": ["b b", "c a"] * 4}
    trainer = trl.RewardTrainer(
        model=str(tmp_path / "model"),
        args=trl.RewardConfig(
            output_dir=str(tmp_path / "run"), max_steps=2, report_to=[], use_cpu=True, bf16=False
        ),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    assert type(trainer.model).__name__ == "CoCALlamaForSequenceClassification"
    trainer.save_model(str(tmp_path / "reward"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert torch.equal(again.score.weight, trainer.model.score.weight)
