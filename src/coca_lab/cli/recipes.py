"""Commands of recipes: list them, print one, and train a model from one."""

import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from coca_attention.errors import UserError, did_you_mean, error_prefix
from coca_lab.options import first_sentence
from coca_lab.recipe import load_recipe
from coca_lab.settings.commands import ListSettings
from coca_lab.yaml_files import FILE_KINDS, USES, shipped

NAMES = 29
"""Columns for the names in the list."""
FIRST = {
    "recipe": ("native-1m", "native-books-5m", "books-5m", "base-books-5m",
               "convert-books-5m-teacher", "passkey-1m"),
    "study": ("quickstart", "long-context", "books", "conversion", "smollm2", "paper-50m"),
}  # fmt: skip
"""Those to begin with, in this order; the others repeat a result."""


def recipes_command(name: str | None, wanted: ListSettings) -> None:
    """List the project's recipes and studies, or print one to change it."""
    if name is None:
        # Into a file or a pipe, lines are whole.
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
        lines = textwrap.TextWrapper(
            width=max(columns, 2 * NAMES),
            subsequent_indent=" " * (NAMES + 3),
            break_long_words=False,
            break_on_hyphens=False,
        )

        def show(heading: str, paths: Mapping[str, Path]) -> None:
            print(heading)
            for each, path in paths.items():
                print(lines.fill(f"  {each:<{NAMES}} {purpose(path)}"))

        left = {kind: shipped(kind) for kind in FILE_KINDS}
        for kind, folder in FILE_KINDS.items():
            first = {each: left[kind].pop(each) for each in FIRST[kind]}
            show(f"{folder} to begin with ({USES[kind]} NAME):", first)
        if wanted.all:
            for kind, folder in FILE_KINDS.items():
                others = f"{folder} that repeat results/ and the paper ({USES[kind]} NAME):"
                show(others, left[kind])
        print("\ncoca recipes NAME prints one, with what it needs.")
        if not wanted.all:
            count = sum(map(len, left.values()))
            print(f"coca recipes --all lists {count} more, which repeat results/ and the paper.")
        return
    kind, _, rest = name.removesuffix(".yaml").rpartition("/")
    for each, folder in FILE_KINDS.items():
        if kind in ("", folder) and rest in shipped(each):
            print(shipped(each)[rest].read_text(encoding="utf-8"), end="")
            return
    known = [*shipped("recipe"), *shipped("study")]
    hint = did_you_mean(rest, known, f"; choose one of {', '.join(known)}")
    raise UserError(f"no recipe or study is called {name}{hint}")


def purpose(path: Path) -> str:
    """What the head of a file says first, in one line."""
    lines = path.read_text(encoding="utf-8").partition("\n#\n")[0].splitlines()
    return first_sentence(" ".join(line.lstrip("# ") for line in lines if line.startswith("#")))


def train_command(recipe: str, overrides: list[str], chosen: Namespace) -> None:
    """Train a model from a recipe (YAML); resumes when run again."""
    folder = chosen.output
    settings = load_recipe(recipe, overrides, check=False)
    from coca_lab.source_files import source_files  # imports pyarrow

    for text in settings.texts:
        with error_prefix(text.where):
            source_files(text.source.source)
    with error_prefix(f"{recipe}: "):
        settings.check()  # after the paths, because it imports torch
    # Takes seconds to import, for which the list of recipes need not wait.
    from accelerate import PartialState

    from coca_lab.cli.generate import generate_words
    from coca_lab.training import is_finished, read_summary, train
    from coca_lab.training.run import what_was_kept

    was = "finished before, " if is_finished(folder) else ""
    summary = read_summary(train(settings, folder))
    if not PartialState().is_main_process:
        return
    curve = summary["validation"]
    validation = f", validation perplexity {curve[-1]['perplexity']:.2f}" if curve else ""
    print(
        f"{folder}: {was}{summary['parameters']:,} parameters, {summary['tokens']:,} tokens, "
        f"last loss {summary['curve'][-1]['loss']:.3f}{validation}"
    )
    if summary["recipe"]["data"].get("mixture"):
        read = (f"{name} {times:.2f}" for name, times in summary["source_epochs"].items())
        print(f"passes over each source: {', '.join(read)}")
    kept = what_was_kept(summary)
    if kept:
        print(kept)
    print(f"Next: {generate_words(folder)}, coca eval passkey {folder}, coca report {folder}")
