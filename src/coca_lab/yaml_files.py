"""YAML 1.2, in files and options alike: the user's files, and the project's recipes and studies."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from coca_attention.errors import UserError, did_you_mean

FILE_KINDS = {"recipe": "recipes", "study": "studies"}
"""What a file is called, and its folder: in the wheel, or at the root of the repository."""
USES = {"recipe": "coca train", "study": "coca study"}
"""The commands that take them."""
MOST_VALUES = 100_000
"""Of a YAML file: a few lines of aliases of aliases can stand for billions."""
INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
# YAML 1.2's core schema by type, with the letters that a value of it begins with; << merges
# mappings, as in YAML 1.1.
SCHEMA = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(rf"(?:{INTEGER.pattern})$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    "merge": (re.compile(r"<<$"), ["<"]),
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2 in which a key may be given once, and aliases repeat values within reason.

    PyYAML reads YAML 1.1, where 1e-5 is text, 0100 is 64, 1:30 is 90 and no is false.
    """

    yaml_implicit_resolvers = {}

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        left = MOST_VALUES
        nodes = [] if root is None else [root]
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

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = node.value
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


class _Dumper(yaml.SafeDumper):
    """YAML that readers of 1.1 and 1.2 understand alike.

    Text that either takes for a number, a truth value or nothing has quotes.
    """


for name, (pattern, first) in SCHEMA.items():
    for each in (_Loader, _Dumper):
        each.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def load_yaml(text: str) -> Any:
    """The value of YAML 1.2; UserError, in one line, if it cannot be read."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = ""
        if error.problem_mark:
            last = max(1, len(text.splitlines()))
            number = min(error.problem_mark.line + 1, last)  # the end of a text is a line farther
            line = f"line {number}: "
        raise UserError(f"{line}{error.problem}") from error
    except RecursionError as error:
        raise UserError("lists or mappings are nested too deeply") from error
    except yaml.YAMLError as error:
        raise UserError(" ".join(str(error).split())) from error


def dump_yaml(content: object) -> str:
    """Values as YAML that `load_yaml` reads back."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def shipped(kind: str) -> dict[str, Path]:
    """The project's files of a kind by their names."""
    here = Path(__file__).resolve()
    places = (here.parent / "yaml" / FILE_KINDS[kind], here.parents[2] / FILE_KINDS[kind])
    folder = next((place for place in places if place.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def find_file(name: str | Path, kind: str) -> Path:
    """The file of a path, or the project's file of a name; UserError if there is neither."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = shipped(kind) if kind in FILE_KINDS else {}
    # As in a clone, where recipes/books-5m.yaml is the file of books-5m.
    here = {str(Path(FILE_KINDS[kind], path.name)): path for path in known.values()}
    if str(name) in known | here:
        return (known | here)[str(name)]
    for other_kind in FILE_KINDS.keys() - {kind}:
        if str(name) in shipped(other_kind) and kind in FILE_KINDS:
            use = f"{USES[other_kind]} {name}"
            raise UserError(f"{name}: no such {kind}; it is a {other_kind}: {use}")
    other = f"; give the path of a file, or one of {', '.join(known)}" if known else ""
    raise UserError(f"{name}: no such {kind}{did_you_mean(str(name), known, other)}")


def read_yaml(path: str | Path, kind: str) -> dict[str, Any]:
    """The content of a YAML file, or of one of the project's by its name."""
    path = find_file(path, kind)
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UserError, and text of another encoding
        raise UserError(f"{path}: not a readable {kind}: {error}") from error
    if not isinstance(content, dict):
        there = "an empty file" if content is None else repr(content)
        raise UserError(f"{path}: a {kind} has sections with fields and values; got {there}")
    return content
