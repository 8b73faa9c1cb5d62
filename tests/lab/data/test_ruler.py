"""RULER's tasks: their wording, their exact lengths, and their scores."""

import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from coca_lab.data import Document, read_documents, train_tokenizer
from coca_lab.data.ruler import (
    ANSWER_TOKENS,
    NOISE,
    RULER_TASKS,
    ask_for_ruler,
    string_match,
    word_lists,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
NAMES = ["bytes", "byte-level", "byte-level, chat", "sentencepiece", "sentencepiece, chat"]


@pytest.fixture(scope="module")
def texts():
    prose = [
        document.text for document, _ in zip(read_documents("stdlib"), range(20), strict=False)
    ]
    return [*prose, " ".join(word for words in word_lists() for word in words), NOISE * 20]


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", RULER_TASKS)
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


def test_a_score_is_the_share_of_the_expected_strings_in_an_answer():
    assert string_match(" 1234567.", ["1234567"]) == 1
    assert string_match("ABCDE, fghij and XYZ", ["abcde", "FGHIJ", "KLMNO", "PQRST"]) == 0.5
    assert string_match("", ["1234567"]) == 0


@pytest.mark.parametrize("task", RULER_TASKS)
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
