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
from coca_lab.intervals import DocumentScore, perplexity
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
    found = {n: perplexity(s) for n, s in scores.items()}
    return Measured(limit, scores, found, dict(zip(scores, hits, strict=True)))


BASE, SAFE = measured(None, (50, 0)), measured(L, (50, 3))


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([measured(128, (50, 40))], 128),
        ([measured(128, (49, 50))], L),  # a passkey is lost within L
        ([measured(128, (50, 40), nats=0.01)], L),  # every document is worse within L
        ([measured(128, (50, 40), nats=-0.01)], 128),
        ([measured(192, (50, 40)), measured(128, (50, 40), beyond=-0.1)], 128),
        ([measured(192, (50, 40)), measured(128, (50, 30), beyond=-0.1)], 192),
    ],
)
def test_the_best_limit_that_loses_nothing_within_the_training_length_is_chosen(others, chosen):
    assert LimitCheck(L, BASE, [SAFE, *others], "").chosen.max_distance == chosen


def test_where_the_base_finds_no_passkey_nothing_less_than_the_training_length_is_chosen():
    blind = measured(None, (0, 0))
    others = [measured(L, (0, 0)), measured(128, (0, 9), beyond=-0.5)]
    check = LimitCheck(L, blind, others, "")
    assert check.chosen.max_distance == L and "half of the check was empty" in check.markdown()
    assert [row[-1] for row in check.table()[1]] == ["", *["nothing; no passkey to lose"] * 2]


def test_the_table_says_what_is_lost():
    check = LimitCheck(L, BASE, [SAFE, measured(128, (49, 50), nats=0.01)], "On a text")
    header, rows = check.table()
    assert header[0] == "" and header[-1] == "lost" and len(header) == 6
    assert [row[0] for row in rows] == ["base", "W = 256 (chosen)", "W = 128"]
    assert [row[-1] for row in rows] == ["", "nothing", "perplexity, passkeys"]
    assert "| W = 128 |" in check.markdown() and "On a text. " in check.markdown()
    assert "empty" not in check.markdown()


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


def test_coca_convert_measures_prints_and_writes_the_card(source, tmp_path, capsys):
    words = ["convert", str(source), str(tmp_path / "target"), "--form", "rope"]
    words += [
        "--check",
        str(source.parent / "text"),
        "--check-samples",
        "2",
        "--check-lengths",
        "[200]",
    ]
    assert main(words) == 0
    said, warned = capsys.readouterr()
    assert "warning: The model finds no passkey in texts of up to L = 160 tokens" in warned
    assert "predefined maximum length" not in warned
    card = (tmp_path / "target/README.md").read_text()
    assert re.search(r"W = 160 \(chosen\) .*nothing", said) and re.search(r"W = 40 ", said)
    assert "## Limit of distances" in card and "| W = 160 (chosen) |" in card
    assert "passkeys 160 | 200 |" in card and "and 2 passkey prompts of each." in card
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "target").config
    assert rope_parameters(config)["max_distance"] == 160
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    "more",
    [["--roles.layers", "lg"], ["--max-distance", "8"], ["--from-original"], ["--form", "strict"]],
)
def test_a_check_is_refused_where_it_chooses_nothing(more, source, tmp_path, capsys):
    words = ["convert", str(source), str(tmp_path / "target"), "--form", "rope", *more]
    assert main([*words, "--check", "stdlib"]) == 2
    assert "it is for --form rope without" in capsys.readouterr().err
