"""``coca serve`` answered over HTTP, with OpenAI's client."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

from coca_attention import convert
from coca_attention.cli import main
from coca_attention.data import load_tokenizer
from coca_attention.models import Roles
from conftest import some_text, tiny_model
from families import vanilla

needs_server = pytest.mark.skipif(
    not is_serve_available(),
    reason="Transformers' server is not installed: pip install 'PATH/TO/coca-attention[serve]'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model as the quickstart leaves it: without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "CoCA-Strict"
    tiny_model("strict").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def serve(folder, tmp_path):
    """Start a server of the folder with options; returns its process and address."""
    started = []

    def start(*options):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "coca_attention.cli", "serve", str(folder)]
        log = open(tmp_path / "log", "w")  # noqa: SIM115 (of the process)
        process = subprocess.Popen(
            [*command, "--port", str(port), "--device", "cpu", *options],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
        started.append(process)
        address = f"http://localhost:{port}"
        for _ in range(240):
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"{address}/health")
                return process, f"{address}/v1"
            except OSError:
                time.sleep(0.5)
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for process in started:
        process.kill()
        process.wait()


def stop(process, log, by=signal.SIGINT):
    """Ctrl-C, or another signal."""
    process.send_signal(by)
    assert process.wait(timeout=60) == 0, log.read_text()
    assert "Traceback" not in log.read_text() and "coca:" not in log.read_text()


def expected(model, tokenizer, prompt, tokens):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@needs_server
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--continuous-batching",)], ids=["", "continuous"])
def test_a_served_model_answers_as_it_does_alone(serve, folder, tokenizer, tmp_path, options):
    import openai

    process, address = serve(*options)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
    prompts = [some_text(words, seed=words) for words in (3, 9, 14, 20)]
    model = tiny_model("strict")
    wanted = [expected(model, tokenizer, prompt, 16) for prompt in prompts]
    assert len(set(wanted)) > 1

    def ask(prompt):
        chunks = client.chat.completions.create(
            model=str(folder),
            messages=[{"role": "user", "content": prompt}],
            max_tokens=16,
            temperature=0.0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content for chunk in chunks]
        assert len(pieces) > 3  # a stream, not one answer
        return "".join(piece or "" for piece in pieces)

    alone = [ask(prompt) for prompt in prompts]
    # A stream keeps back what is not yet a whole character.
    assert [text.rstrip("�") for text in alone] == [text.rstrip("�") for text in wanted]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts * 2)) == alone * 2
    stop(process, tmp_path / "log")
    assert "no chat template" in (tmp_path / "log").read_text()


@needs_server
@pytest.mark.slow
def test_ctrl_c_ends_a_server_in_the_middle_of_an_answer(serve, folder, tmp_path):
    import openai

    process, address = serve()
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
    chunks = client.chat.completions.create(
        model=str(folder),
        messages=[{"role": "user", "content": "alpha1 beta2"}],
        max_tokens=300,
        stream=True,
    )
    next(iter(chunks))
    stop(process, tmp_path / "log")


@needs_server
@pytest.mark.slow
def test_sigterm_ends_a_server_too(serve, tmp_path):
    stop(serve()[0], tmp_path / "log", signal.SIGTERM)


@needs_server
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # uvicorn's
def test_a_port_in_use_is_an_error(folder, capfd):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port, "--device", "cpu"]) == 2
    assert "address already in use" in (said := capfd.readouterr().err)
    assert "try another --port" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the model comes first: coca serve MODEL"),
        (["--port", "8000"], "the model comes first: coca serve MODEL"),
    ],
)
def test_a_server_needs_a_model(words, message, capsys):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


@needs_server
def test_unknown_options_of_the_server_are_refused(folder, capsys):
    assert main(["serve", str(folder), "--nonsense"]) == 2
    assert "No such option '--nonsense'; see coca serve --help\n" in capsys.readouterr().err


@needs_server
def test_a_decay_and_continuous_batching_are_refused_before_the_server_starts(
    folder, tmp_path, capsys
):
    model = convert(vanilla("Llama"), "rope", roles=Roles("g"))
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(folder).save_pretrained(tmp_path / "model")
    assert main(["serve", str(tmp_path / "model"), "--continuous-batching"]) == 2
    assert "does not support a decay" in capsys.readouterr().err


def test_a_missing_server_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert main(["serve", str(folder)]) == 2
    assert "pip install 'PATH/TO/coca-attention[serve]'" in capsys.readouterr().err
