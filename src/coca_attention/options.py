"""Command-line options and YAML from documented dataclasses, errors in one line."""

import re
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from coca_attention.errors import UserError


class OptionParser(ArgumentParser):
    """Options named with hyphens, their help from the docstrings below the fields."""

    def __init__(
        self, program: str | None = None, description: str | None = None, **kwargs: Any
    ) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        # jsonargparse makes parsers of this class for nested settings, with arguments of its own.
        kwargs = {"exit_on_error": False, "allow_abbrev": False, **kwargs}
        self.flags: set[str] = set()
        super().__init__(prog=program, description=description, **kwargs)

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """As jsonargparse's; remembers which fields are flags."""
        for item in getattr(theclass, "__dataclass_fields__", {}).values():
            if item.type in (bool, "bool"):
                self.flags.add("--" + item.name)
        return super().add_class_arguments(theclass, *args, **kwargs)

    def format_help(self) -> str:
        """The help, with hyphens for the underscores of the fields' names."""
        return re.sub(
            r"--[a-z_.]+", lambda match: match[0].replace("_", "-"), super().format_help()
        )

    def read(self, words: list[str]) -> Any:
        """Parse words and build the dataclasses.

        Args:
            words: Command-line words; options with hyphens or underscores.

        Returns:
            A namespace of texts and dataclass instances.

        Raises:
            UserError: If an option is unknown or a value unfit, in one line.
        """
        try:
            return self.instantiate(self.parse_args(_as_fields(words, self.flags)))
        except ArgumentError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            text = ": ".join(dict.fromkeys(lines)) or type(error).__name__
            raise UserError(f"{text}; see {self.prog} --help") from error


def take_option(words: list[str], option: str) -> tuple[list[str], str | None]:
    """Remove ``option VALUE`` or ``option=VALUE`` from words; return what is left and the value."""
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            return words[:index] + words[index + 2 :], words[index + 1]
        if word.startswith(f"{option}="):
            return words[:index] + words[index + 1 :], word.split("=", 1)[1]
    return words, None


def check_sections(path: Path, kind: str, known: list[str]) -> None:
    """Refuse sections that a YAML file should not have; the parser passes over those left empty.

    Args:
        path: The file.
        kind: What it is called.
        known: Names of its sections.

    Raises:
        UserError: If it is no readable YAML, no mapping, or has an unknown section.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not set(content) <= set(known):
        there = ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)
        raise UserError(f"{path}: a {kind} has the sections {', '.join(known)}; got {there}")


def _as_fields(words: list[str], flags: set[str]) -> list[str]:
    """Write ``--attend-last 64 --skip-short`` as ``--attend_last 64 --skip_short=true``."""
    fields = []
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            field = "--" + name[2:].replace("-", "_")
            alone = not equals and (
                following.startswith("--")
                or (field in flags and following.lower() not in ("true", "false", "yes", "no"))
            )
            asks = name.endswith("help") or name in ("--print-config", "--print_config")
            if alone and not asks:
                equals, value = "=", "true"
            word = "--" + name[2:].replace("-", "_") + equals + value
        fields.append(word)
    return fields
