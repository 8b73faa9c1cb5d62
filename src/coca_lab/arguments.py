"""Settings from YAML files and command lines: documented dataclasses, checked by pydantic.

A file is the user's, or one of the project's own recipes and studies by its name.
"""

import ast
import inspect
import json
import re
import textwrap
from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from coca_attention.errors import UserError, did_you_mean, error_prefix

Settings = TypeVar("Settings")
Values = dict[str, Any]
"""Fields by their names, those of nested dataclasses as mappings, before they are checked."""
Sections = Mapping[str, tuple[type, str]]
"""Optional sections of a YAML file by name: the dataclass of their fields, and a line of help."""
TASK_FIELD = "tasks"
"""The field of a dataclass that holds the sections that are set."""
FILE_KINDS = {"recipe": "recipes", "study": "studies"}
"""What a file is called, and its folder: in the wheel, or at the root of the repository."""
MOST_VALUES = 100_000
"""Of a YAML file: a few lines of aliases of aliases can stand for billions."""


class SettingsParser(ArgumentParser):
    """argparse with an option for every field of documented dataclasses, and errors as UserError.

    Options can be written with underscores, flags without a value, and lists as ``1,2``. The help
    has a sentence on each field of ``shown``, by default all that is documented.
    """

    def __init__(self, program: str, shown: Collection[str] = (), **options: Any) -> None:
        layout: Any = partial(HelpFormatter, width=80, max_help_position=36)
        super().__init__(program, allow_abbrev=False, formatter_class=layout, **options)
        self.shown, self.types = shown, dict[str, object]()

    def error(self, message: str) -> NoReturn:
        """Raise UserError in place of printing the usage."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def add_settings(self, theclass: Any, prefix: str = "", title: str = "") -> None:
        """Add the fields of a dataclass, those of nested ones as ``section.field``."""
        docs, types = field_docs(theclass), get_type_hints(theclass)
        group = self.add_argument_group(first_sentence(title or theclass.__doc__ or ""))
        for item in fields(theclass):
            name, kind, text = prefix + item.name, types[item.name], docs.get(item.name, "")
            if nested := [one for one in _alternatives(kind) if is_dataclass(one)]:
                self.add_settings(nested[0], f"{name}.", text)
            if nested or name == TASK_FIELD:
                continue
            self.types[name] = kind
            for each in filter(is_dataclass, get_args(kind)):
                text += " Fields: " + " ".join(f"{n}: {doc}" for n, doc in field_docs(each).items())
            text = self._help(name, text, _default(item))
            metavar = _metavar(kind)
            group.add_argument(
                _option(name), dest=name, default=SUPPRESS, metavar=metavar, help=text
            )

    def _help(self, name: str, text: str, default: object) -> str:
        if self.shown:
            text = first_sentence(text) if name in self.shown else SUPPRESS
        if text != SUPPRESS and default not in (None, False, ""):
            text = f"{text.rstrip('.')} (default: {default})"
        return text.replace("%", "%%")

    def read(self, words: Sequence[str]) -> Values:
        """The values that words of a command line set, by dotted names, before they are checked."""
        found, unknown = self.parse_known_args(list(self._spelled(words)))
        if unknown:
            word = unknown[0].partition("=")[0]
            hint = did_you_mean(word, map(_option, self.types))
            self.error(f"unrecognized arguments: {word}{hint}")
        return {name: self._value(name, value) for name, value in vars(found).items()}

    def _spelled(self, words: Sequence[str]) -> Iterator[str]:
        """Words as argparse takes them: options with hyphens, flags with a value."""
        for word, following in pairwise([*words, ""]):
            option, equals, value = word.partition("=")
            name = option[2:].replace("-", "_")
            if not word.startswith("--") or name not in self.types:
                yield word
            elif self.types[name] is bool and not equals and following not in ("true", "false"):
                yield f"{_option(name)}=true"
            else:
                yield f"{_option(name)}{equals}{value}"

    def _value(self, name: str, text: str) -> object:
        """A word as pydantic takes it: text where a field takes text, else YAML."""
        kinds = _alternatives(self.types.get(name, str))
        if text != "null" and any(one is str or get_origin(one) is Literal for one in kinds):
            return text
        if text[:1] != "[" and text != "null" and any(get_origin(one) is list for one in kinds):
            text = f"[{text}]"
        try:
            return yaml.load(text, _Loader)
        except (yaml.YAMLError, RecursionError) as error:
            self.error(f"{_option(name)}: not readable: {_yaml_problem(error)}")


def settings_parser(
    theclass: type, program: str, sections: Sections | None = None, shown: Collection[str] = ()
) -> SettingsParser:
    """The parser of the options that override a YAML file with the fields of a dataclass."""
    parser = SettingsParser(program, shown)
    parser.add_settings(theclass)
    for name, (section, summary) in (sections or {}).items():
        parser.add_settings(section, f"{name}.", summary)
    return parser


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
    changes = settings_parser(theclass, program, sections).read(overrides)
    values = put(changes, {} if path is None else read_yaml(path, kind))
    with nullcontext() if path is None else error_prefix(f"{path}: "):
        if sections is not None:
            there = [name for name in sections if name in values]
            tasks = {n: checked(sections[n][0], values.pop(n), f"{n}.") for n in there}
            if TASK_FIELD in values:
                raise UserError(f"{TASK_FIELD}: every task has a section of its name")
            values[TASK_FIELD] = tasks
        settings: Any = checked(theclass, values)
        if hasattr(settings, "check"):
            settings.check()
    return settings


def option_words(options: Mapping[str, object]) -> list[str]:
    """Fields by their dotted names as they are written on the command line."""
    return [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in options.items()
    ]


def put(changes: Mapping[str, object], content: Mapping[str, object]) -> Values:
    """A copy of nested values with changes by their dotted names."""
    values = deepcopy(dict(content))
    for name, value in changes.items():
        *path, last = name.split(".")
        inner: Any = values
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):  # if not, `checked` refuses what is there
            inner[last] = value
    return values


def checked(theclass: type[Settings], values: object, prefix: str = "") -> Settings:
    """An instance of a dataclass from nested values; UserError with every field that is wrong."""
    fields_of: Any = dict[str, theclass]  # pyright: ignore[reportInvalidTypeForm]
    adapter = TypeAdapter(fields_of, config=ConfigDict(extra="forbid"))
    try:
        return adapter.validate_python({"": values})[""]
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # Of a field with several types, every one of them has a problem: the first is enough.
    first = {problem["loc"][1:3]: problem for problem in reversed(problems)}
    said = [_problem(theclass, problem, prefix) for problem in reversed(first.values())]
    cause = problems[0].get("ctx", {}).get("error")
    raise UserError("; ".join(said)) from cause


def _problem(theclass: type, problem: Any, prefix: str) -> str:
    """What pydantic says of one field, in the words of the user."""
    parts = [str(part) for part in problem["loc"][1:] if part != "[key]"]
    name = (prefix + ".".join(parts)).rstrip(".")  # a whole section may contradict itself
    text = problem.get("ctx", {}).get("error") or f"{problem['msg']}, got {problem['input']!r}"
    if problem["type"] == "unexpected_keyword_argument":
        section, depth = name.rpartition(".")[0], name.count(".") + 1
        known = [prefix + field for field in settings_parser(theclass, "").types]
        known = [".".join(field.split(".")[:depth]) for field in known]
        known = [field for field in known if field.rpartition(".")[0] == section]
        text = f"there is no such field{did_you_mean(name, known)}"
    return f"{name}: {text}" if name else str(text)


class _Loader(yaml.SafeLoader):
    """YAML in which a key may be given once, and aliases repeat values within reason."""

    def get_single_node(self) -> yaml.Node | None:
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

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise UserError(f"line {line}: {key.value} is given twice in one mapping")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def shipped(kind: str) -> dict[str, Path]:
    """The project's files of a kind by their names."""
    here = Path(__file__).resolve()
    places = (here.parent / "yaml" / FILE_KINDS[kind], here.parents[2] / FILE_KINDS[kind])
    folder = next((place for place in places if place.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def find_file(name: str | Path, kind: str) -> Path:
    """The file of a path, or the project's file of a name; UserError if there is neither."""
    if Path(name).is_file():
        return Path(name)
    known = shipped(kind) if kind in FILE_KINDS else {}
    # As in a clone, where recipes/books-5m.yaml is the file of books-5m.
    here = {str(Path(FILE_KINDS[kind], path.name)): path for path in known.values()}
    if str(name) in known | here:
        return (known | here)[str(name)]
    other = "; coca recipes lists the project's own" if known else ""
    raise UserError(f"{name}: no such {kind}{did_you_mean(str(name), known, other)}")


def read_yaml(path: str | Path, kind: str) -> Values:
    """The content of a YAML file, or of one of the project's by its name."""
    path = find_file(path, kind)
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable {kind}: {_yaml_problem(error)}") from error
    if not isinstance(content, dict):
        there = "an empty file" if content is None else repr(content)
        raise UserError(f"{path}: a {kind} has sections with fields and values; got {there}")
    return content


def _yaml_problem(error: Exception) -> str:
    """What an error of YAML says, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def first_sentence(text: str) -> str:
    """The first sentence of a text without its full stop; a full stop in brackets ends none."""
    found = re.match(r"(?:\([^)]*\)|.)*?(?=\.(?:\s|$)|$)", " ".join(text.split()))
    return found[0] if found else text


@cache
def field_docs(theclass: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, in one line each."""
    docs = {}
    for each in reversed(theclass.__mro__[:-1]):
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        for item, text in pairwise(tree.body):
            if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(item.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


def _option(name: str) -> str:
    """The option of a field, with hyphens."""
    return f"--{name.replace('_', '-')}"


def _default(field: Field[Any]) -> object:
    """What the help shows as the default of a field; of those made anew that of plain lists."""
    if field.default is not MISSING:
        return field.default
    made = field.default_factory() if field.default_factory is not MISSING else None
    if isinstance(made, list) and all(isinstance(each, int | float | str) for each in made):
        return ",".join(map(str, made))
    return None


def _alternatives(annotation: object) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _metavar(annotation: object) -> str:
    """What the help shows as the value of an option."""
    kind = next(one for one in _alternatives(annotation) if one is not NoneType)
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, inner))}}}"
    if get_origin(kind) is list and not is_dataclass(inner[0]):
        return f"{_metavar(inner[0])},…"
    return "" if kind is bool else "YAML" if inner else kind.__name__.upper()
