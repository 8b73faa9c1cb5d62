"""Options: documented dataclasses that YAML files and words of a command line set, by jsonargparse.

A command line is read as people type it: options with hyphens or underscores, flags without a
value, and lists as ``1,2``.
"""

import json
import re
from argparse import SUPPRESS, Action, ArgumentError
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jsonargparse import (
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
    set_loader,
    set_parsing_settings,
)
from pydantic import ValidationError

from coca_attention.errors import UserError, did_you_mean, error_prefix
from coca_lab.old_names import GONE_FIELDS, in_todays_names
from coca_lab.yaml_files import load_yaml, read_yaml

Settings = TypeVar("Settings")
Values = dict[str, Any]
"""Fields by their names, those of nested dataclasses as mappings, before they are checked."""
Sections = Mapping[str, type]
"""Dataclasses by a prefix of their fields, all of which may be missing."""
TASK_FIELD = "tasks"
"""The field of a dataclass that holds the sections that are set."""
# What an error of jsonargparse says, and what the user reads.
WORDING = (
    (r"(?s)Not a valid subclass of (\w+)\.? ?(Got value: [^\n]*)?.*", r"expected its fields. \2"),
    (r"Expected an? <class '(\w+)'>", r"expected \1"),
    (r"Expected an? typing\.Literal\[(.*?)\]", r"expected one of \1"),
    (r"\.?\s*Got value: ", ", got "),
)

set_parsing_settings(docstring_parse_attribute_docstrings=True)
set_loader("yaml-1.2", load_yaml, exceptions=(UserError,))


class _Help(DefaultHelpFormatter):
    """Options with hyphens, and defaults without types, in 80 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80, max_help_position=32)

    def _format_action_invocation(self, action: Action) -> str:
        shown = super()._format_action_invocation(action)
        for option in action.option_strings:
            shown = shown.replace(option, option.replace("_", "-"))
        return shown

    def _get_help_string(self, action: Action) -> str:
        return option_help(action).replace("%", "%%")


class _Parser(ArgumentParser):
    """jsonargparse's, which makes others of its class for the fields of a field."""

    def __init__(self, *args: Any, **options: Any) -> None:
        defaults = {"formatter_class": _Help, "parser_mode": "yaml-1.2"}
        super().__init__(*args, **{**defaults, **options})


def option_help(action: Action) -> str:
    """The help of an option, with its default."""
    text = " ".join((action.help or "").split())
    default: Any = action.default
    if isinstance(default, list):
        plain = all(isinstance(each, int | float | str) for each in default)
        default = ",".join(map(str, default)) if plain else None
    if default is None or default is False or default in ("", {}, SUPPRESS):
        return text
    return f"{text.rstrip('.')} (default: {default})"


def option_of(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def as_typed(message: str, names: Collection[str]) -> str:
    """A message in which fields in backticks are options of the command line, as they are typed.

    What the library and the settings raise names an argument as Python does; of ``names``, the
    fields that the command has options for, the user has typed the option.
    """

    def typed(found: re.Match[str]) -> str:
        fields = [name for name in names if found[1] in (name, name.rpartition(".")[2])]
        return option_of(min(fields, key=len)) if fields else found[0]

    return re.sub(r"`(\w+)`", typed, message)


def option_parser(
    program: str,
    classes: Sequence[type] = (),
    sections: Sections | None = None,
    shown: Collection[str] = (),
    **options: Any,
) -> ArgumentParser:
    """A parser with an option for every field of documented dataclasses.

    Args:
        program: The words of the command.
        classes: Dataclasses whose fields are options; those of nested ones are ``field.name``.
        sections: Further dataclasses.
        shown: Dotted names of the fields in the help, of which it has a sentence; by default all.
        options: As of jsonargparse's parser.
    """
    parser = _Parser(program, exit_on_error=False, **options)
    sections = dict(sections or {})
    for each in classes:
        optional: dict[str, type] = {}  # its fields that are another dataclass, or None
        for name, kind in get_type_hints(each).items():
            first, *others = _alternatives(kind)
            if isinstance(first, type) and is_dataclass(first) and others == [NoneType]:
                optional[name] = first
        parser.add_class_arguments(each, skip={TASK_FIELD, *optional})
        sections |= optional
    for name, section in sections.items():
        parser.add_class_arguments(section, name)
    for action in parser._actions:
        is_option = action.nargs == 0 or action.dest in option_names(parser)
        # Sections also have an option of their own in jsonargparse, for a file.
        if not is_option or (shown and action.dest not in (*shown, "help")):
            action.help = SUPPRESS
        elif shown:
            action.help = first_sentence(action.help or "")
        if hasattr(action, "_typehint"):
            action.metavar = _metavar(action._typehint) or action.metavar  # pyright: ignore
    return parser


def _metavar(annotation: Any) -> str:
    """What a number, a text or a list is called in the help; empty for others."""
    first = _alternatives(annotation)[0]
    if get_origin(first) is list:
        return f"{_metavar(get_args(first)[0]) or 'VALUE'},…"
    return first.__name__.upper() if first in (int, float, str) else ""


def option_names(parser: ArgumentParser) -> list[str]:
    """The fields that a parser has options for, by their dotted names."""
    return [each.dest for each in parser._actions if hasattr(each, "_typehint") and each.nargs != 0]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself, without constraints."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for each in get_args(annotation) for kind in _alternatives(each))
    return (annotation,)


def read_options(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """What words of a command line set, and nothing else; nested dataclasses are instances.

    Raises:
        UserError: Of the first mistake, with the option.
    """
    return _instances(parser, _from_words(parser, words, Namespace()), ())


def _from_file(parser: ArgumentParser, content: Values) -> Namespace:
    """What the content of a file sets; its top has known names, and fields in its sections."""
    names = option_names(parser)
    sections = [name.partition(".")[0] for name in names]
    for name, value in content.items():
        if name in names:
            continue
        if name not in sections:
            hint = f"there is no such field{did_you_mean(str(name), sections)}"
            raise UserError(f"{name}: {GONE_FIELDS.get(name, hint)}")
        if not isinstance(value, dict):
            raise UserError(f"{name}: expected fields with their values, got {value!r}")
    try:
        given = parser.parse_object(deepcopy(content), defaults=False)
        parser.validate(given, skip_unset=False)
    except (ArgumentError, TypeError, KeyError) as error:
        raise UserError(_problem(parser, error)) from error
    return given


def _from_words(parser: ArgumentParser, words: Sequence[str], given: Namespace) -> Namespace:
    """What was given, and what words set."""
    try:
        spelled = list(_spelled(parser, words))
        given = parser.parse_args(spelled, namespace=given, defaults=False)
        parser.validate(given, skip_unset=False)
    except (ArgumentError, TypeError, KeyError) as error:
        raise UserError(_problem(parser, error, typed=True)) from error
    return given


def _instances(parser: ArgumentParser, given: Namespace, names: Collection[str]) -> Namespace:
    """What was given, with instances for sections, also for those that have names alone."""
    built = parser.instantiate(given)
    there = {*names, *vars(given)}
    return Namespace({name: value for name, value in vars(built).items() if name in there})


def _spelled(parser: ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Words as jsonargparse takes them."""
    known = {each.dest: each for each in parser._actions if each.option_strings}
    left = deque(words)
    while left:
        word = left.popleft()
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_")
        action = known.get(name.removesuffix("+"))  # --lengths+ 64 appends to a list
        if not option.startswith("--"):
            yield word
            continue
        if action is None:
            hint = did_you_mean(option, map(option_of, option_names(parser)))
            raise ArgumentError(None, f"there is no option {option}{hint}")
        if action.nargs == 0:
            yield f"--{name}"
            continue
        kinds = _alternatives(getattr(action, "_typehint", str))
        if not equals and left and not left[0].startswith("--"):
            is_value = bool not in kinds or left[0] in ("true", "false")
            value = left.popleft() if is_value else "true"
        elif not equals and bool in kinds:
            value = "true"
        elif not equals:
            raise ArgumentError(None, f"{option}: expected a value")
        is_list = any(get_origin(each) is list for each in kinds)
        if is_list and value[:1] != "[" and value != "null":
            value = f"[{value}]"
        yield f"--{name}={value}"


def _problem(parser: ArgumentParser, error: BaseException, typed: bool = False) -> str:
    """An error of jsonargparse in one line, with the field, or the option if it was typed."""
    found = re.findall(r"""(?:Parser key|Group|[Oo]ption) ["']([^"']+)["']""", str(error))
    name = ".".join(dict.fromkeys(found))
    # What failed first: jsonargparse raises an error of its own from it at every level.
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        said = first["msg"].replace("Input should be", "must be").partition(", unable to")[0]
        said = said.replace("a valid integer", "a whole number")
        said += f", got {first['input']}"
    else:
        said = re.split(r'Parser key "[^"]+":', str(error))[-1]
        for pattern, wording in WORDING:
            said = re.sub(pattern, wording, said)
    if "is not accepted" in said or "does not accept" in said:
        section = name.rpartition(".")[0]
        known = [each for each in option_names(parser) if each.rpartition(".")[0] == section]
        said = f"there is no such field{did_you_mean(name, known)}"
    elif "expected one of" in said:
        got = said.rpartition("got ")[2]
        said += did_you_mean(got, re.findall(r"'([^']*)'", said))
    elif "whole number" in said and re.search(r"\d[;:/ ]+\d", said):
        said += ": separate numbers by commas, as in 64,128"
    elif "whole number" in said and re.search(r"\d([kKmM]|,\d+)$", said):
        said += ": write digits alone, as in 12288"
    elif said.startswith("expected dict, got"):
        given = re.fullmatch(r"expected dict, got (\w+)[=:] ?(\S+)", said)
        name_and_value = f"{given[1]}: {given[2]}" if given else "NAME: VALUE"
        said += f": write '{{{name_and_value}}}'"
    if typed:
        name = option_of(name) if name else ""
        said += f" (see {parser.prog} --help)"
    return " ".join(f"{name}: {said}".removeprefix(": ").split())


def build(theclass: type[Settings], given: Namespace) -> Settings:
    """An instance of a dataclass from those of its fields that were set."""
    names = [item.name for item in fields(theclass)]  # pyright: ignore[reportArgumentType]
    return theclass(**{name: given[name] for name in names if name in given})


@cache
def _parser_of(
    theclass: type, program: str = "", sections: tuple[tuple[str, type], ...] = ()
) -> ArgumentParser:
    """A parser of fields, which takes 50 ms to make; a study reads hundreds of recipes."""
    return option_parser(program, [theclass], dict(sections))


def checked(theclass: type[Settings], values: Values, prefix: str = "") -> Settings:
    """An instance of a dataclass from nested values; UserError if a field is wrong."""
    parser = _parser_of(theclass)
    with error_prefix(prefix):
        return build(theclass, _instances(parser, _from_file(parser, values), values))


def read_settings(
    theclass: type[Settings],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    kind: str = "settings",
    program: str = "coca",
    sections: Sections | None = None,
    check: bool = True,
) -> Settings:
    """An instance of a documented dataclass from a YAML file and words of a command line.

    Sections that the file or the words set become the field `TASK_FIELD`; a method ``check`` is
    called, unless the argument says otherwise.
    """
    parser = _parser_of(theclass, program, tuple((sections or {}).items()))
    content = {} if path is None else read_yaml(path, kind)
    in_file = nullcontext if path is None else partial(error_prefix, f"{path}: ")
    with in_file():
        content = in_todays_names(content)
        if sections and TASK_FIELD in content:
            raise UserError(f"{TASK_FIELD}: every task has a section of its name")
        # jsonargparse knows no sections without fields.
        empty = {name for name, section in (sections or {}).items() if not fields(section)}
        found = {name: content.pop(name) for name in empty & content.keys()}
        given = _from_file(parser, content)
    given = _from_words(parser, overrides, given)
    with in_file():
        given = _instances(parser, given, content)
        if sections:
            made = {name: sections[name]() for name in found}
            given[TASK_FIELD] = made | {name: given[name] for name in sections if name in given}
        settings: Any = build(theclass, given)
        if check and hasattr(settings, "check"):
            settings.check()
    return settings


def option_words(options: Mapping[str, object]) -> list[str]:
    """Fields by their dotted names as they are written on the command line."""
    return [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in options.items()
    ]


def first_sentence(text: str) -> str:
    """The first sentence of a text without its full stop; a full stop in brackets ends none."""
    found = re.match(r"(?:\([^)]*\)|.)*?(?=\.(?:\s|$)|$)", " ".join(text.split()))
    return found[0] if found else text
