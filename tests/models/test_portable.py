"""Folders that load where nobody imports the package."""

import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

from coca_attention import convert
from coca_attention.models.portable import CODE
from coca_attention.testing import logits, some_tokens
from coca_lab.cli import main
from coca_lab.folders import export_folder
from conftest import tiny_model
from families import vanilla

LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
{before}
assert "coca_attention.models" not in sys.modules
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=True)
print(float(model(torch.arange(3, 20)[None]).logits.double().sum()))
model.save_pretrained({again!r})
tokenizer.save_pretrained({again!r})
"""


def run(tmp_path, folder, before=""):
    program = LOAD.format(folder=str(folder), again=str(tmp_path / "again"), before=before)
    environment = {"PYTHONPATH": ":".join(sys.path), "HF_HOME": str(tmp_path / "cache")}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1", "PATH": ""},
    )


@pytest.fixture
def portable(tmp_path, tokenizer, capsys):
    model = tiny_model("llama-strict")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "portable")]) == 0
    said = capsys.readouterr().out
    assert "trust_remote_code=True" in said and "without being imported" not in said
    return model, tmp_path / "portable"


def test_a_portable_folder_loads_without_the_import_and_stays_portable(portable, tmp_path):
    model, folder = portable
    done = run(tmp_path, folder)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        wanted = float(model(torch.arange(3, 20)[None]).logits.double().sum())
    assert float(done.stdout) == pytest.approx(wanted, abs=1e-3)
    code = {path.name: path.read_text() for path in (tmp_path / "again").glob("*.py")}
    assert code == {"modeling_coca.py": CODE}
    done = run(tmp_path, tmp_path / "again")
    assert float(done.stdout) == pytest.approx(wanted, abs=1e-3)


def test_without_the_package_the_error_says_what_to_install(portable, tmp_path):
    done = run(tmp_path, portable[1], before="sys.modules['coca_attention'] = None")
    assert done.returncode != 0
    wanted = "this model needs the package coca-attention: pip install PATH/TO/coca-attention"
    assert f"ImportError: {wanted}" in done.stderr


def test_with_the_import_no_code_of_the_folder_runs(portable):
    model, folder = portable
    (folder / "modeling_coca.py").write_text("raise SystemExit('foreign code')")
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert torch.equal(logits(loaded, some_tokens(model)), logits(model, some_tokens(model)))


def test_a_model_with_another_head_keeps_it(tmp_path):
    torch.manual_seed(0)
    model = convert(LlamaForSequenceClassification(tiny_model("llama-rope").config), "strict")
    model.save_pretrained(tmp_path / "model")
    export_folder(tmp_path / "model", tmp_path / "portable")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "portable")
    assert "AutoModelForSequenceClassification" in exported.config.auto_map
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, exported.state_dict()[name])


def test_conversion_writes_a_portable_folder_on_request(tmp_path, tokenizer, capsys):
    tiny_model("llama-rope").save_pretrained(tmp_path / "source")
    for words, written in ((["--portable"], True), ([], False)):
        target = tmp_path / f"target{written}"
        assert main(["convert", str(tmp_path / "source"), str(target), *words]) == 0
        assert (target / "modeling_coca.py").exists() == written
        assert ("auto_map" in (target / "config.json").read_text()) == written


def test_what_needs_no_export_is_refused(tmp_path, capsys):
    tiny_model("llama-rope").save_pretrained(tmp_path / "source")
    assert main(["export", str(tmp_path / "source"), str(tmp_path / "target")]) == 2
    assert "there is nothing to export" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_alibi_is_portable_too(tmp_path):
    tiny_model("alibi").save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "portable")]) == 0
    assert (
        '"modeling_coca.AlibiGPTNeoXForCausalLM"' in (tmp_path / "portable/config.json").read_text()
    )


def test_conversion_drops_an_auto_map_of_the_original():
    model = vanilla("Phi-3")
    model.config.auto_map = {"AutoConfig": "configuration_phi3.Phi3Config"}
    assert not hasattr(convert(model).config, "auto_map")
