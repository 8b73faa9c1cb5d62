"""PEFT's methods without target modules."""

import subprocess
import sys

import peft
import pytest
import torch

from coca_attention.testing import logits, some_tokens
from families import FAMILIES, collinear

SETTINGS = {"LORA": peft.LoraConfig, "IA3": peft.IA3Config, "VERA": peft.VeraConfig}


CASES = [(family, method) for family in FAMILIES for method in ("LORA", "IA3")]


@pytest.mark.parametrize(("family", "method"), [*CASES, ("Llama", "VERA")])
def test_default_targets(family, method):
    model = collinear(family)
    ids = some_tokens(model)
    before = logits(model, ids)
    adapted = peft.get_peft_model(model, SETTINGS[method](task_type="CAUSAL_LM"))
    targets = {name.split(".")[-1] for name in adapted.targeted_module_names}
    down = "dense_4h_to_h" if family == "GPT-NeoX" else "down_proj"
    expected = {"t_proj", "v_proj", down} if method == "IA3" else {"q_proj", "t_proj", "v_proj"}
    assert targets == expected
    assert torch.allclose(logits(adapted, ids), before, atol=1e-6)  # adapters begin as nothing
    adapted.train()
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {n for n, w in adapted.named_parameters() if w.grad is not None and w.grad.any()}
    assert trained and all(any(f".{t}." in n for t in targets) for n in trained)


def test_the_order_of_imports_does_not_matter():
    for imports in ("import peft, coca_attention.models", "import coca_attention.models, peft"):
        program = (
            f"{imports}; from peft.utils import constants as c; "
            "print(c.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING['coca_llama'])"
        )
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert found.stdout == "['q_proj', 't_proj', 'v_proj']\n", found.stderr
