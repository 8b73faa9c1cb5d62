"""Layers with roles as GraniteSWA: the same logits without this package, and in a GGUF file."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cohere2ForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
)

import coca_lab.export
from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles, set_rotary_scaling
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.export import as_native, fold_context
from coca_lab.export.llama_cpp import package, serve
from coca_lab.files import known_problem
from coca_lab.folders import extend_folder
from coca_lab.loading import load_model
from commands import post
from families import vanilla
from natives import KINDS, LENGTH, ROLES, VOCABULARY, cohere, exported, made, roles, saved


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return saved(made(request.param), tmp_path_factory.mktemp("model"))


def test_what_is_printed_names_the_files_that_are_there(tmp_path, capsys):
    """And never the folder in which they are made."""
    pytest.importorskip("gguf")
    source = saved(made(KINDS[0]), tmp_path / "model")
    target = tmp_path / "native"
    assert main(["export", str(source), str(target), "--gguf"]) == 0
    said, err = capsys.readouterr()
    assert f"for llama.cpp: {target / 'native.gguf'}\n" in said
    assert f"Next: coca eval passkey {target}, coca serve {target}" in said
    assert (target / "native.gguf").is_file() and "partial" not in said + err


def test_folder_computes_the_same_by_transformers_own_class(folder, tmp_path):
    target = exported(folder, tmp_path / "native")
    ours, theirs = load_model(folder), AutoModelForCausalLM.from_pretrained(target).eval()
    ids = some_tokens(ours, length=40)
    assert difference(logits(theirs, ids), logits(ours, ids)) < 1e-5
    assert AutoTokenizer.from_pretrained(target)("a1").input_ids
    if type(ours) is Cohere2ForCausalLM:
        assert type(theirs) is Cohere2ForCausalLM
        assert """'{"sliding_window": 5}'""" in (target / "README.md").read_text()
        return
    assert type(theirs) is GraniteSWAForCausalLM
    assert json.loads((target / "config.json").read_text())["no_rope_layers"] == [1, 1, 0]
    # The control: with the class's own sinks, logits differ.
    for layer in theirs.model.layers:
        torch.nn.init.zeros_(layer.self_attn.sinks)
    assert difference(logits(theirs, ids), logits(ours, ids)) > 1e-2


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


@pytest.mark.slow
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


def test_a_context_is_written_and_told(folder, tmp_path):
    exported(folder, tmp_path / "to", "--context", "1024")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    assert isinstance(model, (GraniteSWAForCausalLM, Cohere2ForCausalLM))
    assert model.config.max_position_embeddings == 1024
    card = (tmp_path / "to" / "README.md").read_text()
    assert "scaled for texts of 1,024 tokens" in card and "import coca_attention" not in card


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
    kind = model.config.model_type
    assert fields["general.architecture"] == kind
    assert fields[f"{kind}.attention.sliding_window_pattern"] == [True, True, False]
    assert fields[f"{kind}.context_length"] == 1024
    layers = model.model.layers
    assert torch.equal(tensors["blk.2.attn_q.weight"], layers[2].self_attn.q_proj.weight)
    local, ours = tensors["blk.0.attn_k.weight"], layers[0].self_attn.k_proj.weight
    if kind == "granite_swa":
        assert fields["granite_swa.attention.rope_pattern"] == [True, True, False]
        assert torch.equal(tensors["blk.1.attn_sinks.weight"], layers[1].self_attn.sinks)
        # Rows that turn together are neighbours: 0 and 4 of the first head of width 8.
        assert torch.equal(local[:2], ours[[0, 4]])
        assert not torch.equal(local, ours)
    else:
        assert torch.equal(local, ours)
    vocabulary = AutoTokenizer.from_pretrained(native).get_vocab()
    assert [vocabulary[token] for token in fields["tokenizer.ggml.tokens"]] == list(range(300))
    assert fields["tokenizer.ggml.pre"] == "smollm"
    expected = sum(1 for name, _ in model.named_parameters() if name != "lm_head.weight")
    expected += not model.config.tie_word_embeddings
    assert len(tensors) == expected


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_llama_cpp_reads_what_was_written(folder, tmp_path, dtype, bound, monkeypatch):
    """The error that the command measured."""
    pytest.importorskip("gguf")
    measured = {}
    check = coca_lab.export._check_difference

    def remembered(what, error, bound):
        measured[what] = error
        check(what, error, bound)

    monkeypatch.setattr("coca_lab.export._check_difference", remembered)
    exported(folder, tmp_path / "native", "--gguf", "--dtype", dtype)
    assert 0 < measured["llama.cpp"] < bound and 0 <= measured["the folder"] < 1e-4


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def granite(**changes):
    model = made("granite with sinks")
    return GraniteSWAForCausalLM(GraniteSWAConfig(**model.config.to_dict() | changes))


def converted(roles=None, form="rope"):
    return convert(vanilla("Llama", vocab_size=VOCABULARY), form, roles=roles)


def scaled_linearly():
    model = vanilla("Llama", num_hidden_layers=3, vocab_size=VOCABULARY)
    set_rotary_scaling(model, "linear", factor=4.0)
    model = convert(model, "rope", roles=ROLES)
    set_rotary_scaling(model, "none")
    return model


def rotated_in_part():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return roles(rope_parameters=rope)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (lambda: vanilla("Llama"), [], "a plain LlamaForCausalLM needs no export: engines"),
        (lambda: converted(), [], "local and global layers"),
        (roles, ["--context", "4"], "--context must be at least the training length"),
        (lambda: converted(Roles("lg")), [], "a temperature"),
        (lambda: converted(Roles("lg", temperature=False, decay=1.0)), [], "a decay"),
        (lambda: converted(Roles("lg"), "strict"), [], "strict attention in local layers"),
        (scaled_linearly, [], "linear scaling in local layers"),
        (rotated_in_part, [], "partial rotary embedding"),
        (lambda: roles(hidden_act="gelu"), ["--gguf"], "hidden_act 'gelu'"),
        (lambda: granite(hidden_act="relu"), ["--gguf"], "hidden_act 'relu'"),
        (lambda: granite(layer_types=["full_attention"] * 3), ["--gguf"], "no layer with a window"),
        (lambda: granite(layer_rope_theta=[0, 0, 0]), ["--gguf"], "no rotary layer"),
        (lambda: cohere(tie_word_embeddings=False), ["--gguf"], "an untied output head"),
        (lambda: cohere(attention_bias=True), ["--gguf"], "attention_bias"),
        (lambda: cohere(rope_parameters=LINEAR), ["--gguf"], "linear scaling"),
        (lambda: cohere(layer_types=["full_attention"] * 3), ["--gguf"], "no layer with a window"),
    ],
)
def test_what_would_change_the_function_is_refused(
    model, options, reason, tmp_path, capsys, monkeypatch
):
    """Before the weights are read."""
    if "--gguf" in options:
        pytest.importorskip("gguf")
    monkeypatch.setattr(coca_lab.export, "load_model", None)
    source = saved(model(), tmp_path / "model")
    assert main(["export", str(source), str(tmp_path / "native"), *options]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "native").exists()


def test_activations_that_transformers_has_are_exported_without_a_file(tmp_path):
    source = saved(roles(hidden_act="gelu"), tmp_path / "model")
    assert exported(source, tmp_path / "native").is_dir()


@pytest.mark.parametrize("name", ["gguf", "xllamacpp"])
def test_a_missing_package_is_named_with_what_installs_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"--gguf needs {name}: .*pip install .*\[gguf\]"):
        package(name)


def test_a_vocabulary_without_merges_is_refused(tmp_path, capsys):
    pytest.importorskip("gguf")
    source = saved(roles(), tmp_path / "model")
    state = json.loads((source / "tokenizer.json").read_text())
    state["model"]["merges"] = []
    (source / "tokenizer.json").write_text(json.dumps(state))
    assert main(["export", str(source), str(tmp_path / "native"), "--gguf"]) == 2
    assert "without merges" in capsys.readouterr().err and not (tmp_path / "native").exists()


@pytest.mark.parametrize(
    ("fault", "options", "what"),
    [("coca_lab.export.as_native", [], "the folder"), ("_interleaved", ["--gguf"], "llama.cpp")],
)
def test_faults_in_what_is_written_are_found(fault, options, what, tmp_path, capsys, monkeypatch):
    """Queries that are 1 % off; rows of projections in the wrong order."""
    if options:
        pytest.importorskip("gguf")
        fault = f"coca_lab.export.gguf_file.{fault}"

    def off(model):
        native = as_native(model)
        for layer in native.model.layers:
            layer.self_attn.q_proj.weight.data *= 1.01
        return native

    source = saved(roles(), tmp_path / "model")
    monkeypatch.setattr(fault, (lambda weight, heads: weight) if options else off)
    assert main(["export", str(source), str(tmp_path / "native"), *options]) == 2
    assert f"{what} does not compute what the source does" in capsys.readouterr().err
    assert not (tmp_path / "native").exists()


def test_rounding_does_not_reach_the_frequencies_of_rotations():
    native = as_native(roles().bfloat16())
    exact = as_native(roles())
    ours, theirs = (dict(m.named_buffers()) for m in (native, exact))
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert native.dtype == torch.bfloat16


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_while_a_file_is_written_is_named():
    with open("/dev/full", "wb") as full, pytest.raises(OSError) as caught:
        np.zeros(100_000).tofile(full)
    assert "free disk space" in known_problem(caught.value)


SETTINGS = {
    "eos_token_id": [0, 7, 9], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    "repetition_penalty": 1.1,
}  # fmt: skip


def with_settings(folder, **changes):
    """A source whose texts end at several tokens, and which says how to draw them."""
    path = saved(roles(), folder) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SETTINGS | changes))
    return folder


def test_settings_of_generation_are_those_of_the_source(tmp_path):
    target = exported(with_settings(tmp_path / "model"), tmp_path / "native")
    written = json.loads((target / "generation_config.json").read_text())
    assert {name: written[name] for name in SETTINGS} == SETTINGS


def test_llama_cpp_stops_and_draws_as_the_source_says(tmp_path):
    gguf = pytest.importorskip("gguf")
    target = exported(with_settings(tmp_path / "model"), tmp_path / "native", "--gguf")
    file = target / "native.gguf"
    fields = {n: field.contents() for n, field in gguf.GGUFReader(file).fields.items()}
    ends = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    end = AutoTokenizer.from_pretrained(target).eos_token_id
    assert ends[0] == end and set(ends) == {0, 7, 9}
    drawn = {name: fields[f"general.sampling.{name}"] for name in ("temp", "top_k", "top_p")}
    assert drawn == pytest.approx({"temp": 0.7, "top_k": 20, "top_p": 0.8})
    assert fields["general.sampling.penalty_repeat"] == pytest.approx(1.1)
    server = serve(file, 64)
    for token, most in ((7, 1), (9, 1), (11, 5)):
        likely = {"logit_bias": [[token, 1e4]], "temperature": 0, "return_tokens": True}
        address = f"{server.listening_address}/completion"
        answer = post(address, prompt=[40, 41], n_predict=5, **likely)
        assert answer["tokens_predicted"] == most, token


def test_more_ends_than_a_file_has_fields_for_are_refused(tmp_path, capsys):
    pytest.importorskip("gguf")
    source = with_settings(tmp_path / "model", eos_token_id=[0, 7, 8, 9])
    assert main(["export", str(source), str(tmp_path / "native"), "--gguf"]) == 2
    assert "texts end at 4 tokens" in capsys.readouterr().err
    assert not (tmp_path / "native").exists()


def test_the_card_of_an_extended_cohere_says_how_vllm_serves_it(tmp_path):
    source = saved(made("cohere2"), tmp_path / "source")
    model = extend_folder(source, tmp_path / "target", "temperature", length=64, to=128)
    card = (tmp_path / "target" / "README.md").read_text(encoding="utf-8")
    flags = f"""--hf-overrides '{{"sliding_window": {model.config.sliding_window - 1}}}'"""
    assert f"vllm serve target {flags}" in card
