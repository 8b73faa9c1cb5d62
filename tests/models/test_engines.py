"""What serving engines look for before they run a model; tests/engines runs it in vLLM."""

import importlib
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig

from coca_attention.models.families import FAMILIES


@pytest.mark.parametrize("record", FAMILIES, ids=lambda record: record.config.model_type)
def test_engines_take_the_classes_for_compatible(record):
    assert record.causal_lm.is_backend_compatible()
    assert record.causal_lm._can_set_attn_implementation()


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_engines_register_the_models_by_an_entry_point(group):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((_, value),) = project["entry-points"][group].items()
    module, _, name = value.partition(":")
    getattr(importlib.import_module(module), name)()
    assert AutoConfig.for_model("coca_llama").model_type == "coca_llama"
