"""Weights that DeepSpeed ZeRO-3 has sharded: empty except inside GatheredParameters.

DeepSpeed is imitated, so that these tests need neither it nor several processes.
"""

import copy
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import initialization

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.testing import some_tokens
from families import FAMILIES, collinear, vanilla

COUNT = itertools.count()


def shard(parameter):
    """What zero.Init does to a parameter: number it, take its data away, add a method."""
    if not hasattr(parameter, "ds_id"):
        parameter.ds_id, parameter.whole = next(COUNT), parameter.data
        parameter.convert_to_zero_parameters = lambda param_list: [shard(p) for p in param_list]
        parameter.data = torch.empty(0, dtype=parameter.dtype)


class GatheredParameters:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def __enter__(self):
        for parameter in self.parameters:
            parameter.data = parameter.whole

    def __exit__(self, *_):
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    module = ModuleType("deepspeed")
    module.zero = SimpleNamespace(GatheredParameters=GatheredParameters)
    monkeypatch.setitem(sys.modules, "deepspeed", module)


def whole(model):
    """The weights of a sharded model; all of them must be empty."""
    found = {}
    for name, parameter in model.named_parameters():
        assert hasattr(parameter, "ds_id") and parameter.numel() == 0, name
        found[name] = parameter.whole
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_converting(family):
    model = vanilla(family)
    expected = dict(convert(copy.deepcopy(model)).named_parameters())
    for parameter in model.parameters():
        shard(parameter)
    found = whole(convert(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT-NeoX"])
def test_building(family, monkeypatch):
    """Every module's weights are sharded as soon as its constructor returns."""
    config = collinear(family).config
    expected = {n: w.shape for n, w in collinear(family).named_parameters()}
    example = collinear(family)
    for kind in {type(m) for m in example.modules() if list(m.parameters(recurse=False))}:
        if kind.__name__ == "FoldedLinear":
            continue  # made from the key projection, not by its constructor
        original = kind.__init__

        def init(self, *args, original=original, **kwargs):
            original(self, *args, **kwargs)
            for parameter in self.parameters(recurse=False):
                shard(parameter)

        monkeypatch.setattr(kind, "__init__", init)
    with initialization.no_init_weights():
        model = type(example)(config)
    assert {n: w.shape for n, w in whole(model).items()} == expected


def test_calibration_is_refused():
    model = vanilla("Llama")
    ids = some_tokens(model)
    shard(next(model.parameters()))
    with pytest.raises(UserError, match="has sharded: convert it before"):
        convert(model, init="calibrated", calibration=ids)
    assert model.config.model_type == "llama"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT-NeoX"])
def test_two_processes_of_deepspeed(family, tmp_path, monkeypatch):
    """Built, loaded, converted and trained by DeepSpeed itself; compared with one plain process."""
    monkeypatch.delitem(sys.modules, "deepspeed")
    pytest.importorskip("deepspeed", reason="needs deepspeed, which is not among the requirements")
    program = str(Path(__file__).parents[1] / "zero3_run.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    subprocess.run(
        [sys.executable, *command, family, str(tmp_path)],
        check=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
