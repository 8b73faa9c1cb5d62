"""Command-line options and YAML from documented dataclasses; help; errors in one line."""

import re
import shutil
import textwrap
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from coca_attention.errors import UserError, did_you_mean

NAMES_ALONE = 30
"""Above this number of options the short help gives their names alone."""

MOST_VALUES = 100_000
"""Of a YAML file: a few lines of aliases of aliases can stand for billions."""

DESCRIBE = "--describe"


class Described(Exception):
    """Raised for the word `DESCRIBE`: carries the parser to what completes its options."""

    def __init__(self, parser: "OptionParser") -> None:
        self.parser = parser


class OptionParser(ArgumentParser):
    """Options named with hyphens, with help from the docstrings below the fields.

    Attributes:
        leading: Words that come first and are read by the command itself, with their help.
        types: Types of all options.
    """

    def __init__(
        self, program: str | None = None, description: str | None = None, **kwargs: Any
    ) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        # jsonargparse makes parsers of this class for nested settings, with arguments of its own.
        kwargs = {"exit_on_error": False, "allow_abbrev": False, **kwargs}
        self.types: dict[str, Any] = {}
        self.leading: dict[str, str] = {}
        super().__init__(prog=program, description=description, **kwargs)

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """As in jsonargparse; records the types of the options."""
        prefix = f"{args[0]}." if args else ""
        self.types |= option_types(theclass, prefix)
        return super().add_class_arguments(theclass, *args, **kwargs)

    def add_section(self, name: str, theclass: Any, summary: str) -> None:
        """Add an optional section: a dataclass whose options are ``--name.field``."""
        self.types |= {name: theclass | None} | option_types(theclass, f"{name}.")
        self.add_argument(f"--{name}", type=theclass | None, default=None, help=summary)

    def format_usage(self) -> str:
        """One line: the words that come first, and that there are options."""
        words = [*self.leading, *(a.dest.upper() for a in self._actions if not a.option_strings)]
        return f"usage: {' '.join([str(self.prog), *words])} [options]\n"

    def format_help(self, *, short: bool = False) -> str:
        """The help: sections in the order of the dataclasses.

        Args:
            short: One line for an option; where there are many, their names alone.
        """
        described = [*self.leading.items()]
        described += [(a.dest.upper(), a.help or "") for a in self._actions if not a.option_strings]
        blocks = [self.format_usage()]
        if self.description:
            blocks.append(_wrapped(self.description.strip()))
        if described:
            blocks.append("\n".join(_entry(name, text, short) for name, text in described))
        order = {name: number for number, name in enumerate(self.types)}
        sections = []
        for group in self._action_groups:
            shown = [a for a in group._group_actions if a.option_strings and self._is_shown(a)]
            known = [action for action in shown if action.dest in order]
            if known:
                title = "Sections of the file" if group.title == "options" else group.title
                sections.append((min(order[action.dest] for action in known), title, known))
            if others := [action for action in shown if action.dest not in order]:
                sections.append((len(order), "Other options", others))
        names_alone = short and sum(len(actions) for _, _, actions in sections) > NAMES_ALONE
        for _, title, actions in sorted(sections, key=lambda section: section[0]):
            if names_alone:
                names = " ".join(_name(action) for action in actions)
                lines = [_wrapped(names, "  ")]
            else:
                lines = [self._describe(action, short) for action in actions]
            blocks.append("\n".join([f"{title or 'Options'}:", *lines]))
        if self.epilog and not short:
            blocks.append(_wrapped(self.epilog))
        if short:
            blocks.append(f"{self.prog} --help explains every option.")
        return "\n\n".join(block.rstrip() for block in blocks) + "\n"

    def options(self) -> dict[str, Any]:
        """Types of the options that the help lists, by their names with hyphens."""
        shown = [action for action in self._actions if action.option_strings]
        return {_name(a): self.types.get(a.dest) for a in shown if self._is_shown(a)}

    def _is_shown(self, action: Any) -> bool:
        """Whether the help lists an option: not those of jsonargparse for files and completion."""
        reads_file = type(action).__name__ in ("ActionConfigFile", "_ActionConfigLoad")
        return not reads_file and action.help != SUPPRESS and not action.dest.endswith(".help")

    def _describe(self, action: Any, short: bool) -> str:
        kind = self.types.get(action.dest)
        name, text, default = _name(action), str(action.help or ""), action.default
        if action.dest == "help":
            return _entry("-h, --help", "Show a short help (-h) or this one (--help).", short)
        if action.dest == "print_config":
            return _entry(name, "Print the settings as YAML and exit.", short)
        if not (kind is bool and default is False) and action.nargs != 0:
            name += f" {_placeholder(kind or str)}"
        if is_dataclass(_item(kind)):
            text += f" {_name(action)}.help lists the fields."
        elif default not in (None, "", [], {}) and default is not False and "default" not in text:
            shown = ",".join(map(str, default)) if isinstance(default, list) else default
            text += f" (default: {str(shown).lower() if kind is bool else shown})"
        return _entry(name, text, short)

    def read(self, words: list[str]) -> Any:
        """Parse words and instantiate the dataclasses.

        Args:
            words: Command-line words. Options can be written with hyphens or underscores, flags
                without a value, and lists as comma-separated words.

        Returns:
            A namespace of strings and dataclass instances.

        Raises:
            UserError: If an option is unknown or a value is invalid, in one line.
            SystemExit: After printing help.
        """
        if DESCRIBE in words:
            raise Described(self)
        if "-h" in words:
            self._print_and_exit(self.format_help(short=True))
        for name in [word[2:-5] for word in words if re.fullmatch(r"--\S+\.help", word)]:
            fields_of, kind = OptionParser(self.prog), _item(self._type_at(name))
            if is_dataclass(kind):
                fields_of.add_class_arguments(kind, name)
                self._print_and_exit(fields_of.format_help())
        try:
            read = self.instantiate(self.parse_args(_as_fields(words, self.types)))
            _refuse_null(read, self.types)
            return read
        except ArgumentError as error:
            raise UserError(f"{self._explain(str(error), words)} (see {self.prog} -h)") from error

    def _print_and_exit(self, text: str) -> None:
        print(text, end="")
        raise SystemExit(0)

    def _explain(self, text: str, words: list[str]) -> str:
        """What is wrong, in words, from a message of jsonargparse."""
        text = " ".join(text.split())
        if found := re.search(r"arguments are required: (.*)", text):
            return f"missing {found[1].upper()}: {self.format_usage().strip()}"
        if found := re.search(r"unrecognized arguments: (\S*)", text):
            word = found[1].partition("=")[0]
            if not word.startswith("-"):
                return f"unexpected word {word!r}"
            known = [hyphens(f"--{name}") for name in self.types]
            return f"unknown option {hyphens(word)}{did_you_mean(hyphens(word), known)}"
        keys = re.findall(r'(?:Parser key|Key) "([^"]*)"', text)
        path = ".".join(dict.fromkeys(keys))
        if found := re.search(r"(?:Group '(.*)' does not accept o|O)ption '([^']*)'", text):
            path = path or found[1] or ""
            known = _field_names(self._type_at(path)) if path else list(self.types)
            place = f"{path} has" if path else "there is"
            otherwise = f"; choose one of {', '.join(known)}"
            return f"{place} no option {found[2]!r}{did_you_mean(found[2], known, otherwise)}"
        kind = self._type_at(path)
        if not path or kind is None:
            return text
        value = re.search(
            r"(?:Got value|Given value): ?(.*?)(?=:? - Expected|: Given value|$)", text
        )
        given = value[1] if value else ""
        typed = {hyphens(word.partition("=")[0]) for word in words if word.startswith("--")}
        option = hyphens(f"--{path}")
        hint = did_you_mean(given, [str(choice) for choice in choices(kind)])
        return (
            f"{option if option in typed else path} must be {_in_words(kind)}, got {given!r}{hint}"
        )

    def _type_at(self, path: str) -> Any:
        """Type of a dotted name, also of fields of the items of lists and dictionaries."""
        name, rest = path, []
        while name and name not in self.types:
            name, _, last = name.rpartition(".")
            rest.insert(0, last)
        kind = self.types.get(name)
        if kind is None:  # the fields of a section
            prefix = f"{path}."
            names = [n.removeprefix(prefix) for n in self.types if n.startswith(prefix)]
            return Literal[tuple(names)] if names else None  # pyright: ignore
        for word in rest:
            item = _item(kind)
            if is_dataclass(item):
                kind = get_type_hints(item).get(word, item)
        return kind


def hyphens(option: str) -> str:
    """An option with hyphens instead of the underscores of field names."""
    return option.replace("_", "-")


def _name(action: Any) -> str:
    return hyphens(action.option_strings[-1 if len(action.option_strings[0]) == 2 else 0])


def _wrapped(text: str, indent: str = "", first: str | None = None) -> str:
    width = min(shutil.get_terminal_size().columns - 1, 100)
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _entry(name: str, text: str, short: bool) -> str:
    """A name and its help; only the first sentence if it is to be short."""
    if short:
        text = re.split(r"(?<=[a-z)])[.] ", f"{text} ")[0].strip()
    indent = " " * 26
    head = f"  {name}"
    first = f"{head:<26}" if len(head) < 25 else None
    lines = _wrapped(text, indent, first).splitlines() or [head]
    if first is None:
        lines = [f"{head}  {text}"] if short else [head, *lines]
    if short:
        width = min(shutil.get_terminal_size().columns - 1, 100)
        line = f"{first or head + '  '}{text}"
        return line if len(line) <= width else line[: width - 2].rstrip() + " …"
    return "\n".join(lines)


def _placeholder(kind: Any) -> str:
    """What stands for the value of an option in the help."""
    words = {int: "INTEGER", float: "NUMBER", bool: "true|false", str: "TEXT"}
    if any(get_origin(one) is dict for one in _alternatives(kind)):
        return "YAML"
    one = "|".join(map(str, choices(kind))) or words.get(_item(kind), "YAML")
    return f"{one},…" if _is_list_of_words(kind) else one


def choices(kind: Any) -> tuple[Any, ...]:
    """Values of a literal type, also where it is optional or the items of a list."""
    item = _item(kind)
    return get_args(item) if get_origin(item) is Literal else ()


def _item(kind: Any) -> Any:
    """A type without None; of a list or dictionary, the type of its items."""
    found = next((x for x in _alternatives(kind) if x is not NoneType), kind)
    inner = get_args(found)
    return inner[-1] if get_origin(found) in (list, dict) and inner else found


def _field_names(kind: Any) -> list[str]:
    item = _item(kind)
    if is_dataclass(item):
        return [one.name for one in fields(item)]
    return [str(choice) for choice in choices(kind)]


def _in_words(kind: Any) -> str:
    """What a value of a type is, for "must be …"."""
    found: list[str] = []
    for one in _alternatives(kind):
        words = {int: "a whole number", float: "a number", str: "text", NoneType: "null"}
        if one is bool:
            found += ["true", "false"]
        elif get_origin(one) is Literal:
            found += map(str, get_args(one))
        elif get_origin(one) is list:
            (item,) = get_args(one)
            plain = {int: "whole numbers", float: "numbers", str: "words"}
            of = plain.get(item) or ("mappings" if is_dataclass(item) else f"{_in_words(item)}")
            found.append(f"a list of {of}")
        else:
            found.append(words.get(one, "a mapping"))
    *most, last = found
    return f"{', '.join(most)} or {last}" if most else last


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
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not set(content) <= set(known):
        there = ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)
        there = "an empty file" if content is None else there
        raise UserError(f"{path}: a {kind} has the sections {', '.join(known)}; got {there}")
    return content


def from_file(
    path: str | Path, words: list[str], overrides: list[str], make: Callable[[list[str]], Any]
) -> Any:
    """What a YAML file and the command line say; the message of an error names whose it is.

    Args:
        path: The file.
        words: Words that read the file.
        overrides: Words of the command line.
        make: Makes it from words.

    Raises:
        UserError: As ``make``; begins with the file's name unless the file alone is without error.
    """
    try:
        return make([*words, *overrides])
    except UserError as error:
        if overrides and _error(make, words) != str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def _error(make: Callable[[list[str]], Any], words: list[str]) -> str | None:
    """The message of the UserError that ``make`` raises."""
    try:
        make(words)
    except UserError as error:
        return str(error)
    return None


def _field_name(name: str, types: dict[str, Any]) -> str:
    """``data.held-out`` as the parser expects it; the keys of a dictionary are as they are."""
    found: list[str] = []
    for part in name.split("."):
        kinds = _alternatives(types.get(".".join(found)))
        is_key = any(get_origin(kind) is dict for kind in kinds)
        found.append(part if is_key else part.replace("-", "_"))
    return ".".join(found)


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
        name = _field_name(name, types)
        following = rest[0] if rest else "--"
        is_flag = types.get(name) is bool
        is_value = not following.startswith("--") and (
            not is_flag or following.lower() in ("true", "false", "yes", "no")
        )
        if not equals and is_value and _is_list_of_words(types.get(name)):
            equals, value = "=", rest.pop(0)
        elif not equals and not is_value and not name.endswith("help") and name != "print_config":
            if name in types and bool not in _alternatives(types[name]):
                raise UserError(f"{word} needs a value: {_in_words(types[name])}")
            equals, value = "=", "true"
        if equals and _is_list_of_words(types.get(name)) and value[:1] != "[" and value != "null":
            value = f"[{value}]"
        found.append(f"--{name}{equals}{value}")
    return found
