"""Command-line options and YAML from documented dataclasses; errors in one line."""

import json
import re
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from coca_attention.errors import UserError


class OptionParser(ArgumentParser):
    """Options named with hyphens, with help from the docstrings below the fields."""

    def __init__(
        self, program: str | None = None, description: str | None = None, **kwargs: Any
    ) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        # jsonargparse makes parsers of this class for nested settings, with arguments of its own.
        kwargs = {"exit_on_error": False, "allow_abbrev": False, **kwargs}
        self.types: dict[str, Any] = {}
        super().__init__(prog=program, description=description, **kwargs)

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """As in jsonargparse; records the types of the options."""
        self.types |= option_types(theclass)
        return super().add_class_arguments(theclass, *args, **kwargs)

    def add_section(self, name: str, theclass: Any, summary: str) -> None:
        """Add an optional section: a dataclass whose options are ``--name.field``."""
        self.types |= option_types(theclass, f"{name}.")
        self.add_argument(f"--{name}", type=theclass | None, default=None, help=summary)

    def format_help(self) -> str:
        """The help, with hyphens instead of the underscores in field names."""
        return re.sub(
            r"--[a-z_.]+", lambda match: match[0].replace("_", "-"), super().format_help()
        )

    def read(self, words: list[str]) -> Any:
        """Parse words and instantiate the dataclasses.

        Args:
            words: Command-line words. Options can be written with hyphens or underscores, flags
                without a value, and lists as comma-separated words.

        Returns:
            A namespace of strings and dataclass instances.

        Raises:
            UserError: If an option is unknown or a value is invalid, in one line.
        """
        try:
            read = self.instantiate(self.parse_args(_as_fields(words, self.types)))
            _refuse_null(read, self.types)
            return read
        except ArgumentError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            text = ": ".join(dict.fromkeys(lines)) or type(error).__name__
            raise UserError(f"{text}; see {self.prog} --help") from error


def _refuse_null(read: Any, types: dict[str, Any], prefix: str = "") -> None:
    """Raise UserError for options that are null though their type needs a value."""
    for name, value in vars(read).items():
        kind = types.get(prefix + name, Any)
        if value is None and kind is not Any and type(None) not in _alternatives(kind):
            raise UserError(f"{prefix}{name} needs a value, got null")
        for item in value if isinstance(value, list) else ():
            if is_dataclass(item):
                _refuse_null(item, option_types(type(item)))
        if is_dataclass(value):
            _refuse_null(value, types, f"{prefix}{name}.")


def option_types(theclass: Any, prefix: str = "") -> dict[str, Any]:
    """Type of every option of a dataclass, those of nested dataclasses as ``section.field``."""
    found: dict[str, Any] = {}
    for name, annotation in get_type_hints(theclass).items():
        found[prefix + name] = annotation
        for kind in _alternatives(annotation):
            if is_dataclass(kind):
                found |= option_types(kind, f"{prefix}{name}.")
    return found


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_list_of_words(annotation: Any) -> bool:
    """Whether a type is a list of numbers or words, or such a list or None."""
    return any(
        get_origin(kind) is list
        and all(item in (int, float, str) or get_origin(item) is Literal for item in get_args(kind))
        for kind in _alternatives(annotation)
    )


def take_option(words: list[str], option: str) -> tuple[list[str], str | None]:
    """Remove ``option VALUE`` or ``option=VALUE`` from words; return the rest and the value."""
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            return words[:index] + words[index + 2 :], words[index + 1]
        if word.startswith(f"{option}="):
            return words[:index] + words[index + 1 :], word.split("=", 1)[1]
    return words, None


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key may be given once; others keep the last one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise UserError(f"line {line}: {key.value} is given twice in one mapping")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def check_sections(path: Path, kind: str, known: list[str]) -> dict[str, Any]:
    """Refuse unknown sections of a YAML file; the parser would ignore those without content.

    Args:
        path: The file.
        kind: What to call it in messages.
        known: Names of its sections.

    Returns:
        The content.

    Raises:
        UserError: If the file is not readable YAML, not a mapping, or has an unknown section.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}
        json.dumps(content, skipkeys=True, default=str)  # ValueError if it contains itself
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not set(content) <= set(known):
        there = ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)
        raise UserError(f"{path}: a {kind} has the sections {', '.join(known)}; got {there}")
    return content


def _as_fields(words: list[str], types: dict[str, Any]) -> list[str]:
    """Write ``--attend-last 8 --skip-short --windows 1,2`` as the parser expects it.

    That is ``--attend_last 8 --skip_short=true --windows=[1,2]``.
    """
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            found.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        following = rest[0] if rest else "--"
        is_flag = types.get(name) is bool
        is_value = not following.startswith("--") and (
            not is_flag or following.lower() in ("true", "false", "yes", "no")
        )
        if not equals and is_value and _is_list_of_words(types.get(name)):
            equals, value = "=", rest.pop(0)
        elif not equals and not is_value and not name.endswith("help") and name != "print_config":
            equals, value = "=", "true"
        if equals and _is_list_of_words(types.get(name)) and value[:1] != "[" and value != "null":
            value = f"[{value}]"
        found.append(f"--{name}{equals}{value}")
    return found
