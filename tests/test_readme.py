"""The README's Python and its commands are run, so that they cannot rot."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coca_lab.arguments import read_settings
from coca_lab.cli import main
from coca_lab.evaluation.perplexity import PerplexitySettings, load_text, tokens_needed
from coca_lab.intervals import FEW_DOCUMENTS
from coca_lab.training import load_recipe
from coca_lab.training.run import load_run_tokenizer
from conftest import some_text
from families import vanilla

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


# Words of the README's commands, and what the test has in their place.
SMALLER = {"stdlib": "books", "0.05": "0.999"}
SMALLER |= dict.fromkeys(("256,1024,4096", "256,1024,2048"), "512,1024")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.fixture
def workplace(tmp_path, monkeypatch, tokenizer):
    """A folder with what the README's examples speak of: a model, and books."""
    vanilla("Llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "MODEL")
    tokenizer.save_pretrained(tmp_path / "MODEL")
    (tmp_path / "books").mkdir()
    for index in range(3):
        (tmp_path / "books" / f"{index}.txt").write_text(some_text(3000, seed=index))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_examples_run(workplace):
    """Each block as it is, in a process of its own: the second loads what the first has saved."""
    outputs = []
    for block in blocks("python"):
        run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    _, loaded, operator = outputs
    assert loaded.startswith("Once upon a time") and len(loaded) > 20
    assert operator == "torch.Size([1, 8, 1000, 64])\n"


def coca_commands() -> list[list[str]]:
    return [
        shlex.split(line.replace("\\\n", " "), comments=True)
        for block in blocks("sh")
        for line in re.split(r"(?<!\\)\n", block)
        if line.startswith("coca ")
    ]


@pytest.mark.slow
def test_the_perplexity_command_reads_enough_documents_for_an_interval(tmp_path):
    """Of those that the training leaves out, by its tokenizer."""
    (words,) = (words for words in coca_commands() if words[1:3] == ["eval", "perplexity"])
    recipe = load_recipe("passkey-1m")
    settings = read_settings(PerplexitySettings, None, words[4:-2])
    assert words[-2] == "--output" and settings.held_out == recipe.data.held_out
    tokenizer = load_run_tokenizer(recipe, tmp_path)
    documents = load_text(settings, tokenizer, at_least=tokens_needed(settings))
    assert len(documents) >= FEW_DOCUMENTS


def test_coca_commands_run(workplace, capsys):
    commands = coca_commands()
    kinds = {command[1] for command in commands}
    assert kinds == {"train", "eval", "report"}
    for command in commands:
        if command[1] == "train":
            recipe = Path(__file__).parents[1] / command[2]
            small = [
                "--model.num_layers=3", "--model.hidden_size=16", "--model.num_heads=2",
                "--data.vocab_size=300", "--data.max_tokens=3000", "--data.source=books",
                "--data.passkey_share=0", "--training.steps=2",
                "--training.global_batch_size=4", "--training.micro_batch_size=4",
                "--training.report_to=[]", "--training.precision=float32",
            ]  # fmt: skip
            command = [*command[:2], str(recipe), *command[3:], *small]
        command = [SMALLER.get(word, word) for word in command]
        assert main(command[1:]) == 0, capsys.readouterr().err
