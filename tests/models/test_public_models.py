"""Public models as they are on the Hugging Face Hub, small: in Python and by command.

A handful runs by default, the others with the slow tests.
"""

import re
import shutil

import pytest
import torch

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import made_for
from coca_attention.models.configuration import rope_parameters
from coca_attention.testing import difference, logits, some_tokens
from commands import run
from families import greedy
from public_models import CASES, class_of, loaded, write_public

# Renamed weights, code on the Hub, experts, windows, a rule, a norm on keys, and refusals.
DEFAULT = [
    "EleutherAI/pythia-70m", "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", "Qwen/Qwen3-30B-A3B",
    "mistralai/Mistral-7B-v0.1", "meta-llama/Llama-3.1-8B", "google/gemma-3-270m",
    "deepseek-ai/deepseek-llm-7b-base", "google/gemma-2-2b", "facebook/opt-125m",
    "llava-hf/llava-1.5-7b-hf",
]  # fmt: skip
NAMES = [pytest.param(n, marks=[pytest.mark.slow] * (n not in DEFAULT)) for n in CASES]
ROUND_OFF = 1e-5  # float32, relative to the largest logit


@pytest.mark.parametrize("name", NAMES)
def test_a_public_model(name, tmp_path, capsys):
    case, folder = CASES[name], tmp_path / "model"
    write_public(case, folder)
    check = check_refused if case["result"] == "refused" else check_converted
    check(case, folder, capsys)


def check_refused(case, folder, capsys):
    """In Python, where Transformers can load it, and by command, with the reason."""
    if case["files"] != "config":
        with pytest.raises(UserError, match=case["says"]):
            convert(loaded(folder, class_of(case)), "rope")
    if case["files"] == "bin":
        (folder / "model.safetensors").unlink()
    code, _, error = run(capsys, "convert", folder, folder.with_name("target"), "--form", "rope")
    assert code == 2 and re.search(case["says"], error), error


def check_converted(case, folder, capsys):
    model = loaded(folder, class_of(case), unknown=(*case.get("buffers", ()), "lm_head.weight"))
    length = made_for(model.config)[0]
    assert length == case["length"]
    within, beyond = (some_tokens(model, length=n) for n in (length, 3 * length))
    texts = [within[:, : max(2, length // 2)], within]
    vanilla, far = [logits(model, text) for text in texts], logits(model, beyond)
    prompt = within[:, : max(2, min(8, length - 12))]
    continued = greedy(model, prompt)
    limited = convert(model, "rope")
    rope = rope_parameters(limited.config)
    assert (rope["distance_map"]["near"], rope["temperature"]) == (length, length)
    for text, expected in zip(texts, vanilla, strict=True):
        assert difference(logits(limited, text), expected) < ROUND_OFF
    changed = difference(logits(limited, beyond), far)
    assert (changed > 1e-4) if case["result"] == "converts" else (changed < ROUND_OFF)
    if prompt.shape[1] + 12 <= length:
        assert torch.equal(greedy(limited, prompt), continued)
    assert_saved(limited, folder.with_name("limited"), beyond)
    strict = convert(loaded(folder, class_of(case), unknown=("",)), "strict")
    assert_saved(strict, folder.with_name("strict"), within)
    check_command(case, folder, within, vanilla[-1], capsys)


def assert_saved(model, folder, ids):
    """Saved and loaded, it has all of its tensors, and computes the same."""
    model.save_pretrained(folder)
    assert torch.equal(logits(loaded(folder), ids), logits(model, ids))


def check_command(case, folder, ids, expected, capsys):
    if case["files"] == "bin":
        old = folder.with_name("as on the Hub")
        shutil.copytree(folder, old, ignore=shutil.ignore_patterns("*.safetensors"))
        code, _, error = run(capsys, "convert", old, folder.with_name("of bin"), "--form", "rope")
        assert code == 2 and "write them as safetensors" in error
    target = folder.with_name("by command")
    code, printed, _ = run(capsys, "convert", folder, target, "--form", "rope")
    assert code == 0 and f"Training length: {case['length']:,} tokens" in printed
    assert difference(logits(loaded(target), ids), expected) < ROUND_OFF
