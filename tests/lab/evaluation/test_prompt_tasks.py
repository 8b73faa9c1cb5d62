"""Prompts with passkeys and needles, and models whose answers are known."""

import json
import logging
import re
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from coca_lab.arguments import checked
from coca_lab.data import Document, train_tokenizer
from coca_lab.data.blocks import TaskBlocks
from coca_lab.data.tasks import (
    FACT,
    FILLER,
    KINDS,
    NAMES,
    NEEDLE_INTRODUCTION,
    PASSKEY_QUESTION,
    QUESTIONS,
    ask_for_needles,
    ask_for_passkeys,
    encoder,
    fill,
    is_hit,
    leading_special_tokens,
    needle_text,
    passkey_block,
    passkey_text,
    r_precision,
    vocabulary_text,
)
from coca_lab.data.text import END_OF_TEXT
from coca_lab.evaluation import Model, RotaryScaling, evaluate
from coca_lab.evaluation.retrieval import NEEDLES, PASSKEYS, NeedleSettings, PasskeySettings
from coca_lab.recipe import Recipe
from coca_lab.training.retrieval import load_retrieval
from conftest import tiny_model


@pytest.fixture(scope="module")
def words():
    """A tokenizer trained on the words of the tasks, one token per digit."""
    facts = " ".join(FACT.format(name=name, value=1234567890) for name in NAMES)
    parts = [facts, FILLER * 20, NEEDLE_INTRODUCTION * 20, *(q * 20 for q in QUESTIONS.values())]
    texts = [Document("a", "".join(parts)), Document("b", vocabulary_text())]
    return train_tokenizer(texts, 900, split_digits=True)


@given(
    length=st.integers(0, 400),
    before=st.integers(0, 9),
    filler=st.integers(1, 30),
    needles=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=5),
    after=st.integers(0, 9),
)
@settings(max_examples=200)
def test_every_length_is_hit_exactly_and_every_needle_is_whole(
    length, before, filler, needles, after
):
    texts = [[100 + i] * size for i, (size, _) in enumerate(needles)]
    needed = before + sum(map(len, texts)) + after
    arguments = ([1] * before, list(range(10, 10 + filler)), texts,
                 [depth for _, depth in needles], [2] * after, length)  # fmt: skip
    if length < needed:
        with pytest.raises(ValueError, match=f"at least {needed}"):
            fill(*arguments)
        return
    ids, depths, distances = fill(*arguments)
    assert len(ids) == length
    assert ids[:before] == [1] * before and ids[length - after :] == [2] * after
    for index, text in enumerate(texts):
        end = length - distances[index]
        assert ids[end - len(text) : end] == text
        assert 0 <= depths[index] <= 1
    rest = [i for i in ids if 10 <= i < 100]
    repeats, left = divmod(length - needed, filler)
    one = list(range(10, 10 + filler))
    assert rest == (one[filler - left :] if left else []) + one * repeats


@pytest.mark.parametrize("length", [120, 128, 131, 256, 1000])
def test_a_prompt_reads_like_the_papers_listing(words, length):
    encode = encoder(words)
    text = passkey_text(encode, 31337, length, 0.5)
    assert len(text.ids) == length
    written = words.decode(text.ids)
    assert written.startswith("There is an important info hidden inside")
    assert written.count("The passkey is 31337. Remeber it. 31337 is the passkey.\n") == 1
    assert written.endswith(PASSKEY_QUESTION)
    behind = words.decode(text.ids[length - text.facts["distance"] :])
    assert written.endswith("31337 is the passkey.\n" + behind)
    with pytest.raises(ValueError, match="without any filler it needs") as caught:
        passkey_text(encode, 31337, 20, 0.5)
    shortest = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert len(passkey_text(encode, 31337, shortest, 0.5).ids) == shortest
    # Depths run from the first repetition of the filler to the last.
    first, last = (passkey_text(encode, 12345, 900, depth) for depth in (0.0, 1.0))
    assert words.decode(last.ids[900 - last.facts["distance"] :]) == PASSKEY_QUESTION
    assert first.facts["distance"] > 700
    assert (first.facts["depth"], last.facts["depth"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "ask", [ask_for_passkeys, *(partial(ask_for_needles, kind=kind) for kind in KINDS)]
)
def test_samples_depend_on_seed_and_length_alone(words, ask):
    def secrets(length=300, **changes):
        prompts = ask(words, length=length, indices=range(20), **changes)
        return [str(p.facts.get("key") or p.facts["expected"]) for p in prompts]

    assert secrets() == secrets() and len(set(secrets())) > 15
    assert secrets() not in (secrets(seed=1), secrets(length=301))


def test_depths_are_those_of_a_grid(words):
    facts = [prompt.facts for prompt in ask_for_passkeys(words, 900, range(20), depths=3)]
    assert [f["depth"] for f in facts][:6] == pytest.approx([0.0, 0.5, 1.0] * 2, abs=0.05)
    assert all(10_000 <= f["key"] < 100_000 for f in facts)


def test_a_hit_is_the_whole_key_and_the_first_number():
    hits = ["12345", " The passkey is 12345.", "12345 12346"]
    misses = ["1234", "123456", "1", "54321 12345", "", "the passkey is"]
    assert [is_hit(answer, 12345) for answer in hits + misses] == [True] * 3 + [False] * 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [256, 257, 700])
def test_needle_prompts_hold_what_they_ask_for(words, kind, length):
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
            assert len(text.facts["needles"]) == 1
            assert text.facts["expected"] == list(facts.values())
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


class Copier(LlamaForCausalLM):
    """Answers with the key in its prompt, or only its first digits, by construction."""

    tokenizer, known = None, 5

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = torch.zeros_like(output.logits)
        for row, ids in enumerate(input_ids.tolist()):
            prompt, asked, answer = self.tokenizer.decode(ids).partition(PASSKEY_QUESTION)
            assert asked
            key = re.search(r"The passkey is (\d{5})\.", prompt)[1][: self.known]
            left = f" {key}."[len(answer) :]
            following = self.tokenizer(left)["input_ids"][0] if left else 0
            output.logits[row, -1, following] = 10.0
        return output


@pytest.mark.parametrize(("known", "accuracy"), [(5, 1.0), (4, 0.0)])
def test_models_with_a_known_answer(words, known, accuracy):
    config = LlamaConfig(vocab_size=len(words), hidden_size=8, num_hidden_layers=1,
                         num_attention_heads=1, intermediate_size=8, eos_token_id=0)  # fmt: skip
    model = Copier(config).eval()
    model.tokenizer, model.known = words, known
    wanted = PasskeySettings(lengths=[128, 200], samples=5, max_new_tokens=10, use_cache=False)
    cells = evaluate(PASSKEYS, Model(model, words), wanted)
    assert [cell["accuracy"] for cell in cells] == [accuracy, accuracy]
    for cell in cells:
        assert all(r["output"] == f" {str(r['key'])[:known]}." for r in cell["samples"])
    json.dumps(cells, allow_nan=False)


def test_every_kind_is_evaluated_and_recorded(words):
    model = tiny_model("llama-slack")
    model.resize_token_embeddings(len(words))
    settings = NeedleSettings(lengths=[256, 300], samples=2, max_new_tokens=3)
    cells = evaluate(NEEDLES, Model(model, words), settings)
    assert [(c["kind"], c["length"]) for c in cells] == [(k, n) for k in KINDS for n in (256, 300)]
    for cell in cells:
        assert 0 <= cell["recall"] <= 1 and len(cell["samples"]) == 2
        assert {"needles", "expected", "depths", "distances", "output"} <= set(cell["samples"][0])


def test_batches_caches_and_evaluations_before_change_nothing(tokenizer):
    """Output texts of a model that says something else for every prompt."""
    model = tiny_model("llama-slack")
    before = dict(model.config.rope_parameters)

    def outputs(**changes):
        wanted = PasskeySettings([300], samples=6, max_new_tokens=6, **changes)
        (cell,) = evaluate(PASSKEYS, Model(model, tokenizer), wanted, RotaryScaling("ntk"))
        assert cell["rope_parameters"]["length"] == 306 and model.config.rope_parameters == before
        return [record["output"] for record in cell["samples"]]

    plain = outputs(batch_tokens=1)
    assert len(set(plain)) > 1
    assert outputs(batch_tokens=8 * 300) == plain
    assert outputs(batch_tokens=8 * 300, use_cache=False) == plain
    assert outputs(seed=1) != plain


def test_reading_beyond_the_training_length_on_purpose_prints_no_reminder(words, caplog):
    """Neither in an evaluation nor in a training; Transformers prints one a process."""
    log = logging.getLogger("transformers.generation.stopping_criteria")
    log.addHandler(caplog.handler)
    model = tiny_model("slack")
    model.resize_token_embeddings(len(words))

    def reminded(read, *arguments):
        log.warning_once.__func__.cache_clear()
        caplog.clear()
        read(*arguments)
        return "predefined maximum length" in caplog.text

    for task in (PASSKEYS, NEEDLES):
        wanted = task.settings(lengths=[300], samples=1, max_new_tokens=3)
        assert not reminded(evaluate, task, Model(model, words), wanted)
    validation = {"every": 1, "passkeys": 1, "needles": 1, "lengths": [300]}
    training = load_retrieval(checked(Recipe, {"validation": validation}), words)
    assert not reminded(training.shares, model)
    plain = partial(model.generate, max_new_tokens=5, do_sample=False)
    assert reminded(plain, torch.ones(1, 40, dtype=torch.long))
    log.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (PASSKEYS, {"lengths": []}, "lengths: .* at least 1 item"),
        (PASSKEYS, {"lengths": [10**8]}, "lengths.0: .* less than or equal to 10000000"),
        (PASSKEYS, {"samples": 0}, "samples: .* greater than 0"),
        (PASSKEYS, {"depths": 0}, "depths: .* greater than 0"),
        (PASSKEYS, {"lengths": [30]}, "too short: without any filler it needs"),
        (NEEDLES, {"kinds": ["double"]}, "kinds.0: .* 'single', 'multi-key'"),
        (NEEDLES, {"count": 100}, "count: .* less than or equal to 60"),
        (NEEDLES, {"lengths": [30]}, "at least"),
    ],
)
def test_settings_out_of_range_are_refused(task, changes, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        evaluate(task, Model(tiny_model("rope"), tokenizer), task.settings(**changes))


class Other:
    """A tokenizer that adds a token at the beginning, or that changes the text."""

    def __init__(self, tokenizer, before=(), encoded=str, decoded=str):
        self.tokenizer, self.before = tokenizer, [*before]
        self.encoded, self.decoded = encoded, decoded

    def __call__(self, text, add_special_tokens=True, **_):
        ids = self.tokenizer(self.encoded(text))["input_ids"]
        return {"input_ids": self.before + ids if add_special_tokens else ids}

    def decode(self, ids):
        return self.decoded(self.tokenizer.decode(ids))


def test_special_tokens_at_the_beginning_count(words):
    assert leading_special_tokens(words) == []
    with_start = Other(words, before=[7])  # as Llama's
    assert leading_special_tokens(with_start) == [7]
    prompt = ask_for_passkeys(with_start, 256, [0])[0]
    assert prompt.ids[0] == 7 and len(prompt.ids) == 256


def test_unfit_tokenizers_and_models_are_refused(words):
    with pytest.raises(ValueError, match="does not reproduce names and digits"):
        ask_for_passkeys(Other(words, encoded=lambda text: re.sub(r"\d", "#", text)), 300, [0])
    with pytest.raises(ValueError, match="does not reproduce names and digits"):
        ask_for_needles(Other(words, decoded=str.upper), "single", 900, [0])

    limited = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(words), n_positions=64, n_embd=8, n_layer=1, n_head=1,
                   bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"cannot read 364 tokens at once .* 64: use shorter"):
        evaluate(PASSKEYS, Model(limited, words), PasskeySettings(lengths=[300], samples=1))


def test_training_blocks_hold_questions_answers_and_ends_at_any_place(words):
    blocks = TaskBlocks("passkey", words, 400, 40, 3)
    assert len(blocks) == 40
    texts, places = set(), set()
    for index in range(40):
        item = blocks[index]
        assert item["input_ids"].shape == item["shift_labels"].shape == (400,)
        assert torch.equal(item["input_ids"][1:], item["shift_labels"][:-1])
        text = words.decode([*item["input_ids"], item["shift_labels"][-1]])
        whole = text.split(END_OF_TEXT)[:-1]
        assert whole
        for document in whole:
            key = re.search(r"The passkey is (\d{5})\. Remeber it", document)[1]
            assert document.startswith("There is an important info")
            assert document.endswith(f"What is the passkey? The passkey is {key}.")
        ends = (item["input_ids"] == words.eos_token_id).nonzero()
        places.add(ends[0].item() if len(ends) else 400)
        texts.add(text)
    assert len(texts) == 40 and len(places) > 30
    again = passkey_block(encoder(words), words.eos_token_id, 401, (3, 7))
    assert np.array_equal(again[:-1], blocks[7]["input_ids"])
    with pytest.raises(ValueError, match="choose a block_length of at least"):
        TaskBlocks("passkey", words, 60, 5, 0)
