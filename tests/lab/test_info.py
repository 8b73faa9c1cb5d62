"""`coca info`: a folder described without its weights, and the machine; what a process takes."""

import sys
from importlib.metadata import version

import pytest
import torch

from benchmarks.memory import peak_growth
from coca_attention.models import Roles, convert
from commands import run
from conftest import tiny_model


def rows(text: str) -> dict[str, str]:
    return dict(map(str.strip, line.split("  ", 1)) for line in text.splitlines())


def test_a_model_is_described(tmp_path, capsys):
    model = convert(tiny_model("rope"), "strict", roles=Roles("lg", window=8, decay=1.0))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    shown = rows(run(capsys, "info", tmp_path)[1])
    assert shown["model"] == "CoCAGPTNeoXForCausalLM"
    assert shown["attention"] == "CoCA, strict, full cache; 4 heads of 8, 4 for keys and values"
    assert shown["layers"] == "2 of width 32: lg (l sees the last 8 tokens, g all)"
    assert "decay 1.0" in shown["rotation"] and "turning_pairs 0" in shown["rotation"]
    assert shown["context"] == "32 tokens"
    assert shown["parameters"] == f"{model.num_parameters():,} (bfloat16)"


@pytest.mark.parametrize("kind", ["rope", "alibi", "llama-rope"])
def test_other_attention_is_named(tmp_path, capsys, kind):
    tiny_model(kind).save_pretrained(tmp_path)
    shown = rows(run(capsys, "info", tmp_path)[1])
    assert shown["attention"].startswith("ALiBi;" if kind == "alibi" else "rotary;")
    assert ("rotation" in shown) == (kind != "alibi")


def test_folders_that_hold_no_model_are_refused(tmp_path, capsys):
    code, _, err = run(capsys, "info", tmp_path)
    assert code == 2 and "it has no config.json" in err
    (tmp_path / "recipe.yaml").touch()
    assert "run coca train again" in run(capsys, "info", tmp_path)[2]


def test_the_machine_is_described(capsys):
    shown = rows(run(capsys, "info")[1])
    assert f"torch {version('torch')}" in shown["versions"]
    assert shown["CUDA of torch"] and int(shown["cores"]) >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the memory")
def test_memory_that_was_used_before_counts_again():
    def work():
        return [torch.ones(8_000) for _ in range(2_000)] and None  # 64 MB in pieces of 32 kB

    first, second = peak_growth(work), peak_growth(work)
    assert 60 < second < 80 and second > 0.8 * first
