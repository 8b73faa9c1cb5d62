"""Prompts with passkeys and of RULER's tasks, and models whose answers are known."""

import json
import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from coca_lab.data import Document, train_tokenizer
from coca_lab.data.tasks import (
    FILLER,
    PASSKEY_QUESTION,
    ask_for_passkeys,
    encoder,
    is_hit,
    leading_special_tokens,
    passkey_block,
    passkey_text,
    vocabulary_text,
)
from coca_lab.data.text import END_OF_TEXT
from coca_lab.evaluation import MethodSettings, Model, evaluate
from coca_lab.evaluation.prompts import PASSKEY_TASK, RULER_TASK, PasskeySettings
from coca_lab.generation import greedy_answers
from coca_lab.options import checked
from coca_lab.recipe import Recipe
from coca_lab.training.retrieval import load_retrieval
from coca_lab.training.texts import TaskBlocks
from conftest import tiny_model


@pytest.fixture(scope="module")
def words():
    """A tokenizer trained on the words of the tasks, one token per digit."""
    texts = [Document("a", FILLER * 20), Document("b", vocabulary_text())]
    return train_tokenizer(texts, 900, split_digits=True)


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


def test_samples_depend_on_seed_and_length_alone(words):
    def secrets(length=300, **changes):
        prompts = ask_for_passkeys(words, length, range(20), **changes)
        return [prompt.facts["key"] for prompt in prompts]

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
    cells = evaluate(PASSKEY_TASK, Model(model, words), wanted)
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
        (cell,) = evaluate(
            PASSKEY_TASK, Model(model, tokenizer), wanted, MethodSettings("ntk_text")
        )
        assert cell["rope_parameters"]["length"] == 306 and model.config.rope_parameters == before
        return [record["output"] for record in cell["samples"]]

    plain = outputs(batch_tokens=1)
    assert len(set(plain)) > 1
    assert outputs(batch_tokens=8 * 300) == plain
    assert outputs(batch_tokens=8 * 300, use_cache=False) == plain
    assert outputs(seed=1) != plain


def test_answers_are_greedy_whatever_the_models_own_settings_are(tokenizer):
    model = tiny_model("llama-slack")
    ids = torch.tensor([prompt.ids for prompt in ask_for_passkeys(tokenizer, 300, range(4))])
    expected = ids
    for _ in range(8):
        last = model(expected).logits[:, -1]
        expected = torch.cat((expected, last.argmax(-1, keepdim=True)), -1)
    answers = tokenizer.batch_decode(expected[:, 300:], skip_special_tokens=True)
    for own in (
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
        {"suppress_tokens": expected[:, 300].tolist()},
        {"do_sample": True, "temperature": 9.0},
    ):
        model.generation_config = before = GenerationConfig(**own)
        assert greedy_answers(model, tokenizer, ids, max_new_tokens=8) == answers, own
        assert model.generation_config is before


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

    wanted = PasskeySettings(lengths=[300], samples=1, max_new_tokens=3)
    assert not reminded(evaluate, PASSKEY_TASK, Model(model, words), wanted)
    validation = {"every": 1, "passkeys": 1, "lengths": [300]}
    training = load_retrieval(checked(Recipe, {"validation": validation}), words)
    assert not reminded(training.shares, model)
    plain = partial(model.generate, max_new_tokens=5, do_sample=False)
    assert reminded(plain, torch.ones(1, 40, dtype=torch.long))
    log.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (PASSKEY_TASK, {"lengths": []}, "lengths: .* at least 1 item"),
        (PASSKEY_TASK, {"lengths": [10**8]}, "lengths: .* less than or equal to 10000000"),
        (PASSKEY_TASK, {"samples": 0}, "samples: .* greater than 0"),
        (PASSKEY_TASK, {"depths": 0}, "depths: .* greater than 0"),
        (PASSKEY_TASK, {"lengths": [30]}, "too short: without any filler it needs"),
        (RULER_TASK, {"kinds": ["double"]}, "kinds: .* 'niah_single_1', 'niah_single_2'"),
        (
            RULER_TASK,
            {"lengths": [30], "kinds": ["vt"]},
            "vt of 30 tokens: too short: the answer and a prompt with",
        ),
        (RULER_TASK, {"chat": True, "kinds": ["vt"]}, "the tokenizer has no chat template: ask"),
        (RULER_TASK, {"source": "nowhere"}, "nowhere: no such file"),
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
    with pytest.raises(ValueError, match="turns '59426' into '#####', so no answer could be"):
        ask_for_passkeys(Other(words, encoded=lambda text: re.sub(r"\d", "#", text)), 300, [0])
    assert ask_for_passkeys(Other(words, decoded=str.upper), 300, [0])

    limited = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(words), n_positions=64, n_embd=8, n_layer=1, n_head=1,
                   bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"cannot read 364 tokens at once .* 64: use shorter"):
        evaluate(PASSKEY_TASK, Model(limited, words), PasskeySettings(lengths=[300], samples=1))


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
    with pytest.raises(ValueError, match="choose a `block_length` of at least"):
        TaskBlocks("passkey", words, 60, 5, 0)
