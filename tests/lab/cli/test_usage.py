"""Help, usage errors, completion and unexpected ends of the command."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from coca_lab.cli import COMMANDS, completion, main
from commands import run


def test_overview_lists_every_command_with_its_docstring(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name, entry in COMMANDS.items():
        functions = entry.values() if isinstance(entry, Mapping) else [entry]
        assert name in out
        for function in functions:
            assert function.__doc__.splitlines()[0] in out
    assert run(capsys)[1] == out
    assert "perplexity" in run(capsys, "eval", "--help")[1]
    assert run(capsys, "--version")[1].startswith("coca 0.")


def test_the_fields_of_a_stage_have_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--stages.help"])
    assert stop.value.code == 0
    assert "Rank of the adapters of lora" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["quickstart"], ["--output", "--sizes.steps", "Optimizer steps of each model"]),
        (
            ["train"],
            [
                "--training.steps",
                "--model.attention",
                "AdamW's weight decay",
                "--extend Train",
                "--output",
            ],
        ),
        (["eval", "perplexity"], ["--windows", "--attend-last", "Tokens scored in one pass"]),
        (["generate"], ["--max-new-tokens", "prompt", "Tokens to generate at most"]),
        (["report"], ["--title", "HTML file to write"]),
    ],
)
def test_help_comes_from_the_fields(capsys, words, options):
    try:
        main([*words, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for option in options:
        assert option in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "coca has no command 'trian'; did you mean train?"),
        (["summon"], "no command 'summon'; choose one of quickstart, train"),
        (["eval", "vibes"], "coca eval has no command 'vibes'; choose one of perplexity"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such recipe"),
        (["train", "--output", "x"], "the recipe comes first"),
        (["quickstart", "--sizes.stepz", "3"], "--sizes.stepz; did you mean --sizes.steps?"),
        (["eval", "perplexity"], "missing MODEL: usage: coca eval perplexity MODEL"),
        (
            ["eval", "perplexity", "nowhere", "--windows", "a,b"],
            "--windows must be a list of",
        ),
        (["eval", "perplexity", "nowhere", "--windows", "64", "--stride", "65"], "not exceed"),
        (["eval", "perplexity", "nowhere"], "nowhere: no model could be loaded"),
        (["generate", "nowhere", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "nowhere", "x", "--window", "0"], "window must be at least 1 token"),
        (["report"], "give result files or folders first"),
        (["report", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("coca: error: ") and err.count("\n") == 1
    assert message in err


RECIPE = str(Path(__file__).parents[3] / "recipes" / "books-5m.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", RECIPE, "--model.bdy", "llama"], "option --model.bdy; did you mean --model.bod"),
        (
            ["train", RECIPE, "--model.body", "llamma"],
            "--model.body must be gpt_neox or llama, got 'llamma'; did you mean llama? (see coca",
        ),
        (["train", RECIPE, "--model.hidden-size", "x"], "--model.hidden-size must be a whole num"),
        (["train", RECIPE, "--model.attention", "strickt"], "'strickt'; did you mean strict?"),
        (["train", RECIPE, "--model.window"], "--model.window needs a value: a whole number or nu"),
        (["train", RECIPE, "--model.temperature", "x"], "must be true, false or null, got 'x'"),
        (["train", RECIPE, "--stages", "[{name: a, trian: t}]"], "no option 'trian'; did you mean"),
        (["train", RECIPE, "more"], "unexpected word 'more'"),
        (["eval", "needles", "m", "--kinds", "single,mlti-key"], "did you mean multi-key?"),
        (["bench", "--cases", "operater"], "did you mean operator?"),
    ],
)
def test_typing_errors_are_explained_and_not_blamed_on_the_file(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert "books-5m" not in err and "<class" not in err and "Union" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hiden_size: 3}", "model has no option 'hiden_size'; did you mean hidden_size?"),
        ("model: {hidden_size: x}", "model.hidden_size must be a whole number, got 'x'"),
        (
            "stages: [{name: a, train: tt}]",
            "stages.train must be t, qt, qtv, all or lora",
        ),
        ("model: {num_heads: 7, hidden_size: 8}", "model.hidden_size must be a multiple of num_he"),
    ],
)
def test_errors_of_a_file_are_blamed_on_it(capsys, tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for more in ([], ["--training.steps", "3"]):
        code, _, err = run(capsys, "train", path, *more)
        assert code == 2
        assert f"{path}: {message}" in err


def test_the_short_help_is_one_line_for_an_option_and_names_what_comes_first(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "perplexity", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: coca eval perplexity MODEL [options]\n")
    assert len(out.splitlines()) < 40 and "--windows INTEGER,…" in out
    with pytest.raises(SystemExit):
        main(["train", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: coca train RECIPE [options]\n") and len(out.splitlines()) < 45
    heads = [line for line in out.splitlines() if line.endswith(":")]
    assert heads[:2] == ["The model:", "The text:"] and heads[-1] == "Other options:"
    with pytest.raises(SystemExit):
        main(["eval", "suite", "--help"])
    out = capsys.readouterr().out
    assert "==SUPPRESS==" not in out and "<class" not in out and "ScalingSettings" not in out


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(ValueError, match="no such recipe"):
        main(["train", "nowhere.yaml", "--debug"])


def test_a_defect_is_one_line_too(capsys, monkeypatch):
    def broken(words):
        raise RuntimeError("one\ntwo")

    monkeypatch.setitem(COMMANDS, "report", broken)
    code, _, err = run(capsys, "report")
    assert code == 1
    assert err == (
        "coca: unexpected RuntimeError: one two (run again with --debug for the traceback)\n"
    )


def test_an_interrupt_says_so(capsys, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "report", interrupted)
    assert run(capsys, "report")[0] == 130


def test_completion_knows_commands_options_and_values(capsys):
    for command in completion.leaves(COMMANDS):
        assert completion.parser_of(command).options(), command.__doc__
    pytest.importorskip("shtab")
    code, out, err = run(capsys, "completion", "bash")
    assert code == 0, err
    for word in ("perplexity", "--model.body", "gpt_neox", "--output"):
        assert word in out
    assert "choose" not in run(capsys, "completion", "zsh")[2]
    assert "completion is for bash" in run(capsys, "completion", "fish")[2]


def test_a_terminal_without_unicode_gets_help_all_the_same():
    finished = subprocess.run(
        [sys.executable, "-m", "coca_lab.cli", "train", "-h"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.isascii() and b"--training.steps" in finished.stdout


def test_the_installed_program_runs():
    finished = subprocess.run(
        [sys.executable, "-m", "coca_lab.cli", "report"], capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith("coca: error: give result files or folders first")
