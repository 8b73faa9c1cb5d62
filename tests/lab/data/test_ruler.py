"""RULER's tasks: their wording, their exact lengths, and their scores."""

import json
import re
import string
from collections import Counter
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from coca_attention.errors import UserError
from coca_lab.data import Document, read_documents, train_tokenizer
from coca_lab.data.ruler import (
    ANSWER_TOKENS,
    NOISE,
    RULER_TASKS,
    Draft,
    ask_for_ruler,
    fit_haystack,
    string_match,
    word_lists,
)
from coca_lab.evaluation import MethodSettings, Model, evaluate
from coca_lab.evaluation.prompts import RULER_TASK, RulerSettings
from conftest import tiny_model
from covering import mostly_slow

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
NAMES = ["bytes", "byte-level", "byte-level, chat", "sentencepiece", "sentencepiece, chat"]


@pytest.fixture(scope="module")
def texts():
    prose = [document.text for document, _ in zip(read_documents("stdlib"), range(3), strict=False)]
    return [
        *prose,
        " ".join(word for words in word_lists() for word in words),
        NOISE * 20,
        string.printable,
    ]


@pytest.fixture(scope="module")
def filler(texts):
    return texts[1]


def sentencepiece(texts, kind, template=None):
    """A tokenizer like Llama's: words begin with a mark, and <s> is put before every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True) if kind == "bpe" else models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "bpe" else []
    more = {} if kind == "bpe" else {"unk_token": "<unk>"}
    trainer = {"bpe": trainers.BpeTrainer, "unigram": trainers.UnigramTrainer}[kind](
        vocab_size=2000, special_tokens=[*special, *fallback], show_progress=False, **more
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(texts):
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    chat = train_tokenizer(documents, 3000)
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat.chat_template = CHATML
    return {
        "bytes": train_tokenizer(documents[:1], 257),
        "byte-level": train_tokenizer(documents, 3000, split_digits=True),
        "byte-level, chat": chat,
        "sentencepiece": sentencepiece(texts, "unigram"),
        "sentencepiece, chat": sentencepiece(texts, "bpe", LLAMA),
    }


@pytest.mark.parametrize(
    ("task", "name"),
    mostly_slow(product(RULER_TASKS, NAMES), zip(RULER_TASKS, cycle(NAMES), strict=False)),
)
def test_prompts_have_exactly_the_length_asked_for(tokenizers, filler, task, name):
    tokenizer, chat = tokenizers[name], name.endswith("chat")
    least = 8000 if name == "bytes" else 2500
    for length in range(least, least + 3):
        (prompt,) = ask_for_ruler(tokenizer, task, length, [3], filler=filler, chat=chat)
        assert len(prompt.ids) + ANSWER_TOKENS[task] == length
        assert tokenizer(prompt.text)["input_ids"] == prompt.ids
        assert prompt.ids.count(tokenizer.bos_token_id) <= 1
        # Everything that is asked for can be read, behind the introduction and the example.
        assert string_match(prompt.text, prompt.facts["expected"]) == 1


def solved(task: str, prompt: str) -> list[str]:
    """What a reader answers who knows how the tasks are made."""
    if task.startswith("niah"):
        facts = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
        asked = re.search(r"What .* special magic \w+ for (.*) mentioned in", prompt)[1]
        keys = re.split(r", and |, ", asked)
        return [value for key in keys for name, value in facts if name == key]
    if task == "vt":
        value = re.findall(r"are assigned the value (\d+), they are: $", prompt)[0]
        found = re.findall(rf"VAR (\w+) = {value}\n", prompt)
        for name, other in re.findall(r"VAR (\w+) = VAR (\w+) ", prompt):
            found += [name] * (other in found)
        return found
    if task == "cwe":
        listed = prompt.rpartition("Below is")[2].partition("\nQuestion")[0]
        counts = Counter(re.findall(r"\d+\. (\S+)", listed))
        return [word for word, _ in counts.most_common(10)]
    coded = prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    counts = Counter(word for word in coded.split() if word.strip("."))
    return [word for word, _ in counts.most_common(3)]


def test_a_length_that_no_end_of_one_text_has_is_that_of_another():
    def encode(text):
        return [0] * (2 * text.count("\n") + text.count(" VAR"))

    draft = Draft("x\n", lambda units: "VAR" + "\n" * units, "", "", ["VAR"], rest=NOISE + "\n")
    text, ids = fit_haystack(encode, draft, draft.before, draft.after, 41)
    assert len(ids) == len(encode(text)) == 41


@pytest.mark.parametrize(
    ("task", "length"),
    mostly_slow(product(RULER_TASKS, [2500, 4500]), product(RULER_TASKS, [2500])),
)
def test_what_is_expected_can_be_read_and_nothing_else_is_as_right(
    tokenizers, filler, task, length
):
    prompts = ask_for_ruler(tokenizers["byte-level"], task, length, range(4), filler=filler)
    for prompt in prompts:
        assert sorted(solved(task, prompt.text)) == sorted(prompt.facts["expected"])
        assert string_match(" ".join(solved(task, prompt.text)), prompt.facts["expected"]) == 1
    first, *others = [prompt.facts["expected"] for prompt in prompts]
    assert all(string_match(" ".join(other), first) < 0.4 for other in others)


def goldens(tokenizer) -> str:
    """The first prompt of every task, nearly as short as can be, in tokens that are bytes."""
    text, parts = "One two three. Four five six! Seven eight? ", []
    for task in RULER_TASKS:
        with pytest.raises(UserError, match="tokens more") as caught:
            ask_for_ruler(tokenizer, task, 100, [0], filler=text)
        length = 230 + int(re.search(r"take (\d+) tokens more", str(caught.value))[1])
        (prompt,) = ask_for_ruler(tokenizer, task, length, [0], filler=text)
        expected = ", ".join(prompt.facts["expected"])
        parts.append(f"# {task}, {length} tokens; expected: {expected}\n{prompt.text}|\n")
    return "\n".join(parts)


def test_prompts_read_like_rulers(tokenizers):
    """They were compared with the templates and the code of RULER by hand; | is their end."""
    written = Path(__file__).with_name("ruler.txt").read_text(encoding="utf-8")
    assert goldens(tokenizers["bytes"]) == written


def test_a_score_is_the_share_of_the_expected_strings_in_an_answer():
    assert string_match(" 1234567.", ["1234567"]) == 1
    assert string_match("ABCDE, fghij and XYZ", ["abcde", "FGHIJ", "KLMNO", "PQRST"]) == 0.5
    assert string_match("", ["1234567"]) == 0


@pytest.mark.parametrize("task", mostly_slow(RULER_TASKS, ["niah_multivalue", "vt", "fwe"]))
def test_prompts_depend_on_seed_length_and_index_alone(tokenizers, filler, task):
    def ask(length=2600, indices=(5,), **changes):
        return ask_for_ruler(tokenizers["byte-level"], task, length, indices, **changes)[-1]

    assert ask() == ask(indices=[1, 5])
    expected = ask().facts["expected"]
    for other in (ask(seed=1), ask(length=2601), ask(indices=[6])):
        assert other.facts["expected"] != expected
    assert ask(filler=filler).facts["expected"] == expected


def test_no_word_is_in_another_one():
    words = [word for part in word_lists() for word in part]
    assert len(words) > 2000 and max(Counter(words).values()) == 1
    text = "\n".join(words)
    assert [word for word in words if len(re.findall(word, text)) > 1] == []


class Reader(LlamaForCausalLM):
    """A model that answers what `solved` finds in its prompt."""

    tokenizer, task, asked = None, "", 0

    def forward(self, input_ids=None, **kwargs):
        logits = torch.zeros(len(input_ids), 1, len(self.tokenizer))
        for row, ids in enumerate(input_ids.tolist()):
            start = self.asked - ANSWER_TOKENS[self.task]
            said, prompt = self.tokenizer.decode(ids[start:]), self.tokenizer.decode(ids[:start])
            left = (" " + " ".join(solved(self.task, prompt)))[len(said) :]
            logits[row, 0, self.tokenizer(left)["input_ids"][0] if left else 0] = 1.0
        return CausalLMOutputWithPast(logits=logits)


def test_a_reader_has_every_point(tokenizers, text_folder):
    tokenizer = tokenizers["byte-level"]
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1,
                         num_attention_heads=1, intermediate_size=8, eos_token_id=0)  # fmt: skip
    model = Reader(config).eval()
    model.tokenizer, model.asked = tokenizer, 3000
    for model.task in RULER_TASKS:
        wanted = RulerSettings([3000], kinds=[model.task], samples=2, source=str(text_folder),
                               use_cache=False)  # fmt: skip
        (cell,) = evaluate(RULER_TASK, Model(model, tokenizer), wanted)
        assert (cell["task"], cell["kind"], cell["length"]) == ("ruler", model.task, 3000)
        assert cell["score"] == 1, cell["samples"]
        assert [len(cell["samples"]), cell["samples"][0]["index"]] == [2, 0]
        json.dumps(cell, allow_nan=False)


def test_a_prompt_does_not_depend_on_the_other_lengths(tokenizers, text_folder):
    model = tiny_model("llama-rope")
    model.resize_token_embeddings(len(tokenizers["byte-level"]))
    model = Model(model, tokenizers["byte-level"])
    same = {"kinds": ["niah_multikey_1"], "samples": 1, "source": str(text_folder)}
    (alone,), both = (
        [measured.items[0].keys for measured in RULER_TASK.measure(model, wanted, MethodSettings())]
        for wanted in (RulerSettings([1500], **same), RulerSettings([3000, 1500], **same))
    )
    assert alone == both[1] != both[0]
