"""The references of the commands and of the recipe, as `scripts/reference.py` writes them."""

import html
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

from coca_lab.arguments import field_docs
from coca_lab.cli import COMMANDS, Run, load
from coca_lab.cli.evaluation import task_commands
from coca_lab.recipe import Recipe

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
UNLIMITED = 2**40  # stands for no upper limit


def commands() -> str:
    """A section per command: its usage, and a list of its options."""
    parts = []
    for table in COMMANDS.values():
        for name, (_, summary) in table.items():
            parts.append(f"## coca {name}\n")
            if name == "eval":
                parts.append(f"{summary}\n")
                for task, run in task_commands().items():
                    parts.append(f"### coca eval {task}\n\n{_options(f'eval-{task}', run)}")
            elif name == "serve":
                parts.append(f"{summary} The options are those of `transformers serve MODEL`.\n")
            else:
                parts.append(_options(name, load(name)))
    return "\n".join(parts)


def recipe() -> str:
    """A section per section of a recipe: its fields with type, default and meaning."""
    docs, types = field_docs(Recipe), get_type_hints(Recipe)
    parts = []
    for section in fields(Recipe):
        theclass: Any = types[section.name]
        (theclass,) = get_args(theclass) or [theclass]
        parts.append(f"## {section.name}\n\n{docs[section.name]}\n\n")
        parts += _fields(section.name, theclass)
    return "\n".join(parts)


class _Parser(Exception):
    """Carries the parser that was about to print its help."""

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _options(name: str, command: Run) -> str:
    def stop(self: ArgumentParser, file: object = None) -> None:
        raise _Parser(self)

    with patch.object(ArgumentParser, "print_help", stop):
        try:
            command(["--help"])
        except _Parser as found:
            parser = found.parser
    usage = f"```text\n{parser.usage}\n```\n\n{parser.description}\n"
    groups = [
        f"**{group.title}**\n\n{_list(map(_entry(name), actions))}"
        for group in parser._action_groups
        if (actions := [one for one in group._group_actions if one.dest != "help"])
    ]
    return "\n".join([usage, *groups, parser.epilog or ""])


def _entry(name: str) -> Callable[[Action], tuple[str, str, str, str]]:
    def entry(action: Action) -> tuple[str, str, str, str]:
        term = action.option_strings[0] if action.option_strings else action.dest.upper()
        value = action.metavar or ("" if not action.option_strings else action.dest.upper())
        text = "" if action.help in (None, SUPPRESS) else action.help.replace("%%", "%")
        return f"{name}.{action.dest}", term, str(value), text

    return entry


def _fields(prefix: str, theclass: Any) -> Iterator[str]:
    """The list of a dataclass's fields, then those of the dataclasses that it holds by name."""
    docs, types = field_docs(theclass), get_type_hints(theclass, include_extras=True)
    entries, nested = [], []
    for item in fields(theclass):
        name, kind = f"{prefix}.{item.name}", types[item.name]
        nested += [(f"{name}.NAME", one) for one in get_args(kind) if is_dataclass(one)]
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        value = _type(kind)
        if default is not MISSING and default not in (None, ""):
            text = str(default).lower() if isinstance(default, bool) else default
            value += f", default {text}"
        entries.append((name, item.name, value, docs[item.name]))
    yield _list(iter(entries))
    for name, one in nested:
        yield f"### {name}\n\n"
        yield from _fields(name, one)


def _list(entries: Iterator[tuple[str, str, str, str]]) -> str:
    """An HTML list of (anchor, term, value, meaning), which narrow screens can wrap."""
    lines = ['<dl class="reference">']
    for anchor, *texts in entries:
        term, value, meaning = map(html.escape, texts)
        value = f" <code>{value}</code>" if value else ""
        lines.append(f'<dt id="{anchor}"><code>{term}</code>{value}</dt><dd>{meaning}</dd>')
    return "\n".join([*lines, "</dl>\n"])


def _type(kind: Any) -> str:
    """A type as documentation has it: ``int ≥ 1``, ``a, b or c``."""
    inner = get_args(kind)
    if get_origin(kind) is Annotated:
        rules = [asdict(one) for one in inner[1].metadata if is_dataclass(one)]
        found = [pair for rule in rules for pair in rule.items()]
        limits = [f"{SIGNS[k]} {v:,}" for k, v in found if k in SIGNS and v != UNLIMITED]
        return " ".join([_type(inner[0]), " and ".join(limits)]).strip()
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type(one) for one in inner if one is not NoneType)
    if get_origin(kind) is Literal:
        return " | ".join(map(str, inner))
    if inner:
        return f"{kind.__name__}[{', '.join(map(_type, inner))}]"
    return kind.__name__
