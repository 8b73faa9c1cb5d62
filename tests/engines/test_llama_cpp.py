"""Exported models in llama.cpp as its authors publish it, beside Transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_attention.testing import difference, logits, some_tokens
from coca_lab.data.tasks import ask_for_passkeys
from coca_lab.export.llama_cpp import log_probabilities, serve
from commands import post
from conftest import some_text
from natives import KINDS, VOCABULARY, answered_passkeys, exported, made, saved

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp as its authors publish it")
pytestmark = pytest.mark.slow
TRAINED = Path(__file__).parents[2] / "runs" / "native-1m"
CONTEXT, ANSWER = 16384, 32


def complete(server, ids, tokens):
    """Greedy tokens after a prompt; never the end of the text."""
    options = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
    address = f"{server.listening_address}/completion"
    return post(address, prompt=ids, n_predict=tokens, **options)["tokens"]


def assert_greedy(model, server, ids, tokens, end):
    """Tokens that llama.cpp chooses have the largest logits in Transformers, within round-off."""
    answer = complete(server, ids, tokens)
    read = logits(model, torch.tensor([ids + answer]))[0, len(ids) - 1 : -1]
    # llama.cpp ignores the end of a text, which is the model's as well as the tokenizer's.
    read[:, [end, model.generation_config.eos_token_id]] = -torch.inf
    chosen = read.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert len(answer) == tokens
    assert (read.max(1).values - chosen).max() < 1e-3 * read.max()


@pytest.fixture(scope="module", params=KINDS)
def native(request, tmp_path_factory):
    """A random model in llama.cpp, and in Transformers, for texts of 1,024 tokens."""
    folder = tmp_path_factory.mktemp("models")
    source = saved(made(request.param), folder / "model")
    target = exported(source, folder / "to", "--gguf", "--context", "1024")
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    return serve(target / "to.gguf", 1024), model, AutoTokenizer.from_pretrained(target)


def test_the_same_probabilities_and_greedy_text(native):
    server, model, tokenizer = native
    (letter,) = tokenizer("a").input_ids
    for length in (5, 6, 7, 40, 100, 600):
        (ids,) = some_tokens(model, batch=1, length=length).tolist()
        found = log_probabilities(server, ids, VOCABULARY, letter)
        expected = logits(model, torch.tensor([ids]))[0, -1].log_softmax(-1)
        assert difference(found, expected) < 1e-3
        assert_greedy(model, server, ids, 20, tokenizer.eos_token_id)


def test_text_is_split_alike(native):
    server, _, tokenizer = native
    texts = [
        "alpha1 beta23  gamma\n\n\tdelta 2024.",
        "don't I'll x=-1.5e-3; ünïcödé ½ ² ١٢٣ 漢字 🙂 ",
        some_text(50),
        tokenizer.eos_token + "a" + tokenizer.eos_token,
    ]
    for text in texts:
        address = f"{server.listening_address}/tokenize"
        found = post(address, content=text, parse_special=True)["tokens"]
        assert found == tokenizer(text).input_ids, text


@pytest.mark.skipif(not TRAINED.is_dir(), reason="needs coca train recipes/native-1m.yaml")
def test_the_trained_model_finds_passkeys_64_times_farther(tmp_path):
    target = exported(TRAINED, tmp_path / "native", "--gguf", "--context", str(CONTEXT))
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    server = serve(target / "native.gguf", CONTEXT)
    for prompt in ask_for_passkeys(tokenizer, 256, range(20), seed=1):
        assert_greedy(model, server, prompt.ids, 20, tokenizer.eos_token_id)
    for length in (256, 4096, CONTEXT - ANSWER - 2):
        output = tmp_path / f"{length}.json"
        records = answered_passkeys(target, length, 20, output, server.listening_address)
        assert sum(each["hit"] for each in records) >= 19, f"at {length:,} tokens"
