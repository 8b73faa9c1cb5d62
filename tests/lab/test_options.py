"""Settings from words and YAML: how people type them, and errors in one line."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import yaml

from coca_attention.errors import UserError
from coca_lab.options import first_sentence, option_parser, read_settings
from coca_lab.yaml_files import dump_yaml, load_yaml


@dataclass
class Step:
    """A step."""

    name: str
    """Its name."""
    kind: Literal["slow", "quick"] = "slow"
    """Its kind."""


@dataclass
class Part:
    """A part of the settings."""

    batch_size: int = 4
    """Texts at once."""

    def check(self) -> None:
        if self.batch_size < 1:
            raise UserError("batch_size must be at least 1")


@dataclass
class Settings:
    """Settings of something."""

    part: Part = field(default_factory=Part)
    """The part."""
    windows: list[int] | None = None
    """Windows to read."""
    models: dict[str, str] = field(default_factory=dict)
    """Folders by name."""
    skip_short: bool = False
    """Whether to leave out short texts."""
    name: str = ""
    """Its name."""
    free: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    steps: list[Step] = field(default_factory=list)
    """What to do."""
    tasks: dict[str, object] = field(default_factory=dict)
    """Settings by task."""

    def check(self) -> None:
        self.part.check()


SECTIONS = {"task": Part}


def read(path=None, words=()):
    return read_settings(Settings, path, words, kind="plan", program="coca x", sections=SECTIONS)


def test_words_as_people_type_them():
    words = ["--windows", "1,2", "--skip-short", "--part.batch-size=7", "--task.batch_size", "3"]
    settings = read(words=[*words, "--models", "{a-b_c: d}"])
    assert settings.windows == [1, 2] and settings.skip_short is True
    assert settings.part.batch_size == 7 and settings.tasks == {"task": Part(3)}
    assert settings.models == {"a-b_c": "d"}
    assert read(words=["--windows", "1", "--windows+", "2,3"]).windows == [1, 2, 3]
    assert read().tasks == {} and read(words=["--skip-short", "false"]).skip_short is False


def test_help_has_hyphens_and_the_docstrings_of_the_fields():
    text = option_parser("coca x", [Settings], SECTIONS).format_help()
    assert "--part.batch-size INT" in text and "Texts at once (default: 4)" in text
    assert (
        "--steps.help" in text
        and "--skip-short {true,false}  " in text
        and "--windows INT,…" in text
    )
    assert "tasks" not in text


def test_the_help_of_a_field_with_fields_of_its_own(capsys):
    with pytest.raises(SystemExit):
        read(words=["--steps.help"])
    assert "--steps.kind {slow,quick}  Its kind (default: slow)" in capsys.readouterr().out


def test_a_section_may_be_empty_and_is_one_of_file_and_words(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("task: {}\npart.batch_size: 3\n")
    assert read(path) == Settings(part=Part(3), tasks={"task": Part()})
    assert read(path, ["--task.batch-size", "2"]).tasks == {"task": Part(2)}


def test_a_sentence_ends_at_its_own_full_stop():
    for text, first in (
        ("Passkeys (CoCA paper, App. B.1). More.", "Passkeys (CoCA paper, App. B.1)"),
        ("By default runs/NAME\n  for NAME.yaml. More", "By default runs/NAME for NAME.yaml"),
        ("No stop", "No stop"), ("(Unclosed. x", "(Unclosed"),
    ):  # fmt: skip
        assert first_sentence(text) == first


def test_short_help_has_the_fields_that_are_named_and_a_sentence_of_each():
    text = option_parser("coca x", [Settings], SECTIONS, shown=["models"]).format_help()
    assert "--models" in text and "--part" not in text and "A task" not in text


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{}", "--skip-shirt", "there is no option --skip-shirt; did you mean --skip-short? (see"),
        ("{}", "--part.batch-size", "--part.batch-size: expected a value (see coca x --help)"),
        ("{}", "more", "unrecognized arguments: more (see coca x --help)"),
        ("{}", "--windows [", "--windows: expected list, got [ (see coca x --help)"),
        ("{}", "--windows a", "--windows: expected int, got a (see coca x --help)"),
        ("{}", "--windows 64;128", "--windows: expected int, got 64;128 (see coca x --help)"),
        ("{}", "--part.batch-size 0", "plan.yaml: batch_size must be at least 1"),
        (
            "{}",
            "--steps [{name: a, kind: quik}]",
            "--steps.kind: expected one of 'slow', 'quick', g",
        ),
        ("{}", "--steps [{name: a, kind: quik}]", "got quik; did you mean quick? (see coca x --h"),
        ("{}", "--steps [{kind: quick}]", "--steps: the following arguments are required: name"),
        ("{}", "--part.deep-size 3", "there is no option --part.deep-size; did you mean --part.b"),
        ("part: {batch_size: 0}", "--skip-short", "batch_size must be at least 1"),
        ("part: {size: 0}", "", "part.size: there is no such field"),
        ("part: {batchsize: 0}", "", "part.batchsize: there is no such field; did you mean part.b"),
        ("part: {batch_size: ~}", "", "part.batch_size: expected int, got None"),
        ("part: {batch_size: x}", "", "part.batch_size: expected int, got x"),
        ("part:", "--part.batch-size 3", "part: expected fields with their values, got None"),
        ("steps: [{size: 1}]", "", "steps.size: there is no such field"),
        ("steps: [3]", "", "steps: expected its fields, got 3"),
        ("task: {size: 1}", "", "task.size: there is no such field"),
        ("prat: {}", "", "prat: there is no such field; did you mean part?"),
        ("part.size: 3", "", "part.size: there is no such field"),
        ("tasks: {task: {}}", "", "tasks: every task has a section of its name"),
    ],
)
def test_errors_are_one_line_and_name_the_file(tmp_path, text, words, message):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read(path, words.split(maxsplit=1))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value) or "(see coca x --help)" in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), ("-1.5e+3", -1500.0), (".5", 0.5), ("1.", 1.0), ("0100", 100),
        ("0o17", 15), ("0x1F", 31), ("-7", -7), ("1:30", "1:30"), ("1:30.5", "1:30.5"),
        ("1_000", "1_000"), ("0b11", "0b11"), ("yes", "yes"), ("No", "No"), ("on", "on"),
        ("off", "off"), ("true", True), ("False", False), ("~", None), ("null", None),
        ("2026-01-02", "2026-01-02"), ("1.2.3", "1.2.3"), ("e5", "e5"), (".inf", float("inf")),
    ],
)  # fmt: skip
def test_numbers_are_what_people_mean(tmp_path, text, value):
    """In files and options, free mappings included; and what is written is read back."""
    path = tmp_path / "plan.yaml"
    path.write_text(f"free: {{x: {text}}}\n")
    assert load_yaml(text) == value
    assert type(load_yaml(text)) is type(value)
    assert read(path).free == {"x": value}
    assert read(words=["--free", f"{{x: {text}}}"]).free == {"x": value}
    assert read(words=["--name", text]).name == text
    assert load_yaml(dump_yaml({"x": text, "y": value})) == {"x": text, "y": value}


def test_yaml_that_older_readers_read_too():
    """PyYAML's own loader, for one."""
    values = {"a": "yes", "b": "1:30", "c": 1e-5, "d": "1e-5", "e": "0100", "f": "2026-01-02"}
    assert yaml.safe_load(dump_yaml(values)) == values


BOMB = "\n".join(
    ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1, a: 2}", "a is given twice"),
        (BOMB, "more than 100,000 values"),
        ("[" * 5000, "nested too deeply"),
        ("{a: [1", "line 1: "),
        ("{a: [1\n", "line 1: "),
        ("a: !!python/name:os.system", "could not determine a constructor"),
    ],
)
def test_yaml_that_cannot_be_read_is_one_line(text, message):
    with pytest.raises(UserError) as error:
        load_yaml(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
