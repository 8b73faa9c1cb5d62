"""Passkey prompts of an exact length, and models whose answers are known."""

import json
import logging
import re

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
    PASSKEY_QUESTION,
    ask_for_needles,
    ask_for_passkeys,
    encoder,
    fill,
    is_hit,
    leading_special_tokens,
    passkey_block,
    passkey_text,
    vocabulary_text,
)
from coca_lab.data.text import END_OF_TEXT
from coca_lab.evaluation import Model, RotaryScaling, evaluate
from coca_lab.evaluation.retrieval import NEEDLES, PASSKEYS, PasskeySettings
from coca_lab.training.recipe import Recipe
from coca_lab.training.retrieval import load_retrieval
from conftest import tiny_model


def evaluate_passkey(model, tokenizer, settings, scaling="none", factor=4.0):
    return evaluate(PASSKEYS, Model(model, tokenizer), settings, RotaryScaling(scaling, factor))


@pytest.fixture(scope="module")
def digits():
    """A tokenizer trained on the words of the task, one token per digit."""
    return train_tokenizer([Document("a", vocabulary_text())], 300, split_digits=True)


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
def test_a_prompt_reads_like_the_papers_listing(digits, length):
    encode = encoder(digits)
    text = passkey_text(encode, 31337, length, 0.5)
    assert len(text.ids) == length
    written = digits.decode(text.ids)
    assert written.startswith("There is an important info hidden inside")
    assert written.count("The passkey is 31337. Remeber it. 31337 is the passkey.\n") == 1
    assert written.endswith(PASSKEY_QUESTION)
    behind = digits.decode(text.ids[length - text.facts["distance"] :])
    assert written.endswith("31337 is the passkey.\n" + behind)
    with pytest.raises(ValueError, match="without any filler it needs") as caught:
        passkey_text(encode, 31337, 20, 0.5)
    shortest = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert len(passkey_text(encode, 31337, shortest, 0.5).ids) == shortest
    # Depths run from the first repetition of the filler to the last.
    first, last = (passkey_text(encode, 12345, 900, depth) for depth in (0.0, 1.0))
    assert digits.decode(last.ids[900 - last.facts["distance"] :]) == PASSKEY_QUESTION
    assert first.facts["distance"] > 700
    assert (first.facts["depth"], last.facts["depth"]) == (0.0, 1.0)


def test_samples_depend_on_seed_length_and_tokenizer_alone(digits):
    def facts(length=256, **changes):
        found = ask_for_passkeys(digits, length, range(20), **changes)
        return [prompt.facts for prompt in found]

    assert facts() == facts() != facts(seed=1)
    assert [f["key"] for f in facts()] != [f["key"] for f in facts(length=300)]
    keys = [f["key"] for f in facts()]
    assert all(10_000 <= key < 100_000 for key in keys) and len(set(keys)) > 15
    grid = [f["depth"] for f in facts(length=900, depths=3)]
    assert grid[:6] == pytest.approx([0.0, 0.5, 1.0] * 2, abs=0.05)


def test_a_hit_is_the_whole_key_and_the_first_number():
    hits = ["12345", " The passkey is 12345.", "12345 12346"]
    misses = ["1234", "123456", "1", "54321 12345", "", "the passkey is"]
    assert [is_hit(answer, 12345) for answer in hits + misses] == [True] * 3 + [False] * 6


class Copier(LlamaForCausalLM):
    """Answers with the key in its prompt, or only its first digits, by construction."""

    def answer(self, tokenizer, digits):
        self.tokenizer, self.digits = tokenizer, digits
        return self

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        logits = torch.zeros_like(output.logits)
        for row, ids in enumerate(input_ids.tolist()):
            text = self.tokenizer.decode(ids)
            prompt, asked, answer = text.partition(PASSKEY_QUESTION)
            key = re.search(r"The passkey is (\d{5})\.", prompt)[1][: self.digits]
            wanted = f" {key}."
            left = wanted[len(answer) :]
            following = self.tokenizer(left)["input_ids"][0] if left else 0
            assert asked
            logits[row, -1, following] = 10.0
        output.logits = logits
        return output


@pytest.mark.parametrize(("known", "accuracy"), [(5, 1.0), (4, 0.0)])
def test_models_with_a_known_answer(digits, known, accuracy):
    config = LlamaConfig(vocab_size=len(digits), hidden_size=8, num_hidden_layers=1,
                         num_attention_heads=1, intermediate_size=8, eos_token_id=0)  # fmt: skip
    model = Copier(config).eval().answer(digits, known)
    wanted = PasskeySettings(lengths=[128, 200], samples=5, max_new_tokens=10, use_cache=False)
    cells = evaluate_passkey(model, digits, wanted)
    assert [cell["accuracy"] for cell in cells] == [accuracy, accuracy]
    for cell in cells:
        assert all(r["output"] == f" {str(r['key'])[:known]}." for r in cell["samples"])
    json.dumps(cells, allow_nan=False)


def test_batches_caches_and_evaluations_before_change_nothing(tokenizer):
    """Output texts of a model that says something else for every prompt."""
    model = tiny_model("llama-slack")
    before = dict(model.config.rope_parameters)

    def outputs(**changes):
        wanted = PasskeySettings([300], samples=6, max_new_tokens=6, **changes)
        (cell,) = evaluate_passkey(model, tokenizer, wanted, scaling="ntk")
        assert cell["rope_parameters"]["length"] == 306 and model.config.rope_parameters == before
        return [record["output"] for record in cell["samples"]]

    plain = outputs(batch_tokens=1)
    assert len(set(plain)) > 1
    assert outputs(batch_tokens=8 * 300) == plain
    assert outputs(batch_tokens=8 * 300, use_cache=False) == plain
    assert outputs(seed=1) != plain


@pytest.fixture
def reminders():
    """Transformers' reminders of the training length, of which it prints one a process."""
    log, said = logging.getLogger("transformers.generation.stopping_criteria"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    log.warning_once.__func__.cache_clear()
    yield said
    log.removeHandler(handler)


def validate(model, tokenizer):
    """As a training does."""
    validation = {"every": 1, "passkeys": 1, "needles": 1, "lengths": [300]}
    load_retrieval(checked(Recipe, {"validation": validation}), tokenizer).shares(model)


def measure(task):
    settings = task.settings(lengths=[300], samples=1, max_new_tokens=3)
    return lambda model, tokenizer: evaluate(task, Model(model, tokenizer), settings)


def generate(model, tokenizer):
    model.generate(torch.ones(1, 40, dtype=torch.long), max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize(
    ("read", "expected"),
    [(measure(PASSKEYS), 0), (measure(NEEDLES), 0), (validate, 0), (generate, 1)],
)
def test_reading_beyond_the_training_length_on_purpose_prints_no_reminder(
    read, expected, digits, reminders
):
    model = tiny_model("slack")
    model.resize_token_embeddings(len(digits))
    read(model, digits)
    assert ["predefined maximum length" in text for text in reminders] == [True] * expected


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


def test_special_tokens_at_the_beginning_count(digits):
    assert leading_special_tokens(digits) == []
    with_start = Other(digits, before=[7])  # as Llama's
    assert leading_special_tokens(with_start) == [7]
    prompt = ask_for_passkeys(with_start, 256, [0])[0]
    assert prompt.ids[0] == 7 and len(prompt.ids) == 256


def test_unfit_tokenizers_and_models_are_refused(digits):
    with pytest.raises(ValueError, match="does not reproduce names and digits"):
        ask_for_passkeys(Other(digits, encoded=lambda text: re.sub(r"\d", "#", text)), 300, [0])
    with pytest.raises(ValueError, match="does not reproduce names and digits"):
        ask_for_needles(Other(digits, decoded=str.upper), "single", 900, [0])

    limited = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(digits), n_positions=64, n_embd=8, n_layer=1, n_head=1,
                   bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"cannot read 364 tokens at once .* 64: use shorter"):
        evaluate_passkey(limited, digits, PasskeySettings(lengths=[300], samples=1))


def test_training_blocks_hold_questions_answers_and_ends_at_any_place(digits):
    blocks = TaskBlocks("passkey", digits, 400, 40, 3)
    assert len(blocks) == 40
    texts, places = set(), set()
    for index in range(40):
        item = blocks[index]
        assert item["input_ids"].shape == item["shift_labels"].shape == (400,)
        assert torch.equal(item["input_ids"][1:], item["shift_labels"][:-1])
        text = digits.decode([*item["input_ids"], item["shift_labels"][-1]])
        whole = text.split(END_OF_TEXT)[:-1]
        assert whole
        for document in whole:
            key = re.search(r"The passkey is (\d{5})\. Remeber it", document)[1]
            assert document.startswith("There is an important info")
            assert document.endswith(f"What is the passkey? The passkey is {key}.")
        ends = (item["input_ids"] == digits.eos_token_id).nonzero()
        places.add(ends[0].item() if len(ends) else 400)
        texts.add(text)
    assert len(texts) == 40 and len(places) > 30
    again = passkey_block(encoder(digits), digits.eos_token_id, 401, (3, 7))
    assert np.array_equal(again[:-1], blocks[7]["input_ids"])
    with pytest.raises(ValueError, match="choose a block_length of at least"):
        TaskBlocks("passkey", digits, 60, 5, 0)
