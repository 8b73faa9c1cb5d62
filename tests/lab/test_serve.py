"""``coca serve``: Transformers' server with the models of this package."""

import json
import math
import shutil
import signal
import socket
from importlib.util import find_spec
from urllib.error import HTTPError

import pytest
import torch
from safetensors.torch import load_file, save_file

from coca_lab.loading import load_model
from commands import post, run, serving


@pytest.mark.slow
@pytest.mark.parametrize("batching", [[], ["--continuous-batching", "--cache", "0.02"]])
def test_a_served_model_answers_as_it_does_alone(model_folder, tmp_path, tokenizer, batching):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    prompt, model = "alpha1 beta2 gamma3", load_model(model_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    log = tmp_path / "log"
    with serving(model_folder, log, *batching) as (address, process):
        asked = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        answer = post(f"{address}/v1/completions", model=str(model_folder), **asked)
        # A stream keeps back what is not yet a whole character.
        wanted = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer["choices"][0]["text"].rstrip("�") == wanted.rstrip("�") != ""
        assert answer["usage"]["prompt_tokens"] == ids.shape[1]
        with pytest.raises(HTTPError, match="400") as refused:  # one model is served, no other
            post(f"{address}/v1/completions", model="other", **asked)
        assert "pinned" in refused.value.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    last = log.read_text().splitlines()[-1]
    assert last.endswith("coca: interrupted: the server has stopped")
    assert "Traceback" not in log.read_text()


def test_what_cannot_be_served_is_one_line(capsys, monkeypatch, model_folder, tmp_path):
    code, _, err = run(capsys, "serve", tmp_path / "nowhere")
    assert code == 2 and "there is no such folder" in err
    code, _, err = run(capsys, "serve", model_folder, "--nonsense")
    assert code == 2 and "there is no option --nonsense" in err
    monkeypatch.setattr("coca_lab.cli.serve.is_serve_available", lambda: False)
    code, _, err = run(capsys, "serve", model_folder)
    assert code == 2 and "[serve]" in err


def test_an_address_where_nothing_can_listen_is_one_line(capsys, model_folder):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = run(capsys, "serve", model_folder, "--port", port)
    assert code == 2 and f"nothing can listen at localhost, port {port} (Address already" in err
    code, _, err = run(capsys, "serve", model_folder, "--host", "192.0.2.1")  # RFC 5737
    assert code == 2 and "nothing can listen at 192.0.2.1, port 8000" in err


def test_weights_that_are_no_numbers_are_not_served(capsys, model_folder, tmp_path):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "layernorm" in name)
    for value in (math.nan, math.inf):
        weights[name][3] = value
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        code, _, err = run(capsys, "serve", folder)
        assert code == 2 and f"{name} has values that are not finite" in err
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    code, _, err = run(capsys, "serve", folder)
    assert code == 2 and "its weights are .bin files" in err
    folder = shutil.copytree(model_folder, tmp_path / "quantised")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    code, _, err = run(capsys, "serve", folder)
    assert code == 2 and "quantised as hf_quant_config.json says" in err


@pytest.mark.skipif(find_spec("optimum") is not None, reason="optimum reads such weights")
def test_a_missing_package_of_quantised_weights_is_one_line(capsys, model_folder, tmp_path):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, err = run(capsys, "serve", folder)
    assert code == 2 and "no model could be loaded: Loading a GPTQ" in err
