"""CoCA models in ExecuTorch and quantised, and what DeepSpeed's ZeRO-3 is told.

`make test-engines` installs what they need.
"""

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_attention import convert, extend_context
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from families import vanilla

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "devices" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="not installed: make test-engines"),
]


def run(*words):
    """What the worker prints."""
    worker = Path(__file__).parent / "devices_worker.py"
    done = subprocess.run(
        [str(word) for word in (PYTHON, worker, *words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "form", "settings", "rotary"),
    [
        ("full", "slack", {}, {}),
        ("half", "slack", {"free_pairs": 2}, {}),
        ("full", "strict", {}, {"decay": 1.5, "decay_length": 4.0}),
        ("full", "rope", {"near": 4}, {}),
    ],
    ids=["slack", "half cache", "decay", "limited distances"],
)
def test_executorch_reads_a_token_at_a_time(kind, form, settings, rotary, tmp_path):
    llama = vanilla("Llama")
    llama.config.rope_parameters |= rotary
    model = convert(llama, form, kv_cache=kind, **settings)
    model.save_pretrained(tmp_path)
    ids = some_tokens(model, batch=1, length=8)
    run("executorch", tmp_path, json.dumps(ids[0].tolist()))
    assert difference(torch.load(tmp_path / "read.pt"), logits(model, ids)[0]) < 1e-5


def test_zero_3_is_refused(tmp_path):
    llama = vanilla("Llama")
    llama.save_pretrained(tmp_path / "llama")
    convert(llama, "slack").save_pretrained(tmp_path / "converted")
    said = run("deepspeed", tmp_path / "llama", tmp_path / "converted").splitlines()[-3:]
    assert "load the model without offloading or DeepSpeed ZeRO-3" in said[0]
    assert "use ZeRO-2, or FSDP2" in said[1] and "use ZeRO-2, or FSDP2" in said[2]


@pytest.mark.parametrize(
    "change",
    [
        functools.partial(convert, form="slack"),
        functools.partial(extend_context, method="limited", to=200),
        functools.partial(extend_context, method="leaky", to=200),
        functools.partial(extend_context, method="shifted", to=200),
    ],
    ids=["slack", "limited", "leaky", "shifted"],
)
def test_changed_models_are_quantised_as_well_as_a_llama_and_not_the_other_way(change, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, vocab_size=512, max_position_embeddings=128)
    model, folder = LlamaForCausalLM(config), tmp_path / "llama"
    model.save_pretrained(folder)
    change(model).save_pretrained(tmp_path / "converted")
    *said, by_hand = run("quantised", folder, tmp_path / "converted").splitlines()[-4:]
    assert "got torchao.quantization" in by_hand and "without quantisation" in by_hand
    found = [line.split(" ", 4) for line in said]
    # bitsandbytes packs modules of type Linear alone, torchao those of its subclasses, too.
    kinds = {name: kind for name, kind, *_ in found}
    assert kinds == {"4bit": "Parameter", "8bit": "Parameter", "torchao": "Int8Tensor"}
    for _, _, ours, theirs, why in found:
        assert 0.001 < float(ours) < 1.2 * float(theirs)
        assert "is quantised: convert it in full precision" in why
    # This environment cannot load the folder, and need not.
    packed, extended = f"{folder}-4bit", tmp_path / "extended"
    assert main(["extend", packed, str(extended), "--method", "yarn"]) == 0
    changed, differ = run("extended", packed, extended).split()[-2:]
    assert float(differ) < 1e-4 < 1 < float(changed)
