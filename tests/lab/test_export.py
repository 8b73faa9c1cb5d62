"""Layers with roles as GraniteSWA: the same logits without this package, and in llama.cpp."""

import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteSWAForCausalLM

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from coca_lab.export import as_native, fold_context
from coca_lab.loading import load_model
from commands import post
from conftest import some_text
from families import vanilla

LENGTH = 64
ROLES = Roles("llg", window=6, temperature=False, decay=0.0)


def roles(**changes):
    """A Llama with roles whose vocabulary is that of the folder's tokenizer."""
    llama = vanilla("Llama", num_hidden_layers=3, vocab_size=300, **changes)
    return convert(llama, "rope", roles=ROLES)


@pytest.fixture(scope="module", params=["roles", "roles with biases", "granite with sinks"])
def folder(request, tmp_path_factory):
    """A model's folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    model = roles(**(biased if "biases" in request.param else {}))
    if "granite" in request.param:
        model = as_native(model)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    model.save_pretrained(folder)
    text = some_text(3000) + " 12345 ünï,  '' \n\n\t don't 7"
    train_tokenizer([Document("a", text)], 300, split_digits=True).save_pretrained(folder)
    return folder


def exported(folder, target, *options):
    assert main(["export", str(folder), str(target), *options]) == 0
    return target


def test_folder_computes_the_same_by_transformers_own_class(folder, tmp_path):
    target = exported(folder, tmp_path / "native")
    ours, theirs = load_model(folder), AutoModelForCausalLM.from_pretrained(target).eval()
    assert type(theirs) is GraniteSWAForCausalLM
    ids = some_tokens(ours, length=40)
    assert difference(logits(theirs, ids), logits(ours, ids)) < 1e-5
    assert AutoTokenizer.from_pretrained(target)("a1").input_ids
    assert json.loads((target / "config.json").read_text())["no_rope_layers"] == [1, 1, 0]
    # The control: with the class's own sinks, logits differ.
    for layer in theirs.model.layers:
        torch.nn.init.zeros_(layer.self_attn.sinks)
    assert difference(logits(theirs, ids), logits(ours, ids)) > 1e-2


def test_folder_needs_transformers_alone(tmp_path):
    """In a process in which this package cannot be imported."""
    roles().save_pretrained(tmp_path / "model")
    target = exported(tmp_path / "model", tmp_path / "native")
    program = (
        "import sys; sys.modules.update({'coca_attention': None, 'coca_lab': None})\n"
        "import torch; from transformers import AutoModelForCausalLM as A\n"
        "print(A.from_pretrained(sys.argv[1])(torch.arange(40)[None]).logits.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", program, target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(target)(torch.arange(40)[None]).logits
    assert float(done.stdout) == pytest.approx(expected.sum().item(), rel=1e-4)


def test_context_is_folded_into_global_scores():
    native, scaled = as_native(roles()), as_native(roles())
    factor = fold_context(native, 4 * LENGTH)
    assert factor == math.log(4 * LENGTH + 1) / math.log(LENGTH + 1)
    ids = some_tokens(native, length=40)
    scaled.model.layers[2].self_attn.scaling *= factor
    assert difference(logits(native, ids), logits(scaled, ids)) < 1e-5
    assert difference(logits(native, ids), logits(as_native(roles()), ids)) > 1e-3
    assert native.config.max_position_embeddings == 4 * LENGTH
    # Once more, from the context that it has now.
    fold_context(native, 16 * LENGTH)
    scaled.model.layers[2].self_attn.scaling *= math.log(16 * LENGTH + 1) / math.log(4 * LENGTH + 1)
    assert difference(logits(native, ids), logits(scaled, ids)) < 1e-5
    with pytest.raises(UserError, match="at least"):
        fold_context(native, LENGTH)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: convert(vanilla("Llama"), "rope", roles=Roles("lg", decay=0.0)), "a temperature"),
        (lambda: convert(vanilla("Llama"), "rope", roles=Roles("lg", temperature=False)), "decay"),
        (lambda: convert(vanilla("Llama"), roles=Roles("lg", decay=0.0)), "strict|slack"),
        (lambda: convert(vanilla("Llama"), "rope"), "local and global layers"),
        (lambda: vanilla("Llama"), "local and global layers"),
    ],
)
def test_others_are_refused(model, reason):
    with pytest.raises(UserError, match=reason):
        as_native(model())


def test_cost_is_measured(folder, text_folder, tmp_path, capsys):
    exported(folder, tmp_path / "to", "--context", "1024", "--source", f"{text_folder}/*.txt")
    printed = capsys.readouterr().out
    assert "for 1,024 tokens: perplexity within 64" in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    assert isinstance(model, GraniteSWAForCausalLM)
    assert model.config.max_position_embeddings == 1024
    card = (tmp_path / "to" / "README.md").read_text()
    assert "scaled for texts of 1,024 tokens" in card and "import coca_attention" not in card
    exported(folder, tmp_path / "other", "--context", "1024")
    assert "not measured" in capsys.readouterr().out


@pytest.fixture(scope="module")
def native(folder, tmp_path_factory):
    """The model's folder for other engines, for texts of 1,024 tokens, with a file."""
    pytest.importorskip("gguf")
    target = tmp_path_factory.mktemp("exported") / "native"
    return exported(folder, target, "--gguf", "--context", "1024")


def test_file_has_settings_tensors_and_tokenizer(native):
    import gguf

    reader = gguf.GGUFReader(native / "native.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: torch.tensor(t.data) for t in reader.tensors}
    model = AutoModelForCausalLM.from_pretrained(native)
    assert fields["general.architecture"] == "granite_swa"
    assert fields["granite_swa.attention.rope_pattern"] == [True, True, False]
    assert fields["granite_swa.attention.sliding_window_pattern"] == [True, True, False]
    assert fields["granite_swa.context_length"] == 1024
    layers = model.model.layers
    assert torch.equal(tensors["blk.2.attn_q.weight"], layers[2].self_attn.q_proj.weight)
    assert torch.equal(tensors["blk.1.attn_sinks.weight"], layers[1].self_attn.sinks)
    # Rows that turn together are neighbours: 0 and 4 of the first head of width 8.
    local, ours = tensors["blk.0.attn_k.weight"], layers[0].self_attn.k_proj.weight
    assert torch.equal(local[:2], ours[[0, 4]])
    assert not torch.equal(local, ours)
    vocabulary = AutoTokenizer.from_pretrained(native).get_vocab()
    assert [vocabulary[token] for token in fields["tokenizer.ggml.tokens"]] == list(range(300))
    assert fields["tokenizer.ggml.pre"] == "smollm"
    expected = sum(1 for name, _ in model.named_parameters() if name != "lm_head.weight")
    expected += not model.config.tie_word_embeddings
    assert len(tensors) == expected


@pytest.fixture(scope="module")
def llama_cpp(native):
    """The model in llama.cpp, and in Transformers."""
    pytest.importorskip("xllamacpp", reason="llama.cpp as its authors publish it")
    from studies.native.llama_cpp import serve

    model = AutoModelForCausalLM.from_pretrained(native).eval()
    return serve(native / "native.gguf", 1024), model, AutoTokenizer.from_pretrained(native)


def test_llama_cpp_computes_the_same(llama_cpp):
    from studies.native.llama_cpp import complete, log_probabilities

    server, model, tokenizer = llama_cpp
    compared = 0
    for length in (5, 6, 7, 40, 100, 600):
        (ids,) = some_tokens(model, batch=1, length=length).tolist()
        found = log_probabilities(server, ids, 300)
        if found is not None:
            expected = logits(model, torch.tensor([ids]))[0, -1].log_softmax(-1)
            assert difference(found, expected) < 1e-3
            compared += 1
        answer = complete(server, ids, 20)
        read = logits(model, torch.tensor([ids + answer]))[0, length - 1 : -1]
        read[:, tokenizer.eos_token_id] = -torch.inf  # ignored
        chosen = read.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert len(answer) == 20
        assert (read.max(1).values - chosen).max() < 1e-3 * read.max()
    assert compared >= 2


def test_llama_cpp_splits_text_alike(llama_cpp):
    server, _, tokenizer = llama_cpp
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
