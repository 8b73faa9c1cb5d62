"""Large models: read tensor by tensor, and never twice in memory."""

import gc
import weakref
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.memory import peak_growth
from coca_attention.models.conversion import convert
from coca_lab.folders import convert_folder
from coca_lab.loading import load_model
from coca_lab.training import load_recipe, train
from runs import TEACHER, write_recipe


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A bfloat16 model in files of 4 MB, and its parameters in millions."""
    folder = tmp_path_factory.mktemp("large") / "sharded"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
        num_attention_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4MB")
    assert len(list(folder.glob("*.safetensors"))) > 8
    return folder, model.num_parameters() / 1e6


def growth(run):
    """Peak of the resident size above what was there, in MB, and the result."""
    gc.collect()
    results = []
    return peak_growth(lambda: results.append(run())), results.pop()


@pytest.mark.slow  # the heap that other tests leave behind changes what it measures
def test_no_second_copy_in_memory(sharded, tmp_path):
    """4 bytes a parameter in float32, and the pages of the files, 2 bytes, which need no memory."""
    folder, millions = sharded
    slack = 0.8 * millions  # less than half of the smallest copy
    peak, model = growth(lambda: load_model(folder, device="cpu"))
    assert 4 * millions < peak < 6 * millions + slack
    peak, _ = growth(partial(convert, model, "strict"))
    assert peak < slack
    del model
    peak, _ = growth(lambda: convert_folder(folder, tmp_path / "target", form="strict"))
    assert peak < 2 * millions + slack


def test_a_run_keeps_one_model_at_a_time(base, text_folder, tmp_path, monkeypatch):
    """When one is loaded, the start that was measured and earlier stages are gone."""
    loaded, alive = [], []

    def load(*args, **kwargs):
        alive.append(sum(ref() is not None for ref in loaded))
        model = load_model(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model

    for part in ("run", "model"):
        monkeypatch.setattr(f"coca_lab.training.{part}.load_model", load)
    path = write_recipe(base, text_folder, tmp_path / "recipe.yaml", TEACHER)
    gc.disable()  # a chance collection must not be what frees them
    try:
        train(load_recipe(path), tmp_path / "run")
    finally:
        gc.enable()
    # The start to measure; then, in every stage, the teacher and beside it the student.
    assert alive == [0, 0, 1, 0, 1]
