"""Commands of recipes: list them, print one, and train a model from one."""

import shutil
import textwrap
from pathlib import Path

from coca_attention.errors import UserError, did_you_mean
from coca_lab.arguments import FILE_KINDS, first_sentence, shipped
from coca_lab.cli.console import parse, parse_file
from coca_lab.recipe import load_recipe, recipe_parser

USES = {"recipe": "coca train NAME", "study": "coca study NAME"}
SHOWN = (
    "model.attention", "model.hidden_size", "model.num_layers", "model.num_heads", "model.layers",
    "model.start", "data.source", "data.block_length", "data.held_out", "data.max_tokens",
    "data.passkey_share", "validation.every", "validation.passkeys",
    "training.steps", "training.global_batch_size", "training.micro_batch_size",
    "training.learning_rate", "training.precision", "training.seed", "training.save_every",
)  # fmt: skip
"""Fields of a recipe in the short help."""
NAMES = 29
"""Columns for the names in the list."""


def recipes_command(words: list[str]) -> None:
    """List the project's recipes and studies, or print one to change it."""
    (name,) = parse("coca recipes", recipes_command, words, [], ["recipe?"])
    if name is None:
        width = max(shutil.get_terminal_size().columns, 2 * NAMES)
        for kind, folder in FILE_KINDS.items():
            print(f"{folder} ({USES[kind]}):")
            for each, path in shipped(kind).items():
                line = f"  {each:<{NAMES}} "
                print(line + textwrap.shorten(purpose(path), width - len(line), placeholder=" …"))
        print("\ncoca recipes NAME prints one, with what it needs.")
        return
    kind, _, rest = name.rpartition("/")
    for each, folder in FILE_KINDS.items():
        if kind in ("", folder) and rest in shipped(each):
            print(shipped(each)[rest].read_text(encoding="utf-8"), end="")
            return
    known = [*shipped("recipe"), *shipped("study")]
    raise UserError(f"no recipe or study is called {name}{did_you_mean(rest, known)}")


def purpose(path: Path) -> str:
    """What the head of a file says first, in one line."""
    lines = path.read_text(encoding="utf-8").partition("\n#\n")[0].splitlines()
    return first_sentence(" ".join(line.lstrip("# ") for line in lines if line.startswith("#")))


def train_command(words: list[str]) -> None:
    """Train a model from a recipe (YAML); resumes when run again."""
    usage = "coca train RECIPE.yaml [--training.steps 100 …]"
    recipe, overrides, chosen = parse_file(
        words, train_command, recipe_parser, "recipe", usage, SHOWN
    )
    folder = chosen.output
    settings = load_recipe(recipe, overrides)
    # Takes longer to import than the help takes to print.
    from accelerate import PartialState

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
