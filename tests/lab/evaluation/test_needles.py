"""Needle prompts of every kind, and their scores."""

import re
import statistics

import pytest

from coca_lab.data import Document, train_tokenizer
from coca_lab.data.tasks import (
    FACT,
    FILLER,
    KINDS,
    NAMES,
    NEEDLE_INTRODUCTION,
    QUESTIONS,
    ask_for_needles,
    encoder,
    needle_text,
    r_precision,
)
from coca_lab.evaluation import Model, evaluate
from coca_lab.evaluation.retrieval import NEEDLES, NeedleSettings
from conftest import tiny_model


@pytest.fixture(scope="module")
def words():
    text = " ".join(FACT.format(name=name, value=1234567890) for name in NAMES)
    parts = [text, FILLER * 20, NEEDLE_INTRODUCTION * 20, *(q * 20 for q in QUESTIONS.values())]
    return train_tokenizer([Document("a", "".join(parts))], 900, split_digits=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [256, 257, 700])
def test_prompts_hold_what_they_ask_for(words, kind, length):
    for index in range(20):
        text = needle_text(encoder(words), kind, length, (index,))
        assert len(text.ids) == length
        written = words.decode(text.ids)
        assert written.startswith(NEEDLE_INTRODUCTION)
        places = [written.index(needle) for needle in text.facts["needles"]]
        for needle, distance in zip(text.facts["needles"], text.facts["distances"], strict=True):
            assert written.count(needle + "\n") == 1
            assert written.endswith(needle + "\n" + words.decode(text.ids[length - distance :]))
        question = written[written.rindex("\n") + 1 :]
        facts = dict(re.findall(r"number of the (\w+) is (\d{5})\.", written))
        if kind == "single":
            assert len(text.facts["needles"]) == 1 and text.facts["expected"] == list(
                facts.values()
            )
        elif kind == "multi-key":
            assert len(set(facts)) == len(text.facts["needles"]) == 4
            asked = re.search(r"number of the (\w+)\?", question)[1]
            assert text.facts["expected"] == [facts[asked]]
        elif kind == "multi-value":
            assert len(facts) == 1 and len(set(text.facts["expected"])) == 4
            assert set(text.facts["expected"]) == set(re.findall(r"is (\d{5})\.", written))
            assert next(iter(facts)) in question
        else:
            assert places == sorted(places)  # a variable is assigned before it is copied
            assert len(text.facts["needles"]) == 8
            assigned = dict(re.findall(r"^([A-Z]{4}) = (\w+)$", written, re.M))
            value = re.search(r"value (\d{5})\?", question)[1]

            def resolved(name, assigned=assigned):
                while name in assigned:
                    name = assigned[name]
                return name

            assert set(text.facts["expected"]) == {n for n in assigned if resolved(n) == value}
            assert len(text.facts["expected"]) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_bytes", [False, True])
def test_too_short_a_length_says_which_would_do(words, kind, by_bytes):
    encode = (lambda text: list(text.encode())) if by_bytes else encoder(words)
    with pytest.raises(ValueError, match="at least") as caught:
        needle_text(encode, kind, 10, (0,))
    shortest = int(re.search(r"at least (\d+)", str(caught.value))[1])
    for length in (shortest, shortest + 1):
        assert len(needle_text(encode, kind, length, (0,)).ids) == length
    with pytest.raises(ValueError, match=f"at least {shortest}"):
        needle_text(encode, kind, shortest - 1, (0,))


def test_samples_depend_on_seed_kind_and_length(words):
    def expected(kind="multi-key", length=300, **changes):
        prompts = ask_for_needles(words, kind, length, range(10), **changes)
        return [prompt.facts["expected"] for prompt in prompts]

    assert expected() == expected() != expected(seed=1)
    assert expected() != expected(kind="single")
    assert expected() != expected(length=301)
    assert len({tuple(e) for e in expected()}) == 10


@pytest.mark.parametrize(
    ("answer", "expected", "share"),
    [
        (" 12345.", ["12345"], 1.0),
        (" 1234", ["12345"], 0.0),
        (" 123456", ["12345"], 0.0),
        ("11111, 22222 and 99999", ["11111", "22222", "33333", "44444"], 0.5),
        ("99999, or 12345", ["12345"], 0.0),
        (" 12345. The number of the tiger is 99999", ["12345"], 1.0),
        ("12345 and 12345", ["12345", "22222"], 0.5),
        ("1. 12345 2. 22222", ["12345", "22222"], 1.0),
        ("ABCD EFGH", ["ABCD", "EFGH"], 1.0),
        ("As I see: EFGH, ABCD.", ["ABCD", "EFGH"], 1.0),
        ("WXYZ ABCD EFGH", ["ABCD", "EFGH"], 0.5),
        ("ABCDE", ["ABCD"], 0.0),
        ("", ["1"], 0.0),
    ],
)
def test_as_many_whole_numbers_or_names_count_as_were_requested(answer, expected, share):
    assert r_precision(answer, expected) == share


@pytest.mark.parametrize(("kind", "chance"), [("multi-key", 1 / 4), ("variables", 1 / 2)])
@pytest.mark.parametrize("length", [340, 1200])
def test_a_list_of_everything_in_the_text_scores_as_chance_does(kind, chance, length):
    """Also where there is no filler between the facts."""

    def encode(text):
        return list(text.encode())

    scores = []
    for index in range(400):
        text = needle_text(encode, kind, length, (index,))
        written = bytes(text.ids).decode()
        scores.append(r_precision(written[: written.rindex("\n")], text.facts["expected"]))
    assert statistics.fmean(scores) == pytest.approx(chance, abs=0.06)


def test_every_kind_is_evaluated_and_recorded(words):
    model = tiny_model("llama-slack")
    model.resize_token_embeddings(len(words))
    settings = NeedleSettings(lengths=[256, 300], samples=2, max_new_tokens=3)
    cells = evaluate(NEEDLES, Model(model, words), settings)
    assert [(c["kind"], c["length"]) for c in cells] == [(k, n) for k in KINDS for n in (256, 300)]
    for cell in cells:
        assert 0 <= cell["recall"] <= 1 and len(cell["samples"]) == 2
        assert {"needles", "expected", "depths", "distances", "output"} <= set(cell["samples"][0])
