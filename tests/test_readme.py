"""The README's Python and its commands are run, so that they cannot rot."""

import re
import shlex
from pathlib import Path

import pytest

from coca_lab.cli import main
from conftest import some_text, tiny_model
from families import CELLS, readme_table, vanilla

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_table_of_families_is_what_the_tests_say():
    """Each of its marks is a test in tests/models/test_families.py, which fails where it lies."""
    table = README.partition("<!-- families -->\n")[2].partition("\n<!-- /families -->")[0]
    assert table == readme_table(set(CELLS)), "run scripts/family_table.py"


@pytest.fixture
def workplace(tmp_path, monkeypatch, tokenizer):
    """A folder with what the README's examples speak of: a quickstart's models, and books."""
    for name, made in (("CoCA-Strict", tiny_model("strict")), ("RoFormer", vanilla("GPT-NeoX"))):
        folder = tmp_path / "runs" / "quickstart" / name
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (tmp_path / "books").mkdir()
    for index in range(3):
        (tmp_path / "books" / f"{index}.txt").write_text(some_text(3000, seed=index))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_examples_run(workplace):
    found = blocks("python")
    assert len(found) >= 3
    for block in found:
        exec(compile(block, "README.md", "exec"), {})


def test_coca_commands_run(workplace, capsys):
    commands = [
        shlex.split(line.replace("\\\n", " "), comments=True)
        for block in blocks("sh")
        for line in re.split(r"(?<!\\)\n", block)
        if line.startswith("coca ")
    ]
    kinds = {command[1] for command in commands}
    assert kinds == {"convert", "train", "eval", "analyze", "generate", "report", "info"}
    for command in commands:
        if command[1] == "train":
            recipe = Path(__file__).parents[1] / command[2]
            small = [
                "--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2",
                "--data.vocab_size=300", "--data.max_tokens=3000", "--training.steps=2",
                "--training.global_batch_size=4", "--training.micro_batch_size=4",
                "--training.report_to=[]", "--training.precision=float32",
            ]  # fmt: skip
            command = [*command[:2], str(recipe), *command[3:], *small]
        assert main(command[1:]) == 0, capsys.readouterr().err
