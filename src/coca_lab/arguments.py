"""Settings from YAML files and command lines: documented dataclasses, read by jsonargparse."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from coca_attention.errors import UserError, did_you_mean

Settings = TypeVar("Settings")
MOST_VALUES = 100_000
"""Of a YAML file: a few lines of aliases of aliases can stand for billions."""


class SettingsParser(ArgumentParser):
    """jsonargparse's parser, for words as people type them, with errors as UserError.

    Options can be written with hyphens, flags without a value, and lists as ``1,2``.

    Attributes:
        types: Types of all options by their names with underscores.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        self.types: dict[str, Any] = {}
        # jsonargparse makes parsers of this class for nested settings, with arguments of its own.
        defaults: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(*args, **defaults | kwargs)

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """As in jsonargparse; records the types of the options."""
        self.types |= option_types(theclass, f"{args[0]}." if args else "")
        return super().add_class_arguments(theclass, *args, **kwargs)

    def add_section(self, name: str, theclass: type, summary: str) -> None:
        """Add an optional section: a dataclass whose options are ``--name.field``."""
        self.types |= {name: theclass | None} | option_types(theclass, f"{name}.")
        self.add_argument(f"--{name}", type=theclass | None, default=None, help=summary)

    def format_help(self) -> str:
        """jsonargparse's help, with hyphens in the names of options."""
        return re.sub(r"--\w[\w.]*", lambda found: hyphens(found[0]), super().format_help())

    def read(self, words: Sequence[str]) -> Any:
        """A namespace of the strings and dataclasses that words of a command line say.

        Raises:
            UserError: If an option is unknown or a value is invalid, in one line.
            SystemExit: After printing help.
        """
        try:
            read = self.instantiate(self.parse_args(self._typed(list(words))))
        except (ArgumentError, ValueError) as error:  # the latter from nested dataclasses
            self._explain(" ".join(str(error).split()), error)
        _refuse_null(read, self.types)
        return read

    def _explain(self, text: str, cause: Exception) -> NoReturn:
        """Raise UserError with the message of jsonargparse, and the option that was meant."""
        if wrong := re.search(
            r"(Input should .*?) \[type=\w+, input_value=(.*?), input_type", text
        ):
            # pydantic's message, inside those of jsonargparse
            path = ".".join(re.findall(r'[Kk]ey "([^"]*)"', text))
            raise UserError(f"{path}: {wrong[1]}, got {wrong[2]} (see {self.prog} --help)")
        text = re.sub(r"<class '(\w+)'>|typing\.", lambda found: found[1] or "", text)
        if unknown := re.search(r"unrecognized arguments: (--[^\s=]+)", text):
            known = [hyphens(f"--{name}") for name in self.types]
            word = hyphens(unknown[1])
            text = f"unrecognized arguments: {word}{did_you_mean(word, known)}"
        elif optional := re.search(r"Errors: - (.*) - Expected a NoneType", text):
            text = optional[1]
        elif choice := re.search(r"Literal\[(.*?)\].* [Vv]alue: (\S+)", text):
            text += did_you_mean(choice[2], re.findall(r"'([^']*)'", choice[1]))
        raise UserError(f"{text} (see {self.prog} --help)") from cause

    def _typed(self, words: list[str]) -> list[str]:
        """``--attend-last 8 --skip-short --windows 1,2`` as jsonargparse expects it.

        That is ``--attend_last 8 --skip_short=true --windows=[1,2]``.
        """
        typed: list[str] = []
        while words:
            word = words.pop(0)
            if not word.startswith("--"):
                typed.append(word)
                continue
            name, equals, value = word[2:].partition("=")
            name = self._field(name)
            kind = self.types.get(name)
            follows = bool(words) and not words[0].startswith("--")
            if not equals and kind is bool and (not follows or words[0] not in ("true", "false")):
                equals, value = "=", "true"
            elif not equals and follows and _is_list(kind):
                equals, value = "=", words.pop(0)
            if equals and _is_list(kind) and value[:1] != "[" and value != "null":
                value = f"[{value}]"
            typed.append(f"--{name}{equals}{value}")
        return typed

    def _field(self, option: str) -> str:
        """``data.held-out`` with underscores; the keys of a dictionary are as they are."""
        parts: list[str] = []
        for part in option.split("."):
            kinds = _alternatives(self.types.get(".".join(parts)))
            is_key = any(get_origin(kind) is dict for kind in kinds)
            parts.append(part if is_key else part.replace("-", "_"))
        return ".".join(parts)


def settings_parser(
    theclass: type,
    program: str,
    kind: str,
    sections: Mapping[str, tuple[type, str]] | None = None,
) -> SettingsParser:
    """The parser of YAML files and overrides, whose help comes from the documented fields.

    Args:
        theclass: The dataclass; with sections, one with a field ``tasks``.
        program: The command, for messages and help.
        kind: What such a file is called.
        sections: Optional sections by name: the dataclass of their fields, and a line of help.
    """
    parser = SettingsParser(program)
    parser.add_argument(f"--{kind}", action="config", help="YAML file; also the first argument.")
    parser.add_class_arguments(theclass, skip=set() if sections is None else {"tasks"})
    for name, (section, summary) in (sections or {}).items():
        parser.add_section(name, section, summary)
    return parser


def read_settings(
    theclass: type[Settings],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    kind: str = "settings",
    program: str = "coca",
    sections: Mapping[str, tuple[type, str]] | None = None,
) -> Settings:
    """An instance of a documented dataclass from a YAML file and words of a command line.

    Args:
        theclass: The dataclass. If it has a method ``check``, it is called.
        path: YAML file; None for the defaults.
        overrides: Words such as ``["--training.steps", "100"]``.
        kind: What such a file is called in messages.
        program: The command, for messages.
        sections: As for `settings_parser`: those that are set become the field ``tasks``.

    Raises:
        UserError: If the file is missing or malformed, a key is unknown, or a value is invalid.
            The message begins with the file's name unless the file alone is without error.
    """
    names = [item.name for item in fields(theclass)]  # pyright: ignore[reportArgumentType]
    if sections is not None:
        names.remove("tasks")

    def make(words: list[str]) -> Settings:
        read = settings_parser(theclass, program, kind, sections).read(words)
        values = {name: read[name] for name in names}
        if sections is not None:
            values["tasks"] = {name: read[name] for name in sections if read[name] is not None}
        settings: Any = theclass(**values)
        if hasattr(settings, "check"):
            settings.check()
        return settings

    if path is None:
        return make(list(overrides))
    if not Path(path).is_file():
        raise UserError(f"{path}: no such {kind}; the project's own are in its folders of YAML")
    types = get_type_hints(theclass)
    for name, value in read_yaml(path, kind, [*names, *(sections or ())]).items():
        if is_dataclass(types.get(name)) and not isinstance(value, dict):
            raise UserError(f"{path}: section {name} needs fields and values, got {value!r}")
    file = [f"--{kind}={path}"]
    try:
        return make([*file, *overrides])
    except UserError as error:
        if overrides and _message(make, file) != str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def _message(make: Any, words: list[str]) -> str | None:
    """The message of the UserError that ``make`` raises."""
    try:
        make(words)
    except UserError as error:
        return str(error)
    return None


class _Loader(yaml.SafeLoader):
    """YAML in which a key may be given once, and aliases repeat values within reason.

    Other loaders keep the last of several equal keys without a word.
    """

    def get_single_node(self) -> Any:
        root = super().get_single_node()
        left, nodes = MOST_VALUES, [] if root is None else [root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.MappingNode):
                nodes += [each for pair in node.value for each in pair]
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
            left -= 1
            if len(nodes) > left:
                raise UserError(f"more than {MOST_VALUES:,} values, with those that aliases repeat")
        return root

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise UserError(f"line {line}: {key.value} is given twice in one mapping")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, kind: str, known: list[str]) -> dict[str, Any]:
    """The content of a YAML file whose sections are known.

    Args:
        path: The file.
        kind: What to call it in messages.
        known: Names of its sections.

    Raises:
        UserError: If the file is not readable YAML, not a mapping, or has an unknown section.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not set(content) <= set(known):
        there = ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)
        there = "an empty file" if content is None else there
        raise UserError(f"{path}: a {kind} has the sections {', '.join(known)}; got {there}")
    for name, value in content.items():
        if value is None:
            raise UserError(f"{path}: section {name} needs fields and values, got None")
    return content


def hyphens(option: str) -> str:
    """An option with hyphens instead of the underscores of field names."""
    return option.replace("_", "-")


def option_types(theclass: Any, prefix: str = "") -> dict[str, Any]:
    """Type of every option of a dataclass, those of nested dataclasses as ``section.field``."""
    types: dict[str, Any] = {}
    for name, annotation in get_type_hints(theclass).items():
        types[prefix + name] = annotation
        for kind in _alternatives(annotation):
            if is_dataclass(kind):
                types |= option_types(kind, f"{prefix}{name}.")
    return types


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_list(annotation: Any) -> bool:
    """Whether a type is a list of numbers or words, which may be None."""
    return any(
        get_origin(kind) is list and not any(map(is_dataclass, get_args(kind)))
        for kind in _alternatives(annotation)
    )


def _refuse_null(read: Any, types: dict[str, Any], prefix: str = "") -> None:
    """Raise UserError for null where a value is needed; jsonargparse takes it in files."""
    for name, value in vars(read).items():
        kind = types.get(prefix + name, Any)
        if value is None and kind is not Any and type(None) not in _alternatives(kind):
            raise UserError(f"{prefix}{name} needs a value, got null")
        for item in value if isinstance(value, list) else ():
            if is_dataclass(item):
                _refuse_null(item, option_types(type(item)))
        if is_dataclass(value):
            _refuse_null(value, types, f"{prefix}{name}.")
