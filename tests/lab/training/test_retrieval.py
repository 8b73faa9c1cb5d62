"""Passkeys and needles next to perplexity, found as the evaluation finds them."""

import shutil

import pytest
import torch
from accelerate import PartialState

from coca_attention.errors import UserError
from coca_lab.data.tasks import PASSKEY_ANSWER, encoder
from coca_lab.evaluation import Model, evaluate
from coca_lab.evaluation.prompts import PASSKEY_TASK, PasskeySettings
from coca_lab.training import load_recipe, read_summary, train
from coca_lab.training import retrieval as module
from coca_lab.training.retrieval import SEED, load_retrieval
from coca_lab.training.run import what_was_kept
from coca_lab.training.texts import load_data
from conftest import tiny_model
from runs import TEACHER, assert_the_same, write_recipe

LENGTH = 280


def asked(**validation):
    words = [f"--validation.{name}={value}" for name, value in validation.items()]
    return load_recipe(None, ["--validation.every=1", "--data.block_length=280", *words])


@pytest.fixture(scope="module")
def learned(tokenizer):
    """A model that has learned the answers to three of four prompts by heart, and the prompts."""
    retrieval = load_retrieval(asked(passkeys=4), tokenizer)
    assert list(retrieval.questions) == [f"passkey_{LENGTH}"]
    encode, prompts = encoder(tokenizer), retrieval.questions[f"passkey_{LENGTH}"].prompts
    answers = [encode(PASSKEY_ANSWER.format(key=prompt.facts["key"])) for prompt in prompts[:3]]
    longest = max(map(len, answers)) + 1
    answers = [x + [tokenizer.eos_token_id] + [-100] * (longest - 1 - len(x)) for x in answers]
    labels = torch.tensor([[-100] * LENGTH + x for x in answers])
    ids = torch.tensor([p.ids + x for p, x in zip(prompts, answers, strict=False)]).clamp_min(0)
    model = tiny_model("llama-rope")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), retrieval


def test_it_finds_what_the_evaluation_finds(learned, tokenizer):
    model, retrieval = learned
    shares = retrieval.shares(model)
    settings = PasskeySettings(lengths=[LENGTH], samples=4, seed=SEED, max_new_tokens=32)
    [cell] = evaluate(PASSKEY_TASK, Model(model, tokenizer), settings)
    assert shares == {f"passkey_{LENGTH}": cell["accuracy"]}
    assert [sample["hit"] for sample in cell["samples"]] == [True, True, True, False]


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_processes_share_the_prompts(learned, monkeypatch, processes):
    """Every process answers equally many, also where they do not divide, and none counts twice."""
    model, retrieval = learned
    gathered, answers = [], []

    class State:
        num_processes = processes
        split_between_processes = PartialState.split_between_processes

    def answer(model, tokenizer, prompts, *, together, **kwargs):
        answers[-1] += len(prompts)
        assert together is (processes > 1)
        return plain(model, tokenizer, prompts, **kwargs)

    plain = module.greedy_answers
    monkeypatch.setattr(module, "PartialState", State)
    monkeypatch.setattr(module, "greedy_answers", answer)
    monkeypatch.setattr(module, "gather_object", lambda x: gathered.extend(x) or gathered)
    for rank in range(processes):
        State.process_index = rank
        answers.append(0)
        share = retrieval.shares(model)
    assert share == {f"passkey_{LENGTH}": 0.75} and len(dict(gathered)) == 4
    assert len(set(answers)) == 1


def test_needles_and_lengths(tokenizer):
    retrieval = load_retrieval(asked(needles=2, lengths="[700]"), tokenizer)
    sizes = {n: [len(p.ids) for p in asked.prompts] for n, asked in retrieval.questions.items()}
    tasks = ("niah_single_1", "niah_multikey_2")
    assert sizes == {f"{task}_700": [700 - 128] * 2 for task in tasks}
    assert retrieval.shares(tiny_model("strict")) == dict.fromkeys(sizes, 0.0)
    described = retrieval.describe()["niah_multikey_2_700"]
    assert described == {"what": "niah_multikey_2", "length": 700, "prompts": 2}


def test_a_length_without_room_is_refused_before_the_text_is_read(base, text_folder, tmp_path):
    path = write_recipe(base, text_folder, tmp_path / "recipe.yaml", TEACHER)
    unread = load_recipe(path, ["--validation.passkeys=1", "--data.source=missing"])
    with pytest.raises(UserError, match=r"validation\.passkeys: a text of 16 tokens is too short"):
        load_data(unread, {}, tmp_path)


def test_a_run_measures_resumes_and_says_what_was_kept(
    base, text_folder, tmp_path, monkeypatch, caplog
):
    """With every objective; the same figures and weights after a kill in the last stage."""
    monkeypatch.setattr("coca_lab.training.retrieval.ANSWER", 4)  # tokens
    path = write_recipe(base, text_folder, tmp_path / "recipe.yaml", TEACHER)
    options = ["--validation.passkeys=2", "--validation.lengths=[300]"]
    recipe = load_recipe(path, options)
    caplog.set_level("INFO", "coca_lab")
    straight = train(recipe, tmp_path / "straight")
    assert ", passkeys at 300 tokens 0%" in caplog.text
    resumed = shutil.copytree(straight, tmp_path / "resumed")
    for path in (resumed / "training.json", resumed / "config.json"):
        path.unlink()
    shutil.rmtree(resumed / "stages" / "logits" / "checkpoints" / "checkpoint-6")
    train(recipe, resumed)
    summary = read_summary(straight)
    # Before, during and after each of two stages, and the start.
    assert len(summary["validation"]) == 6
    for entry in (summary["start"], *summary["validation"]):
        assert entry["retrieval"] == {"passkey_300": 0.0}
    assert_the_same(resumed, straight)
    assert what_was_kept(summary).endswith("%, passkeys at 300 tokens 0 of 2 where it has 0")


def test_what_was_kept_is_said_of_what_was_measured(staged):
    start = {"name": "base", "perplexity": 19.0}
    before = {**read_summary(staged[1]), "name": "old", "start": start}
    before["validation"] = [{"step": 0, "perplexity": 20.0}]
    run = before | {
        "name": "new",
        "start": {**start, "retrieval": {"passkey_256": 1.0}},
        "retrieval": {"passkey_256": {"what": "passkeys", "length": 256, "prompts": 50}},
        "validation": [
            {"step": 10 * i, "perplexity": 20.0 - i, "retrieval": {"passkey_256": share}}
            for i, share in enumerate((0.1, 0.98))
        ],
    }
    assert what_was_kept(run) == (
        "kept of base: perplexity +0.0%, passkeys at 256 tokens 49 of 50 where it has 50"
    )
    assert what_was_kept(before) == "kept of base: perplexity +5.3%"
    assert what_was_kept({**before, "start": None}) == ""
