"""``coca serve``: Transformers' server with the models of this package."""

import re
import signal
import socket
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from coca_lab.loading import load_model
from commands import post, run, serving

REFUSED = [
    ("completions", {"max_tokens": 0}, 400, "max_tokens must be a positive"),
    ("completions", {"max_tokens": -5}, 400, "max_tokens must be a positive"),
    ("completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("completions", {"prompt": "\ud800"}, 400, "half a surrogate pair"),
    ("completions", {"prompt": "a b " * 999}, 400, "fit into the context"),
    ("completions", {"prompt": "a" * 2_000_000}, 413, "longer than"),
    ("completions", {"temperature": -1}, 400, "temperature must be"),
    ("completions", {"max_tokens": 5000}, 400, "fit into the context, which"),
    ("completions", {"n": 2}, 400, "n is not supported by this server"),
    ("completions", {"best_of": 3}, 400, "leave it out or give 1"),
    ("completions", {"echo": True}, 400, "echo is not supported"),
    ("completions", {"logprobs": 0}, 400, "logprobs is not supported"),
    ("completions", {"logit_bias": {"5": 9}}, 400, "logit_bias is not supported"),
    ("chat/completions", {"n": 2}, 400, "n is not supported"),
    ("chat/completions", {"tool_choice": "none"}, 400, "tool_choice is not"),
    ("responses", {"input": "a", "conversation": "b"}, 400, "conversation is not"),
    ("chat/completions", {}, 400, "chat template"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, ""),
]
"""Where a request goes, its fields beside the usual ones, the code and words of the answer."""


@pytest.mark.slow
@pytest.mark.parametrize("batching", [[], ["--continuous-batching"]])
def test_a_served_model_answers_as_it_does_alone(model_folder, tmp_path, tokenizer, batching):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    prompt, model = "alpha1 beta2 gamma3", load_model(model_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    log = tmp_path / "log"
    with serving(model_folder, log, *batching) as (address, process):
        asked = {"model": str(model_folder), "prompt": prompt, "max_tokens": 16}
        text = post(f"{address}/v1/completions", **asked)["choices"][0]["text"]
        # A stream keeps back what is not yet a whole character.
        wanted = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert text.rstrip("�") == wanted.rstrip("�") != ""
        drawn = {
            post(f"{address}/v1/completions", **asked, temperature=2.0)["choices"][0]["text"]
            for _ in range(4)
        }
        assert len(drawn) > 1 or batching  # whose first request sets it for all
        neutral = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "user": "a"}
        assert post(f"{address}/v1/completions", **asked, **neutral)["choices"][0]["text"] == text
        chat = {"model": str(model_folder), "messages": [{"role": "user", "content": "alpha1"}]}
        usual = {"completions": asked, "chat/completions": chat, "responses": {}}
        for path, fields, code, reason in REFUSED:
            with pytest.raises(HTTPError) as refused:
                post(f"{address}/v1/{path}", **usual[path] | fields)
            said = refused.value.read().decode()
            assert refused.value.code == code and reason in said, said
        if batching:  # which stops at no text
            with pytest.raises(HTTPError, match="400"):
                post(f"{address}/v1/completions", **asked, stop="zzz")
        else:
            stopped = post(f"{address}/v1/completions", **asked, stop="zzz")
            assert stopped["choices"][0]["text"] == text
        chunks = Request(f"{address}/v1/completions", iter([b'{"prompt": "alpha1"}']))
        with pytest.raises(HTTPError, match="411"):
            urlopen(chunks)
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1])
        assert peak < 4_000_000  # kB, of which torch and Transformers take most
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        assert time.monotonic() - started < 10
        assert "Traceback" not in log.read_text()


def test_what_cannot_be_served_is_one_line(capsys, monkeypatch, model_folder, tmp_path):
    code, _, err = run(capsys, "serve", tmp_path / "nowhere")
    assert code == 2 and "there is no such folder" in err
    code, _, err = run(capsys, "serve", model_folder, "--nonsense")
    assert code == 2 and "unrecognized arguments: --nonsense" in err
    monkeypatch.setattr("coca_lab.cli.serve.is_serve_available", lambda: False)
    code, _, err = run(capsys, "serve", model_folder)
    assert code == 2 and "[serve]" in err


def test_an_address_where_nothing_can_listen_is_one_line(capsys, model_folder):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = run(capsys, "serve", model_folder, "--port", port)
    assert code == 2 and f"coca: error: port {port} is in use: choose another --port" in err
    code, _, err = run(capsys, "serve", model_folder, "--host", "192.0.2.1")  # RFC 5737
    assert code == 2 and "nothing can listen at 192.0.2.1, port 8000" in err
