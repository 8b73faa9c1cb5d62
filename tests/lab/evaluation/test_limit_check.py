"""Which limit of distances is chosen, and what is said of it."""

import json
import re

import pytest
from transformers import AutoModelForCausalLM

from coca_attention.models.configuration import rope_parameters
from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from coca_lab.data.tasks import vocabulary_text
from coca_lab.evaluation.limit_check import LimitCheck, Measured
from coca_lab.intervals import DocumentScore
from conftest import some_text
from families import vanilla

L = 256
DIFFICULTY = [2.0, 2.4, 2.8, 3.2, 2.2, 2.6, 3.0, 2.5]


def measured(limit, hits, nats=0.0, beyond=0.0):
    """Eight documents, each worse than the base's by some nats a token, and passkeys found."""
    scores = {
        n: [
            DocumentScore(str(i), 100 * (each + extra + 0.001 * (i % 2)), 100)
            for i, each in enumerate(DIFFICULTY)
        ]
        for n, extra in ((L, nats), (2 * L, beyond))
    }
    return Measured(limit, scores, dict(zip(scores, hits, strict=True)))


@pytest.mark.parametrize(
    ("found", "others", "chosen"),
    [
        (50, [measured(128, (50, 40))], 128),
        (50, [measured(128, (49, 50))], L),  # a passkey is lost within L
        (50, [measured(128, (50, 40), nats=0.01)], L),  # every document is worse within L
        (50, [measured(128, (50, 40), nats=-0.01)], 128),
        (50, [measured(192, (50, 40)), measured(128, (50, 40), beyond=-0.1)], 128),
        (50, [measured(192, (50, 40)), measured(128, (50, 30), beyond=-0.1)], 192),
        (0, [measured(128, (0, 9), beyond=-0.5)], L),  # no passkey could be lost
    ],
)
def test_the_best_limit_that_loses_nothing_within_the_training_length_is_chosen(
    found, others, chosen
):
    check = LimitCheck(L, measured(None, (found, 0)), [measured(L, (found, 3)), *others], "")
    assert check.chosen.max_distance == chosen


def test_both_losses_are_told():
    limits = [measured(L, (50, 3)), measured(128, (49, 50), nats=0.01)]
    _, rows = LimitCheck(L, measured(None, (50, 0)), limits, "").table()
    assert [row[-1] for row in rows] == ["", "nothing", "perplexity, passkeys"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("source")
    texts = [Document("a", vocabulary_text()), Document("b", some_text(2000))]
    tokenizer = train_tokenizer(texts, 320, split_digits=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 160}
    vanilla("Llama", **sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for index in range(2):
        (tmp_path / "text" / f"{index}.txt").write_text(some_text(600, seed=index))
    return tmp_path / "model"


def convert_with_check(source, target, capsys):
    """What the command prints, the errors, the card, and the limit that was chosen."""
    words = ["convert", str(source), str(target), "--form", "rope", "--check-samples", "4"]
    words += ["--check", str(source.parent / "text"), "--check-lengths", "[200]"]
    assert main(words) == 0
    config = AutoModelForCausalLM.from_pretrained(target).config
    limit = rope_parameters(config)["max_distance"]
    return *capsys.readouterr(), (target / "README.md").read_text(), limit


def test_a_check_of_a_model_that_finds_nothing_says_that_half_of_it_was_empty(
    source, tmp_path, capsys
):
    said, warned, card, limit = convert_with_check(source, tmp_path / "target", capsys)
    assert "warning: The model finds no passkey in texts of up to L = 160 tokens" in warned
    assert "half of the check was empty" in warned and "half of the check was empty" in card
    assert limit == 160 and re.search(r"W = 160 \(chosen\) .* 0 +0 +nothing; no passkey", said)
    assert "## Limit of distances" in card and "| W = 160 (chosen) |" in card
    assert "| nothing; no passkey to lose |" in card
    assert "passkeys 160 | 200 | lost |" in card and "and 4 passkey prompts of each." in card
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


def test_a_check_counts_what_is_found_and_lost(source, tmp_path, capsys, monkeypatch):
    """Of a model that finds all within L, and with a limit most beyond, but for W = L / 4."""

    def answers(model, tokenizer, prompts, **_):
        limit = rope_parameters(model.config).get("max_distance")
        known = {(128, None): 4, (168, None): 0, (128, 40): 3, (168, 80): 3, (168, 120): 2}
        share = known.get((prompts.shape[1], limit), 4 if prompts.shape[1] == 128 else 1)
        texts = [tokenizer.decode(ids) for ids in prompts]
        keys = [re.search(r"passkey is (\d{5})", text)[1] for text in texts]
        return [key if index < share else "" for index, key in enumerate(keys)]

    monkeypatch.setattr("coca_lab.evaluation.retrieval.greedy_answers", answers)
    monkeypatch.setattr("coca_lab.evaluation.limit_check._is_worse", lambda *_: False)
    said, warned, card, limit = convert_with_check(source, tmp_path / "target", capsys)
    assert limit == 80 and "empty" not in warned + card
    rows = [line.split("|")[1:-1] for line in card.splitlines() if re.match(r"\| (base|W =)", line)]
    found = [[cell.strip() for cell in (row[0], *row[3:])] for row in rows]
    assert found == [
        ["base", "4", "0", ""],
        ["W = 160", "4", "1", "nothing"],
        ["W = 120", "4", "2", "nothing"],
        ["W = 80 (chosen)", "4", "3", "nothing"],
        ["W = 40", "3", "1", "passkeys"],
    ]
    assert re.search(r"W = 40 .* 3 +1 +passkeys", said)


@pytest.mark.parametrize(
    "more",
    [["--roles.layers", "lg"], ["--max-distance", "8"], ["--from-original"], ["--form", "strict"]],
)
def test_a_check_is_refused_where_it_chooses_nothing(more, source, tmp_path, capsys):
    words = ["convert", str(source), str(tmp_path / "target"), "--form", "rope", *more]
    assert main([*words, "--check", "stdlib"]) == 2
    assert "it is for --form rope without" in capsys.readouterr().err
