"""Options: documented dataclasses that YAML files and words of a command line set.

pydantic reads their values, and its errors say in which field a mistake is; argparse prints their
help. A command line is read as people type it: options with hyphens or underscores, flags without a
value, and lists as ``1,2``.
"""

import json
import re
from argparse import ArgumentParser, HelpFormatter
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from coca_attention.errors import UserError, did_you_mean, error_prefix
from coca_lab.yaml_files import load_yaml, read_yaml

Settings = TypeVar("Settings")
Values = dict[str, Any]
"""Fields by their names, those of nested dataclasses as mappings, before they are checked."""
Sections = Mapping[str, type]
"""Dataclasses by a prefix of their fields, all of which may be missing."""
Types = dict[str, Any]
"""The types of the fields that are options, by their dotted names."""
Typed = dict[str, Any]
"""Values that words of a command line have set, by the dotted names of the fields."""
TASK_FIELD = "tasks"
"""The field of a dataclass that holds the sections that are set."""
WHOLE = "settings"
"""The dataclass beside its sections, where all are checked together."""
ROOM = 200
"""Characters of a value in a message."""


def option_types(
    classes: Iterable[type], sections: Sections | None = None, prefix: str = ""
) -> Types:
    """The options of documented dataclasses; those of nested ones are ``field.name``."""
    found: Types = {}
    for theclass in classes:
        hints = get_type_hints(theclass, include_extras=True)
        for item in fields(theclass):
            name = f"{prefix}{item.name}"
            parts = [kind for kind in _alternatives(hints[item.name]) if is_dataclass(kind)]
            if parts:
                found |= option_types(parts, prefix=f"{name}.")
            elif name != TASK_FIELD:
                found[name] = hints[item.name]
    for name, section in (sections or {}).items():
        found |= option_types([section], prefix=f"{name}.")
    return found


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself, without constraints."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for each in get_args(annotation) for kind in _alternatives(each))
    return (annotation,)


def option_of(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


# Help


def option_parser(
    program: str,
    classes: Iterable[type] = (),
    sections: Sections | None = None,
    shown: Collection[str] = (),
    required: Collection[str] = (),
    **options: Any,
) -> ArgumentParser:
    """A parser for the help of documented dataclasses, with an option for every field.

    Args:
        program: The words of the command.
        classes: Dataclasses whose fields are options.
        sections: Further dataclasses.
        shown: Dotted names of the fields in the help, of which it has a sentence; by default all.
        required: Names of the fields whose defaults are not those of the command.
        options: As of argparse's parser.
    """
    formatter: Any = partial(HelpFormatter, width=80, max_help_position=32)
    parser = ArgumentParser(program, formatter_class=formatter, **options)
    for theclass in classes:
        _add_fields(parser, theclass, "", shown, required)
    for name, section in (sections or {}).items():
        _add_fields(parser, section, f"{name}.", shown)
    return parser


def _add_fields(
    parser: ArgumentParser,
    theclass: type,
    prefix: str,
    shown: Collection[str],
    required: Collection[str] = (),
) -> None:
    """Add a group with the fields of a dataclass, and one for every nested dataclass."""
    group = parser.add_argument_group(str(parse_from_object(theclass).short_description)[:-1])
    hints = get_type_hints(theclass, include_extras=True)
    docs = _field_docs(theclass)
    for item in fields(theclass):
        name = f"{prefix}{item.name}"
        kinds = _alternatives(hints[item.name])
        parts = [kind for kind in kinds if is_dataclass(kind)]
        for part in parts:
            _add_fields(parser, part, f"{name}.", shown)
        if parts or name == TASK_FIELD or (shown and name not in shown):
            continue
        text = first_sentence(docs[item.name]) if shown else docs[item.name]
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if isinstance(default, list):
            plain = all(isinstance(each, int | float | str) for each in default)
            default = ",".join(map(str, default)) if plain else ""
        if default is not False and default not in (None, "", {}, MISSING) and name not in required:
            text = f"{text.rstrip('.')} (default: {default})"
        option = option_of(name)
        names = [option, f"{option}+"] if get_origin(kinds[0]) is list else [option]
        group.add_argument(
            *names,
            dest=name,
            metavar=_metavar(kinds) or item.name.upper(),
            help=text.replace("%", "%%"),
        )
        if item_class(hints[item.name]):
            said = f"Show the fields of {name} and exit."
            group.add_argument(f"{option}.help", action="store_true", help=said)


def item_class(annotation: Any) -> type | None:
    """The dataclass of the items of a list or a mapping; None if they have no fields."""
    of = get_args(_alternatives(annotation)[0])
    return next((kind for kind in of if isinstance(kind, type) and is_dataclass(kind)), None)


def _field_docs(theclass: type) -> dict[str, str]:
    """What stands below the fields of a dataclass, those of its bases included, in one line."""
    found: dict[str, str] = {}
    for base in reversed(theclass.__mro__):
        if is_dataclass(base):
            for each in parse_from_object(base).params:
                found[each.arg_name] = " ".join((each.description or "").split())
    return found


def _metavar(kinds: Sequence[Any]) -> str:
    """What a number, a text, a list or a choice is called in the help; empty for others."""
    first, *others = kinds
    if get_origin(first) is list:
        return f"{_metavar(_alternatives(get_args(first)[0])) or 'VALUE'},…"
    if first is bool:
        return "{true,false,null}" if others else "{true,false}"
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"{{{','.join(choices)}}}"
    return first.__name__.upper() if first in (int, float, str) else ""


def first_sentence(text: str) -> str:
    """The first sentence of a text without its full stop; a full stop in brackets ends none."""
    found = re.match(r"(?:\([^)]*\)|.)*?(?=\.(?:\s|$)|$)", " ".join(text.split()))
    return found[0] if found else text


# Values


def read_words(words: Sequence[str], types: Types, program: str) -> tuple[Typed, list[str]]:
    """What options among words of a command line set, and the other words.

    Raises:
        UserError: If there is no such option, or it lacks a value.
    """
    see = f" (see {program} --help)"
    typed: Typed = {}
    others = list[str]()
    left = deque(words)
    while left:
        word = left.popleft()
        if not word.startswith("--"):
            others.append(word)
            continue
        option, equals, text = word.partition("=")
        name = option[2:].replace("-", "_")
        field = name.removesuffix("+")  # --lengths+ 64 appends to a list
        if field not in types:
            hint = did_you_mean(option, map(option_of, types))
            raise UserError(f"there is no option {option}{hint}{see}")
        kinds = _alternatives(types[field])
        if not equals and bool in kinds:
            is_value = bool(left) and left[0] in ("true", "false")
            text = left.popleft() if is_value else "true"
        elif not equals:
            if not left or left[0].startswith("--"):
                raise UserError(f"{option}: expected a value{see}")
            text = left.popleft()
        try:
            value = _value(text, kinds)
        except UserError as error:
            raise UserError(f"{option}: {error}{see}") from error
        typed[name] = [*typed.get(name, []), *value] if name != field else value
    return typed, others


def _value(text: str, kinds: Sequence[Any]) -> Any:
    """What a word says: itself for a field of text, else YAML."""
    if text == "null" and NoneType in kinds:
        return None
    if str in kinds:
        return text
    if any(get_origin(kind) is list for kind in kinds) and not text.startswith("["):
        text = f"[{text}]"
    return load_yaml(text)


def nested(content: Mapping[str, Any], before: Values | None = None) -> Values:
    """Values by dotted names as mappings in each other; ``name+`` appends to the list before."""
    values = before or {}
    for dotted, value in content.items():
        *sections, last = dotted.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"{section}: expected fields with their values, got {place!r}")
        if last.endswith("+"):
            place[last[:-1]] = [*(place.get(last[:-1]) or []), *value]
        else:
            place[last] = value
    return values


@cache
def _checker(theclass: type, sections: tuple[tuple[str, type], ...]) -> type[BaseModel]:
    """Checks values of a dataclass and its sections; made once, in 40 ms for a recipe."""
    named: Any = {name: (section | None, None) for name, section in sections}
    # In JSON, strict types take an integer for a float and a mapping for a dataclass, as YAML says.
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(theclass.__name__, __config__=config, **{WHOLE: (theclass, ...)}, **named)


def _as_json(value: Any) -> Any:
    """What Python settings may have that JSON has not."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def settings_of(
    theclass: type[Settings],
    values: Values,
    *,
    sections: Sections | None = None,
    typed: Collection[str] = (),
    path: str | Path | None = None,
    program: str = "",
) -> Settings:
    """An instance of a dataclass from its fields.

    Args:
        theclass: The dataclass.
        values: Nested values.
        sections: Dataclasses whose values become the field `TASK_FIELD`.
        typed: Dotted names of the fields that words of a command line have set.
        path: The file that has set the others.
        program: The command.

    Raises:
        UserError: If a field is unknown, missing or wrong; it names the field, or the option.
    """
    sections = sections or {}
    own = {name: value for name, value in values.items() if name not in sections}
    content = {WHOLE: own, **{name: values[name] for name in sections if name in values}}
    try:
        checker = _checker(theclass, tuple(sections.items()))
        built = checker.model_validate_json(json.dumps(content, default=_as_json))
    except ValidationError as error:
        name, said, is_shown = _problem(error, option_types([theclass], sections))
        if is_shown and any(f"{name}.".startswith(f"{each.rstrip('+')}.") for each in typed):
            raise UserError(f"{option_of(name)}: {said} (see {program} --help)") from error
        said = f"{name}: {said}" if name else said
        raise UserError(f"{path}: {said}" if path else said) from error
    settings = getattr(built, WHOLE)
    if sections:
        found = {name: getattr(built, name) for name in sections}
        setattr(settings, TASK_FIELD, {name: x for name, x in found.items() if x is not None})
    return settings


def _problem(error: ValidationError, types: Types) -> tuple[str, str, bool]:
    """The field of the first mistake, what is wrong, and whether that is its value."""
    every = error.errors(include_url=False)
    # An unknown field may be why another one is missing.
    unknown = [each for each in every if each["type"] == "unexpected_keyword_argument"]
    problem = [*unknown, *every][0]
    place = [part for part in problem["loc"] if isinstance(part, str)]
    name = ".".join(place[1:] if place[0] == WHOLE else place)
    if unknown:
        section = name.rpartition(".")[0]
        level = name.count(".") + 1
        beside = {".".join(each.split(".")[:level]) for each in types}
        known = [each for each in beside if each.rpartition(".")[0] == section]
        return name, f"there is no such field{did_you_mean(name, sorted(known))}", True
    if problem["type"] == "value_error":  # of a check of our own
        return name, str(problem["ctx"]["error"]), False
    if problem["type"] == "missing":
        return name, "it is missing", True
    said = problem["msg"].replace("Input should be", "must be")
    if problem["type"] == "dataclass_type":
        said = "expected fields with their values"
    given = str(problem["input"])
    hint = did_you_mean(given, re.findall("'([^']*)'", said))
    return name, f"{said}, got {given[:ROOM]}{hint}", True


def checked(theclass: type[Settings], values: Values, prefix: str = "") -> Settings:
    """An instance of a dataclass from nested values; UserError if a field is wrong."""
    with error_prefix(prefix):
        return settings_of(theclass, nested(values))


def read_settings(
    theclass: type[Settings],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    kind: str = "settings",
    program: str = "coca",
    sections: Sections | None = None,
) -> Settings:
    """An instance of a documented dataclass from a YAML file and words of a command line.

    Sections that the file or the words set become the field `TASK_FIELD`; a method ``check`` is
    called.
    """
    content = {} if path is None else read_yaml(path, kind)
    typed, others = read_words(overrides, option_types([theclass], sections), program)
    if others:
        raise UserError(f"unrecognized arguments: {' '.join(others)} (see {program} --help)")
    with error_prefix(f"{path}: " if path else ""):
        if sections and TASK_FIELD in content:
            raise UserError(f"{TASK_FIELD}: every task has a section of its name")
        values = nested(typed, nested(content))
    settings: Any = settings_of(
        theclass, values, sections=sections, typed=typed, path=path, program=program
    )
    if hasattr(settings, "check"):
        with error_prefix(f"{path}: " if path else ""):
            settings.check()
    return settings


def option_words(options: Mapping[str, object]) -> list[str]:
    """Fields by their dotted names as they are written on the command line."""
    return [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in options.items()
    ]
