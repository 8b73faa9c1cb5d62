"""Help, usage errors and unexpected ends of the command."""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from transformers.utils.import_utils import is_serve_available

import coca_lab
from coca_lab.cli import COMMANDS, evaluation, load, main, recipes, report
from coca_lab.cli.parsing import FILES, OPTIONS, command_parser
from coca_lab.options import option_names
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.yaml_files import FILE_KINDS, shipped
from commands import run


def test_the_overview_lists_every_command_in_groups(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and run(capsys)[1] == out
    for group, table in COMMANDS.items():
        assert f"\n{group}:\n" in out
        for name, (_, line) in table.items():
            assert f"  {name} " in out and line in out
            assert load(name).__doc__
    shown = run(capsys, "eval", "--help")[1]
    for name, options in TASK_OPTIONS.items():
        assert f"  {name:<12} {options.summary}\n" in shown
    assert run(capsys, "--version")[1].startswith("coca 0.")
    assert "--version\n" in out and "\ncoca help COMMAND lists" in out
    assert "--version" not in shown and "\ncoca help eval COMMAND lists" in shown
    assert next(iter(COMMANDS["start here"])) == "extend"  # as README does


@pytest.mark.parametrize("words", [[], ["extend"], ["eval"], ["eval", "perplexity"]])
def test_help_is_a_command_too(words, capsys):
    shown = []
    for each in (["help", *words], [*words, "--help"]):
        with contextlib.suppress(SystemExit):
            assert main(each) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "usage: coca" in shown[0]


def test_a_help_or_a_wrong_option_waits_for_no_large_import():
    names = [name for table in COMMANDS.values() for name in table]
    words = [["--help"], *([name, "-h"] for name in names)]
    words += [["eval", task, "-h"] for task in TASK_OPTIONS] + [["extend", "--methd"]]
    slow = ("torch", "transformers", "scipy", "pandas", "pyarrow", "huggingface_hub")
    program = f"""
import contextlib, sys
from coca_lab.cli import main
for words in {words}:
    with contextlib.suppress(SystemExit):
        main(words)
print([name for name in {slow} if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.endswith("[]\n"), shown.stderr
    assert "did you mean --method?" in shown.stderr


def test_a_wrong_path_waits_for_no_large_import(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    full, empty, model = (str(tmp_path / name) for name in ("full", "empty", "model"))
    wrong = {
        "there is no such folder; check": [
            ["extend", f"{tmp_path}/a", "x"], ["info", "./nope"], ["serve", "../nope"],
            ["export", "~/no/pe", "x"], ["eval", "passkey", "a/b/c"],
            ["generate", f"{tmp_path}/b", "a"],
        ],
        "it has no config.json; name the folder that save_pretrained": [
            ["extend", full, "x"], ["export", full, "x"], ["eval", "perplexity", empty],
        ],
        "is a file or has content": [["extend", model, full], ["export", model, full]],
        "cannot be read: No such file": [["report", f"{tmp_path}/a.json"]],
        "error: nowhere: no such file, folder or glob; known types": [
            ["extend", model, "x", "--check", "nowhere"],
            *(["eval", task, model, "--source", "nowhere"] for task in ("perplexity", "ruler")),
        ],
        "data.source: nowhere: no such": [["train", "native-1m", "--data.source", "nowhere"]],
        "expected hf:NAME, hf:": [["train", "native-1m", "--validation.source", "hf:"]],
        "nope: no such study": [["study", "nope"]],
        "nope: no such recipe": [["train", "nope"]],
        "name one with --method": [["extend", model, "x", "--near", "8"]],
        "--form is missing": [["convert", model, "x"]],
    }  # fmt: skip
    words = [each for several in wrong.values() for each in several]
    program = f"""
import sys
from coca_lab.cli import main
print([main(words) for words in {words}])
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=empty,  # where ../nope is not there
        capture_output=True,
        text=True,
    )
    assert shown.stdout == f"{[2] * len(words)}\n[]\n", shown.stderr
    for message, several in wrong.items():
        assert shown.stderr.count(message) == len(several), shown.stderr


def test_a_device_that_is_not_there_is_refused_before_transformers_is_imported(tmp_path):
    (tmp_path / "config.json").touch()
    here = str(tmp_path)
    words = [
        ["eval", "passkey", here], ["extend", here, "x", "--check", "stdlib"], ["serve", here],
        ["generate", here, "a"],
    ]  # fmt: skip
    program = f"""
import sys
from coca_lab.cli import main
print([main([*words, "--device", "nosuch"]) for words in {words}], "transformers" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "[2, 2, 2, 2] False\n", shown.stderr
    assert shown.stderr.count("--device 'nosuch' is no device of torch") == 4


def test_without_the_extra_one_line_says_what_to_install():
    program = (
        "import sys; sys.modules['pydantic'] = None; from coca_lab import main; "
        "sys.argv[1:] = ['train', 'recipe.yaml']; sys.exit(main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "pydantic" in ended.stderr and "[lab]" in ended.stderr


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["study"], ["--output", "--workers", "--ray", "Seeds of the training", "NAME|STUDY.yaml"]),
        (
            ["train"],
            [
                "--training.steps",
                "Peak learning rate",
                "--output",
                "usage: coca train NAME|RECIPE",
                "recipe Name of a recipe that coca recipes lists, or a YAML file.",
            ],
        ),
        (["train", "--help-all"], ["AdamW's weight decay", "--stages.help"]),
        (["train", "--stages.help"], ["Rank of the adapters of lora"]),
        (["eval", "perplexity"], ["--windows", "--attend-last", "Tokens scored in one pass"]),
        (["generate"], ["--max-new-tokens", "PROMPT", "Tokens to generate at most"]),
        (["report"], ["--title", "HTML file to write"]),
    ],
)
def test_help_comes_from_the_fields(capsys, words, options):
    with pytest.raises(SystemExit) as stop:
        main(words if "help" in words[-1] else [*words, "--help"])
    out = " ".join((lines := capsys.readouterr().out).split())
    assert "FieldInfo" not in out
    if words == ["train"]:
        assert lines.count("\n") <= 60 and max(map(len, lines.splitlines())) <= 80
    assert stop.value.code == 0
    for option in options:
        assert option in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "coca has no command 'trian'; did you mean train?"),
        (["recipes", "nativ"], "is called nativ; did you mean native or native-1m or native-350m"),
        (["train", "nativ"], "no such recipe; did you mean native-1m or native-350m or"),
        (["train", "small"], "no such recipe; it is a study: coca study small"),
        (["study", "native-1m"], "no such study; it is a recipe: coca train native-1m"),
        (["convert", "x", "y", "--form", "stric"], "error: --form must be one of slack, "),
        (["convert", "x", "y", "--attention", "strict"], "--attention; it is called --form here ("),
        (["convert", "x", "y", "--form", "rope", "--free-pairs", "3"], "leave out --free-pairs"),
        (["convert", "x", "y", "--form", "strict", "--roles.window", "1"], "--roles.window must"),
        (["generate", "x", "y", "--top-p", "0.5"], "--top-p and --top-k are for draws"),
        (["summon"], "no command 'summon'; choose one of extend"),
        (["eval", "vibes"], "coca eval has no command 'vibes'; choose one of perplexity"),
        (
            ["train", "--output", "x"],
            "the recipe comes first, a name that coca recipes lists or a file: c",
        ),
        (["study"], "the study comes first, a name that coca recipes lists or a file: coca"),
        (["train", "books-5m", "--model.bdy", "llama"], "--model.bdy; did you mean --model.body?"),
        (["study", "quickstart", "--seedz", "3"], "--seedz; did you mean --seeds?"),
        (
            ["eval", "perplexity", "x", "--windows", "64;128"],
            "--windows: must be a whole number, got 64;128: separate numbers by commas, as",
        ),
        (
            ["extend", "x", "y", "--method", "yarnn"],
            "got yarnn; did you mean yarn? (see coca extend",
        ),
        (
            ["eval", "perplexity", "x", "--factor", "b"],
            "--factor: must be a valid number, got b (see",
        ),
        (
            ["serve", "x", "--port", "0"],
            "--port: must be greater than or equal to 1, got 0 (see coca",
        ),
        (
            ["study", "small", "--perplexity.windows", "a"],
            "--perplexity.windows: must be a whole number, got a (see",
        ),
        (["eval", "perplexity"], "arguments are required: model"),
        (["eval", "perplexity", "x", "--windows", "8", "--stride", "9"], "error: --stride must be"),
        (["eval", "perplexity", "nowhere"], "nowhere: there is no such folder here"),
        (["report"], "arguments are required: results"),
        (["report", "nowhere.json"], "nowhere.json: cannot be read: No such file"),
        (["extend", "x", "y", "--options", "beta_fast=64"], "write '{beta_fast: 64}' (see coca ex"),
        (
            ["extend", "x", "y", "--to", "12k"],
            "--to: must be a whole number, got 12k: write digits alone, as in 12288 (see",
        ),
        (["extend", "x", "y", "--to", "12,288"], "got 12,288: write digits alone, as in 12288"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("coca: error: ") and err.count("\n") == 1
    assert message in err and "base-books-5m" not in err and "<class" not in err


def test_a_field_of_a_recipe_that_was_typed_is_named_as_it_was(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    words = [
        "train",
        "native-1m",
        "--output",
        tmp_path / "run",
        "--data.source",
        tmp_path / "a.txt",
    ]
    words += ["--validation.every", "null", "--data.passkey-share", "0", "--training.precision"]
    words += ["float32", "--validation.passkeys", "0", "--validation.needles", "0"]
    assert "or a shorter `block_length`" in run(capsys, *words)[2]
    assert "or a shorter --data.block-length\n" in run(capsys, *words, "--data.block-length", 64)[2]


def test_messages_name_options_in_backticks_by_which_they_are_shown_as_typed():
    """Those of two words, which no prose has; of a recipe as a whole, its fields by their names."""
    commands = [*OPTIONS, *FILES, *(f"eval {task}" for task in TASK_OPTIONS)]
    fields = {name for each in commands for name in option_names(command_parser(each, ""))}
    names = {name.rpartition(".")[2] for name in fields if "_" in name}
    bare = re.compile(rf"(?<![`\w.-])({'|'.join(names)})(?![`\w])")
    found = []
    for path in Path(coca_lab.__file__).parent.rglob("*.py"):
        if path.name != "recipe.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_message = isinstance(node, ast.Raise) or (
                    isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log.")
                )
                for part in ast.walk(node) if is_message else ():
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        found += [(path.name, part.value)] if bare.search(part.value) else []
    assert found == []


def test_a_recipe_is_printed_by_the_name_of_its_file_too(capsys):
    shown = run(capsys, "recipes", "native-1m")
    assert shown[0] == 0 and "model:" in shown[1]
    for name in ("native-1m.yaml", "recipes/native-1m.yaml", "recipes/native-1m"):
        assert run(capsys, "recipes", name) == shown


@pytest.mark.parametrize("command", ["train", "study", "recipes"])
def test_an_unknown_recipe_or_study_lists_those_that_there_are(command, capsys):
    code, _, err = run(capsys, command, "nowhere")
    assert code == 2 and "one of " in err
    assert ("native-1m, " in err) == (command != "study")
    assert ("quickstart, " in err) == (command != "train")


def test_ctrl_c_while_a_command_is_imported_ends_in_one_line():
    """Which torch's extension modules would turn into an abort with a message of C++."""
    code = (
        "import os, signal, sys\n"
        "from coca_lab.cli import ends_at_once\n"
        "with ends_at_once('nothing was done'):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "coca: interrupted: nothing was done\n")


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="no such recipe"):
        main(["train", "nowhere.yaml", "--debug"])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("one\ntwo"), 1, "coca: unexpected RuntimeError: one two (run again with --d"),
        (KeyboardInterrupt(), 130, "coca: interrupted: the same command goes on"),
    ],
)
def test_a_defect_and_an_interrupt_are_one_line_too(capsys, monkeypatch, error, code, message):
    def broken(*_):
        raise error

    monkeypatch.setattr(evaluation, "study_command", broken)
    ended, _, err = run(capsys, "study", "small")
    assert ended == code and err.startswith(message) and err.count("\n") == 1


def test_what_saves_nothing_does_not_speak_of_it(capsys, monkeypatch):
    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "report_command", broken)
    assert run(capsys, "report", "x") == (130, "", "coca: interrupted: nothing is saved\n")


def test_a_terminal_without_unicode_gets_help_all_the_same(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit):
        main(["train", "-h"])
    sys.stdout.flush()
    assert b"--training.steps" in written.getvalue() and b"\\u" in written.getvalue()


@pytest.mark.parametrize("width", [20, 80])
def test_the_list_of_recipes_fits_the_terminal_in_indented_lines(capsys, monkeypatch, width):
    whole = run(capsys, "recipes", "--all")[1]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = run(capsys, "recipes", "--all")[1]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and out.split() == whole.split()
    names = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    assert sorted(names) == sorted(name for kind in FILE_KINDS for name in shipped(kind))
    first = [name for kind in FILE_KINDS for name in recipes.FIRST[kind]]
    assert names[: len(first)] == first and names[0] == "native-1m"
    more = [line for line in lines if re.match(r"   ", line)]
    assert more and all(re.match(r" {32}\S", line) for line in more)
    # Without the option those alone, and how many more there are.
    lines = run(capsys, "recipes")[1].splitlines()
    assert [line.split()[0] for line in lines if re.match(r"  \S", line)] == first
    count = len(names) - len(first)
    assert f"coca recipes --all lists {count} more, which repeat" in " ".join(lines)


def test_descriptions_in_the_list_of_recipes_are_short():
    """They had up to 261 characters."""
    for kind in FILE_KINDS:
        for path in shipped(kind).values():
            assert len(recipes.purpose(path)) <= 150, path


def test_a_pipe_gets_the_whole_lines_of_the_list_of_recipes(capsys):
    out = run(capsys, "recipes", "--all")[1]
    assert "…" not in out and all(
        recipes.purpose(path) in out for path in shipped("recipe").values()
    )


def test_a_name_that_is_no_folder_is_looked_up_once(capsys, monkeypatch):
    """Transformers tries again for 23 seconds where the Hub does not answer."""
    asked = []

    def unreachable(self, name, **options):
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    commands = [["eval", "passkey", "nosuchmodel"], ["info", "nosuch-2"]]
    commands += [["serve", "nosuch"]] if is_serve_available() else []  # an extra
    for words in commands:
        code, _, err = run(capsys, *words)
        assert code == 2 and "there is no such folder here" in err and "no route" in err
    assert asked == [words[-1] for words in commands]


@pytest.mark.parametrize("name", ["SmolLM2-135M", "owner/SmolLM2-135M"])
def test_a_name_without_an_owner_that_the_hub_does_not_know_says_what_names_have(
    name, capsys, monkeypatch
):
    def unknown(self, name, **options):
        raise RepositoryNotFoundError("404", response=Mock())

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unknown)
    code, _, err = run(capsys, "info", name)
    assert code == 2 and "the Hub has no such model, or it is private" in err
    assert ("most names there are OWNER/NAME" in err) == ("/" not in name)


PIPES = """
import sys
from coca_lab import cli

def command(*words):
    if words[0] == "print":
        print("x" * 10**6)
    else:
        raise BrokenPipeError(32, "Broken pipe")

cli.load = lambda name: command
sys.exit(cli.main(["recipes", *sys.argv[1:]]))
"""


def test_exit_0_means_done_where_a_pipe_breaks():
    """The reader of the output may leave, as head does; a worker or a server may not."""
    words = [sys.executable, "-c", PIPES]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    with subprocess.Popen([*words, "print"], **streams) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 141 and process.stderr.read() == b""
    process = subprocess.run([*words, "other"], **streams)
    assert process.returncode == 2 and b"coca: error: Broken pipe" in process.stderr
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            process = subprocess.run([*words, "print"], **streams | {"stdout": full})
        assert process.returncode == 2 and b"No space left" in process.stderr
