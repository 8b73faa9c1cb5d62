"""Which precision a run takes where its recipe leaves it open, and that it keeps it."""

import logging

import pytest

from coca_lab.recipe import load_recipe
from coca_lab.training import train
from coca_lab.training.folder import RECIPE_FILE
from coca_lab.training.precision import with_precision
from runs import recipe


@pytest.fixture
def processor(monkeypatch):
    """Sets what the processor can."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return lambda *names: monkeypatch.setattr(
        "torch.cpu.get_capabilities", lambda: {"avx2": True, **dict.fromkeys(names, True)}
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["avx512_bf16"], "bfloat16"), (["amx_bf16"], "bfloat16"), ([], "float32")],
)
def test_auto_is_what_the_processor_computes_natively_and_a_slow_choice_is_warned_of(
    names, expected, processor, text_folder, tmp_path, caplog
):
    processor(*names)
    wanted = recipe(text_folder, training__precision="auto")
    with caplog.at_level(logging.INFO, logger="coca_lab"):
        assert with_precision(wanted, tmp_path).training.precision == expected
    assert f"training.precision: auto is {expected} here" in caplog.text
    chosen = recipe(text_folder, training__precision="bfloat16")
    assert with_precision(chosen, tmp_path) is chosen
    assert ("as long as float32 on this processor" in caplog.text) == (expected == "float32")


def test_a_run_keeps_the_precision_that_it_began_with(processor, text_folder, tmp_path):
    processor()
    wanted = recipe(text_folder, training__precision="auto", training__steps=1)
    folder = train(wanted, tmp_path / "run")
    assert load_recipe(folder / RECIPE_FILE).training.precision == "float32"
    processor("avx512_bf16")  # on another machine
    assert with_precision(wanted, folder).training.precision == "float32"
    assert train(wanted, folder) == folder  # and it is the same recipe
