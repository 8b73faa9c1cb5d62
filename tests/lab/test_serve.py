"""``coca serve``: Transformers' server with the models of this package."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from commands import run
from conftest import tiny_model


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def wait_for(address: str, process: subprocess.Popen, log) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_a_served_model_answers_as_it_does_alone(tmp_path, tokenizer):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    model = tiny_model("strict")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompt, options = "alpha1 beta2 gamma3", ["--port", str(free_port()), "--device", "cpu"]
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    log = tmp_path / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "coca_lab.cli", "serve", str(tmp_path / "model"), *options],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
    try:
        address = f"http://localhost:{options[1]}"
        wait_for(address, process, log)
        asked = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(
                {"model": str(tmp_path / "model"), "prompt": prompt, "max_tokens": 16}
            ).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked) as answer:
            text = json.load(answer)["choices"][0]["text"]
        # A stream keeps back what is not yet a whole character.
        wanted = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert text.rstrip("�") == wanted.rstrip("�") != ""
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_servers_own_errors_are_passed_on(capsys, monkeypatch, model_folder, tmp_path):
    code, _, err = run(capsys, "serve", tmp_path / "nowhere")
    assert code == 2 and "there is no such folder" in err
    with pytest.raises(SystemExit) as stop:
        run(capsys, "serve", model_folder, "--nonsense")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "No such option" in said and "coca serve" in said
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    code, _, err = run(capsys, "serve", model_folder)
    assert code == 2 and "pip install transformers[serving]" in err
