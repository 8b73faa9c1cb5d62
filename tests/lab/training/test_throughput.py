"""Tokens a second, and torch.compile."""

import pytest

from coca_lab.training import load_recipe, read_summary, train


def run(text_folder, output, **changes):
    options = {
        "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2,
        "data.source": text_folder, "data.vocab_size": 300, "data.block_length": 16,
        "data.held_out": 0.2, "validation.every": 3, "validation.batches": 1,
        "training.steps": 6, "training.global_batch_size": 4, "training.micro_batch_size": 2,
        "training.precision": "float32", "training.learning_rate": 1e-2, "training.log_every": 2,
    }  # fmt: skip
    words = [f"--{n.replace('__', '.')}={v}" for n, v in (options | changes).items()]
    return read_summary(train(load_recipe(None, words), output))


def test_a_run_says_how_fast_it_is(text_folder, tmp_path):
    summary = run(text_folder, tmp_path / "run")
    found = summary["throughput"]
    assert found == {"tokens_per_second": pytest.approx(6 * 4 * 16 / summary["seconds"])}


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(text_folder, tmp_path):
    summary = run(text_folder, tmp_path / "run")
    compiled = run(text_folder, tmp_path / "compiled", training__compile=True)
    for name in ("curve", "validation"):
        for entry, other in zip(summary[name], compiled[name], strict=True):
            assert entry == pytest.approx(other, rel=1e-4)
