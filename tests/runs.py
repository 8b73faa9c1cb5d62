"""Small training runs: their recipes, and what tests compare of them.

The fixtures ``trained``, ``base`` and ``staged`` are such runs, trained once for all tests: read
them, and copy the folder to change it.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml
from safetensors.torch import load_file
from transformers import TrainerCallback

from coca_lab.training import Recipe, load_recipe, read_summary
from coca_lab.training.folder import TOKENIZER
from coca_lab.training.texts import TrainingData, inputs_of, load_data

OPTIONS = {
    "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2,
    "data.vocab_size": 300, "data.block_length": 16, "data.held_out": 0.3,
    "validation.every": 5, "validation.batches": 1,
    "training.steps": 12, "training.global_batch_size": 4, "training.micro_batch_size": 2,
    "training.precision": "float32", "training.learning_rate": 1e-2,
    "training.save_every": 4, "training.log_every": 2, "training.report_to": "[tensorboard]",
}  # fmt: skip


def words(source, **changes) -> list[str]:
    """A small recipe as words of a command line; ``model__layers="lg"`` sets ``model.layers``."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    options = {**OPTIONS, "data.source": source, **named}
    return [f"--{name}={value}" for name, value in options.items()]


def recipe(source, **changes) -> Recipe:
    """A small recipe; changes as for `words`."""
    return load_recipe(None, words(source, **changes))


def data_of(recipe, tokenizer) -> TrainingData:
    """What a run of a recipe reads."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(Path(folder, TOKENIZER))
        return load_data(recipe, inputs_of(recipe), Path(folder))


PAPER = [
    {"name": "first", "train": "t"},
    {"name": "second", "train": "qtv", "learning_rate": 5e-3},
    {"name": "third", "train": "all", "steps": 5, "warmup_share": 0.5, "final_share": 1.0},
]
TEACHER = [
    {"name": "attention", "train": "qt", "objective": "attention"},
    {"name": "logits", "objective": "logits"},
]
BASE = {
    "model.attention": "rope", "model.body": "llama", "model.num_layers": 2, "model.num_heads": 4,
    "model.num_key_value_heads": 2, "data.held_out": 0.05, "validation.every": "null",
    "training.steps": 40, "training.report_to": "[]",
}  # fmt: skip
TRAINING = {
    "steps": 6, "global_batch_size": 4, "micro_batch_size": 2, "precision": "float32",
    "learning_rate": 1e-2, "save_every": 2, "log_every": 2, "report_to": [],
}  # fmt: skip


def write_recipe(base, text_folder, path, stages, **model):
    """Write the recipe of stages that start from a model; returns its path."""
    content = {
        "model": {"start": str(base), "attention": "slack", **model},
        "data": {"source": str(text_folder), "block_length": 16},
        "validation": {"every": 4, "batches": 2, "source": str(text_folder)},
        "training": TRAINING,
        "stages": stages,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def cells_of(results):
    """The cells of a result file, without the time they took."""
    found = json.loads(Path(results).read_text())["results"]
    return [{name: x for name, x in cell.items() if name != "seconds"} for cell in found]


class AtStep(TrainerCallback):
    """Calls a function at the end, or the beginning, of a step."""

    def __init__(self, step, call, begin=False):
        self.step, self.call, self.begin = step, call, begin

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step and not self.begin:
            self.call(model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step - 1 and self.begin:
            self.call(model)


class Record(TrainerCallback):
    """The steps that a run takes, with the name of its folder."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append((Path(args.output_dir).parent.name, state.global_step))


def unfinished(run, output, last=8):
    """A copy of a run as after a kill behind its checkpoint of a step."""
    shutil.copytree(run, output)
    for name in ("training.json", "model.safetensors", "config.json"):
        (output / name).unlink()
    for path in (output / "checkpoints").iterdir():
        if int(path.name.rpartition("-")[2]) > last:
            shutil.rmtree(path)
    return output


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


def assert_the_same(output, other):
    """The same weights to the last bit, in every stage, and the same figures."""
    ours, theirs = read_summary(output), read_summary(other)
    for name in ("curve", "validation", "start"):
        assert ours.get(name) == theirs.get(name)
    for stage in ("", *(f"stages/{each['name']}" for each in ours.get("stages", [])[:-1])):
        assert changed(weights(output / stage), weights(other / stage)) == set()
