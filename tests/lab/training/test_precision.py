"""Which precision a run takes where its recipe leaves it open, and that it keeps it."""

import logging

import pytest

from coca_lab.recipe import load_recipe
from coca_lab.training import precision, train
from coca_lab.training.folder import RECIPE_FILE
from coca_lab.training.precision import bfloat16_ratio, native_precision, with_precision
from runs import recipe


@pytest.fixture
def processor(monkeypatch):
    """Sets how long bfloat16 takes."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    return lambda ratio: monkeypatch.setattr(precision, "bfloat16_ratio", lambda: ratio)


@pytest.mark.parametrize(("ratio", "expected"), [(0.3, "bfloat16"), (40.0, "float32")])
def test_auto_is_what_the_processor_computes_natively(
    ratio, expected, processor, text_folder, tmp_path, caplog
):
    processor(ratio)
    wanted = recipe(text_folder, training__precision="auto")
    with caplog.at_level(logging.INFO, logger="coca_lab"):
        assert with_precision(wanted, tmp_path).training.precision == expected
    assert f"training.precision: auto is {expected} here" in caplog.text


def test_a_run_keeps_the_precision_that_it_began_with(processor, text_folder, tmp_path):
    processor(40.0)
    wanted = recipe(text_folder, training__precision="auto", training__steps=1)
    folder = train(wanted, tmp_path / "run")
    assert load_recipe(folder / RECIPE_FILE).training.precision == "float32"
    processor(0.3)  # on another machine
    assert with_precision(wanted, folder).training.precision == "float32"
    assert train(wanted, folder) == folder  # and it is the same recipe


def test_bfloat16_that_is_slow_here_is_warned_of(processor, text_folder, tmp_path, caplog):
    wanted = recipe(text_folder, training__precision="bfloat16")
    processor(0.3)
    assert with_precision(wanted, tmp_path) is wanted and not caplog.records
    processor(40.0)
    assert with_precision(wanted, tmp_path) is wanted
    assert "takes 40 times as long as float32 on this processor" in caplog.text


def test_the_processor_here_is_measured():
    assert bfloat16_ratio() > 0 and native_precision() in ("bfloat16", "float32")
