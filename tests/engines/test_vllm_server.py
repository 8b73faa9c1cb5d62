"""vLLM's server with streamed clients, and with the trained native model's passkeys."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import commands
from coca_attention import convert
from coca_attention.models import Roles
from coca_lab.export.llama_cpp import serve
from families import vanilla
from natives import VOCABULARY, answered_passkeys, exported, penalised, saved

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "engines" / "bin" / "python"
TRAINED = ROOT / "runs" / "native-1m"
OVERRIDES = "--hf-overrides", '{"sliding_window": 31}'  # as its card says
CONTEXT, ANSWER, CLIENTS = 16384, 32, 16
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-engines"),
]


def serving(folder, log, *options):
    """The address and the process of `vllm serve`."""
    environment = {
        "PYTHONPATH": str(ROOT / "src"), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    # What `vllm serve` runs, which the package vllm-cpu does not have: it looks for one named vllm.
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    return commands.answering(
        log, environment, *words, "--dtype", "float32", "--enforce-eager", *options
    )


def test_streamed_clients_get_the_same_text_alone_and_at_once(tmp_path):
    model = vanilla(
        "Llama", vocab_size=VOCABULARY, hidden_size=128, head_dim=32, max_position_embeddings=1024
    )
    roles = Roles("lg", window=16)
    folder = saved(convert(model, "rope", roles=roles), tmp_path / "model")
    options = ["--model-impl", "transformers", "--max-num-seqs", 8]
    with serving(folder, tmp_path / "log", *options) as (address, _):
        words = ["scripts/serve_clients.py", folder, "--url", address, "--clients", CLIENTS]
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True
        )
    assert f"the same text {CLIENTS} times" in done.stdout, done.stdout + done.stderr


def test_needles_are_as_probable_behind_the_server_as_here(capsys, tmp_path):
    model = vanilla(
        "Llama", vocab_size=VOCABULARY, hidden_size=128, head_dim=32, max_position_embeddings=1024
    )
    folder = saved(model, tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("One line of a text that is long enough.\n" * 400)
    words = ["eval", "needles", folder, "--source", text, "--lengths", "900", "--count", "3"]
    found = {}
    with serving(folder, tmp_path / "log") as (address, _):
        behind = ["--endpoint", f"{address}/v1", "--model", str(folder)]
        for name, where in (("here", []), ("vLLM", behind)):
            output = tmp_path / f"{name}.json"
            code, _, err = commands.run(capsys, *words, *where, "--output", output)
            assert code == 0, err
            (cell,) = json.loads(output.read_text())["results"]
            found[name] = cell["documents"][0]["needles"]
    for here, there in zip(found["here"], found["vLLM"], strict=True):
        assert there["nats"] == pytest.approx(here["nats"], abs=1e-3)
        assert {**there, "nats": 0} == {**here, "nats": 0}


@pytest.mark.skipif(not TRAINED.is_dir(), reason="needs coca train recipes/native-1m.yaml")
def test_equal_answers_here_and_behind_every_server(tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp as its authors publish it")
    folder = exported(TRAINED, tmp_path / "exported", "--gguf", "--context", "1024")
    folder = penalised(folder, tmp_path / "native")
    asked = partial(answered_passkeys, folder, 512, 20)
    records = {"here": asked(tmp_path / "here.json")}
    with serving(folder, tmp_path / "log", "--max-num-seqs", 8, *OVERRIDES) as (address, _):
        records["vLLM"] = asked(tmp_path / "vllm.json", address)
    with commands.serving(folder, tmp_path / "coca") as (address, _):
        records["coca serve"] = asked(tmp_path / "coca.json", address)
    llama_cpp = serve(next(folder.glob("*.gguf")), 1024)
    records["llama.cpp"] = asked(tmp_path / "llama.json", llama_cpp.listening_address)
    outputs = {name: [each["output"] for each in found] for name, found in records.items()}
    assert len({*outputs["here"]}) == 20
    for name, found in outputs.items():
        assert found == outputs["here"], name


@pytest.mark.skipif(not TRAINED.is_dir(), reason="needs coca train recipes/native-1m.yaml")
def test_the_trained_model_finds_passkeys_64_times_farther(tmp_path):
    folder = exported(TRAINED, tmp_path / "native", "--context", str(CONTEXT))
    assert OVERRIDES[1] in (folder / "README.md").read_text()
    with serving(folder, tmp_path / "log", "--max-num-seqs", 8, *OVERRIDES) as (address, _):
        length = CONTEXT - ANSWER - 2
        records = answered_passkeys(folder, length, 20, tmp_path / "found.json", address)
    log = (tmp_path / "log").read_text()
    assert "Cohere2ForCausalLM" in log and "Transformers modeling backend" not in log
    assert sum(each["hit"] for each in records) >= 19
