"""Runs in several stages that tests share: a recipe, a base model, an uninterrupted run."""

import pytest
import torch
import yaml
from safetensors.torch import load_file

from coca_lab.data import BlockDataset
from coca_lab.training import load_recipe, read_summary, train

PAPER = [
    {"name": "first", "train": "t"},
    {"name": "second", "train": "qtv", "learning_rate": 5e-3},
    {"name": "third", "train": "all", "steps": 5, "warmup_share": 0.5, "final_share": 1.0},
]
TEACHER = [
    {"name": "attention", "train": "qt", "objective": "attention"},
    {"name": "logits", "objective": "logits"},
]


@pytest.fixture(scope="session")
def base(text_folder, tmp_path_factory):
    """The folder of a small trained rotary model with grouped heads."""
    folder = tmp_path_factory.mktemp("base")
    path = folder / "base.yaml"
    content = {
        "model": {
            "attention": "rope",
            "body": "llama",
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "num_key_value_heads": 2,
        },
        "data": {"source": str(text_folder), "vocab_size": 300, "block_length": 16},
        "training": {**TRAINING, "steps": 40},
    }
    path.write_text(yaml.safe_dump(content))
    return train(load_recipe(path), folder / "run")


TRAINING = {
    "steps": 6,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "precision": "float32",
    "learning_rate": 1e-2,
    "save_every": 2,
    "log_every": 2,
    "report_to": [],
}


def write_recipe(base, text_folder, path, stages, **model):
    """Write a recipe file with stages; returns its path."""
    content = {
        "model": {"start": str(base), "attention": "slack", **model},
        "data": {"source": str(text_folder), "block_length": 16},
        "validation": {"every": 4, "batches": 2, "source": str(text_folder)},
        "training": TRAINING,
        "stages": stages,
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="session")
def straight(base, text_folder, tmp_path_factory):
    """The paper's three stages, uninterrupted: the recipe, the run folder, the blocks read."""
    folder = tmp_path_factory.mktemp("straight")
    path = write_recipe(base, text_folder, folder / "recipe.yaml", PAPER)
    read: list[int] = []
    plain = BlockDataset.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            BlockDataset,
            "__getitem__",
            lambda self, index: read.append(int(index)) or plain(self, index),
        )
        train(load_recipe(path, ["--validation.every", "null"]), folder / "unmeasured")
    train(load_recipe(path), folder / "run")
    # Measuring changes nothing in what is trained.
    assert changed(weights(folder / "unmeasured"), weights(folder / "run")) == set()
    return path, folder / "run", read


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(first, second) -> set[str]:
    """Names of the modules whose weights differ."""
    assert first.keys() == second.keys()
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name in first
        if not torch.equal(first[name], second[name])
    }


def assert_the_same(output, straight):
    assert changed(weights(output), weights(straight)) == set()
    ours, theirs = read_summary(output), read_summary(straight)
    assert ours["curve"] == theirs["curve"]
    assert ours["validation"] == theirs["validation"] and ours["start"] == theirs["start"]
    for name in ("first", "second"):
        assert changed(weights(output / "stages" / name), weights(straight / "stages" / name)) == (
            set()
        )
