"""``coca serve``: Transformers' server with the models of this package."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from urllib.request import urlopen

import pytest
import torch

from coca_lab.loading import load_model
from commands import post, run


@pytest.mark.slow
def test_a_served_model_answers_as_it_does_alone(model_folder, tmp_path, tokenizer):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    prompt, model = "alpha1 beta2 gamma3", load_model(model_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    log = tmp_path / "log"
    words = ["serve", str(model_folder), "--port", port, "--device", "cpu"]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "coca_lab.cli", *words],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
    try:
        address = f"http://localhost:{port}"
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            with suppress(OSError):
                urlopen(f"{address}/health")
                break
            time.sleep(0.5)
        asked = {"model": str(model_folder), "prompt": prompt, "max_tokens": 16}
        text = post(f"{address}/v1/completions", **asked)["choices"][0]["text"]
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
