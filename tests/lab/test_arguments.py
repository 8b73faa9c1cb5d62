"""Settings from words and YAML: how people type them, and errors in one line."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from coca_attention.errors import UserError
from coca_lab.arguments import first_sentence, read_settings, settings_parser


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
    steps: list[Step] = field(default_factory=list)
    """What to do."""
    tasks: dict[str, object] = field(default_factory=dict)
    """Settings by task."""

    def check(self) -> None:
        self.part.check()


SECTIONS = {"task": (Part, "A task.")}


def read(path=None, words=()):
    return read_settings(Settings, path, words, kind="plan", program="coca x", sections=SECTIONS)


def test_words_as_people_type_them():
    words = ["--windows", "1,2", "--skip-short", "--part.batch-size=7", "--task.batch_size", "3"]
    settings = read(words=[*words, "--models", "{a-b_c: d}"])
    assert settings.windows == [1, 2] and settings.skip_short is True
    assert settings.part.batch_size == 7 and settings.tasks == {"task": Part(3)}
    assert settings.models == {"a-b_c": "d"}
    assert read().tasks == {} and read(words=["--skip-short", "false"]).skip_short is False


def test_help_has_hyphens_and_the_docstrings_of_the_fields():
    text = settings_parser(Settings, "coca x", SECTIONS).format_help()
    assert "--part.batch-size INT" in text and "Texts at once (default: 4)" in text
    assert "A task:" in text and "kind: Its kind." in text and "--skip-short  " in text


def test_every_mistake_is_told_at_once(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("part: {size: 0, batch_size: x}\nwindows: [a]\nskip_short: 7\n")
    with pytest.raises(UserError) as error:
        read(path)
    told = str(error.value)
    for name in ("part.size: there is", "part.batch_size: Input", "windows.0: ", "skip_short: "):
        assert told.count(name) == 1, told


def test_a_sentence_ends_at_its_own_full_stop():
    for text, first in (
        ("Passkeys (CoCA paper, App. B.1). More.", "Passkeys (CoCA paper, App. B.1)"),
        ("By default runs/NAME\n  for NAME.yaml. More", "By default runs/NAME for NAME.yaml"),
        ("No stop", "No stop"), ("(Unclosed. x", "(Unclosed"),
    ):  # fmt: skip
        assert first_sentence(text) == first


def test_short_help_has_the_fields_that_are_named_and_a_sentence_of_each():
    text = settings_parser(Settings, "coca x", SECTIONS, shown=["models"]).format_help()
    assert "--models" in text and "--part" not in text and "A task" not in text


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{}", "--skip-shirt", "--skip-shirt; did you mean --skip-short? (see coca x --help)"),
        ("{}", "--part.batch-size", "argument --part.batch-size: expected one argument"),
        ("{}", "more", "unrecognized arguments: more"),
        ("{}", "--windows [", "--windows: not readable"),
        ("{}", "--windows a", "windows.0: Input should be a valid integer, unable to parse"),
        ("{}", "--part.batch-size 0", "plan.yaml: batch_size must be at least 1"),
        ("{}", "--steps [{name: a, kind: quik}]", "steps.0.kind: Input should be 'slow' or 'quic"),
        ("{}", "--steps [{kind: quick}]", "steps.0.name: Field required"),
        ("part: {batch_size: 0}", "--skip-short", "batch_size must be at least 1"),
        ("part: {size: 0}", "", "part.size: there is no such field"),
        ("part: {batchsize: 0}", "", "part.batchsize: there is no such field; did you mean part.b"),
        ("part: {batch_size: ~}", "", "part.batch_size: Input should be a valid integer, got No"),
        ("part:", "--part.batch-size 3", "part: Input should be a dictionary or an instance of"),
        ("task: {size: 1}", "", "task.size: there is no such field"),
        ("prat: {}", "", "prat: there is no such field; did you mean part?"),
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
