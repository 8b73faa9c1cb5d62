"""The pages of docs/reference, made from the code, so that a forge shows them as the site does.

    python scripts/reference.py   # after a change of a public docstring, an option or a field

Of a package all names of ``__all__``, with signature, description, arguments and example; of the
commands all options, of which those of training are the fields of a recipe.
"""

import importlib
import inspect
import re
from argparse import SUPPRESS, Action
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import get_args

from coca_lab.cli import COMMANDS
from coca_lab.cli.parsing import command_parser
from coca_lab.options import option_help, option_of, option_parser
from coca_lab.settings.evaluations import TASK_OPTIONS

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES = {
    "ops": "coca_attention.ops",
    "layers": "coca_attention.layer",
    "models": "coca_attention.models",
    "testing": "coca_attention.testing",
    "data": "coca_lab.data",
    "training": "coca_lab.training",
    "evaluation": "coca_lab.evaluation",
    "report": "coca_lab.report",
}
HEADINGS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")
MARK = "<!-- commands -->\n"
"""Behind it stands what is made of the page of commands."""


def pages() -> dict[str, str]:
    """The text of every page that is made, by its name."""
    made = {name: package_page(path) for name, path in PAGES.items()}
    text = (FOLDER / "commands.md").read_text(encoding="utf-8")
    return {**made, "commands": f"{text.partition(MARK)[0]}{MARK}\n{commands().strip()}\n"}


def package_page(path: str) -> str:
    """The page of a package."""
    module = importlib.import_module(path)
    parts = [f"# {path}", _text(inspect.getdoc(module) or "")]
    parts += [_entry(module, name) for name in sorted(module.__all__, key=_order(module))]
    return "\n\n".join(parts) + "\n"


def _order(module: ModuleType) -> Callable[[str], tuple[bool, str]]:
    """Classes and functions first, by name."""
    return lambda name: (not callable(getattr(module, name)), name.lower())


def _entry(module: ModuleType, name: str) -> str:
    """A name's section; of a class with its public methods."""
    thing = getattr(module, name)
    if not callable(thing) or not hasattr(thing, "__name__") or thing.__name__ != name:
        return f"## {name}\n\n{_text(_note(module, name))}"
    parts = [f"## {name}", _signature(name, thing), _text(_own_doc(thing))]
    if inspect.isclass(thing):
        for method, member in vars(thing).items():
            called = getattr(member, "__func__", member)
            if method.startswith("_") or not inspect.isfunction(called) or not called.__doc__:
                continue
            parts += [f"### {name}.{method}", _signature(method, called), _text(_own_doc(called))]
    return "\n\n".join(filter(None, parts))


def _own_doc(thing: Callable[..., object]) -> str:
    """The docstring, unless it is one that a dataclass gets or a Transformers class inherits."""
    doc = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return inspect.cleandoc(doc) if doc and not doc.startswith(f"{thing.__name__}(") else ""


def _note(module: ModuleType, name: str) -> str:
    """The string below an assignment, in the file of the package that has it."""
    assert module.__file__ is not None
    for path in [Path(module.__file__), *sorted(Path(module.__file__).parent.glob("*.py"))]:
        source = path.read_text(encoding="utf-8")
        match = re.search(rf'^{name}\b[^\n]*=[^"]*?^"""(.*?)"""', source, re.MULTILINE | re.DOTALL)
        if match:
            return inspect.cleandoc(match[1])
    return ""


def _signature(name: str, thing: Callable[..., object]) -> str:
    """How it is called, an argument a line where they are many."""
    if inspect.isclass(thing) and thing.__init__ in (object.__init__, ValueError.__init__):
        return ""
    given = list(inspect.signature(thing).parameters.values())
    shown = [p.replace(annotation=p.empty) for p in given if p.name not in ("self", "cls")]
    words, star = [], False
    for parameter in shown:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        value = parameter.default
        if value is not parameter.empty and re.search(r" at 0x|factory", repr(value)):
            parameter = parameter.replace(default=...)
        words.append(str(parameter).replace("'", '"').replace("Ellipsis", "..."))
    line = f"{name}({', '.join(words)})"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(words) + ",\n)"
    return f"```py\n{line}\n```"


def _text(doc: str) -> str:
    """A Google-style docstring as Markdown."""
    first, *parts = re.split(rf"^({'|'.join(HEADINGS)}):\n", doc, flags=re.MULTILINE)
    found = [_plain(first)]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        after = re.sub(r"\A(?: +\S.*\n?|\n)*", "", text)  # the section is indented
        body = inspect.cleandoc("\n" + text.removesuffix(after))
        if heading.startswith("Example"):
            found.append(f"```pycon\n{body}\n```")
        elif heading in ("Returns", "Yields"):
            found.append(f"**{heading}** {_plain(' '.join(body.split()))}")
        else:
            found.append(f"**{heading}**\n\n{_listed(body)}")
        found.append(_plain(after))
    return "\n\n".join(filter(None, (part.strip() for part in found)))


def _listed(body: str) -> str:
    """Arguments or errors as a list."""
    entries = re.split(r"\n(?=\S)", body)
    lines = []
    for entry in entries:
        name, colon, text = " ".join(entry.split()).partition(": ")
        lines.append(f"- `{name}`: {_plain(text)}" if colon else f"- {_plain(name)}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Names between backquotes as code; what Markdown would read as HTML or emphasis escaped."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    code = (f"`{part.strip('`')}`" for part in parts[1::2])
    prose = [re.sub(r"(?<!\\)([<|*_])", r"\\\1", part) for part in parts[::2]]
    return "".join(p + c for p, c in zip(prose, [*code, ""], strict=True))


def commands() -> str:
    """A section per command: its usage, and a list of its options."""
    parts = []
    for name, (_, summary) in (pair for table in COMMANDS.values() for pair in table.items()):
        if name != "eval":
            parts.append(f"## coca {name}\n\n{_options(name, summary)}")
            continue
        parts.append(f"## coca eval\n\n{summary}")
        for task, options in TASK_OPTIONS.items():
            text = _options(f"eval {task}", options.summary)
            parts.append(f"### coca eval {task}\n\n{text}")
    return "\n\n".join(parts)


def _options(name: str, summary: str) -> str:
    """What the help of a command says, from the parser that would print it."""
    parser = command_parser(name, summary)
    parts = [f"```text\n{parser.usage}\n```", _plain(parser.description or "")]
    for group in parser._action_groups:
        lines = [_option(action) for action in group._group_actions if action.help != SUPPRESS]
        lines = [line for line in lines if line]
        parts += [f"**{group.title}**", "\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def _option(action: Action) -> str:
    """An option, and the fields of the dataclasses that its value has."""
    if action.nargs == 0:  # a help
        return ""
    value = str(action.metavar or action.dest.rpartition(".")[2].upper())
    label = f"{option_of(action.dest)} {value}" if action.option_strings else value
    lines = [f"- `{label}`: {_plain(option_help(action))}"]
    hint = getattr(action, "_typehint", None)
    for each in get_args(hint):
        if isinstance(each, type) and is_dataclass(each):
            fields = option_parser("", [each])._actions
            lines += [f"  - `{item.dest}`: {_plain(option_help(item))}" for item in fields[1:]]
    return "\n".join(lines)


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
