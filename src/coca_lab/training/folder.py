"""Run folders: whose they are, what they hold, and whether what they were made from is the same."""

import logging
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError, error_prefix
from coca_lab.data.documents import text_fingerprint
from coca_lab.files import check_writable, hold, read_json, write_json, write_text
from coca_lab.fingerprints import fingerprint, model_fingerprint
from coca_lab.recipe import TEXT, Recipe, as_yaml, check_same_recipe
from coca_lab.training.checkpoints import sorted_checkpoints

log = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder, or a stage's, that has it is finished.
SUMMARY_FILE, STAGE_FILE = "training.json", "stage.json"
# While a process trains.
LOCK_FILE = ".lock"
TEXT_FILE, START_FILE, INPUTS_FILE = "text.json", "start.json", "inputs.json"
Digest = dict[str, int | str]
"""Of a text: how many ``tokens`` were read, and their ``sha256``."""
Summary = dict[str, Any]
"""The content of ``training.json``, or of the file of a stage."""
TOKENIZER = "tokenizer"
"""Folder of a newly trained tokenizer."""


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a fully trained model."""
    return (Path(output) / SUMMARY_FILE).is_file()


def read_summary(output: str | Path) -> Summary:
    """The ``training.json`` of a finished run folder."""
    return read_json(Path(output) / SUMMARY_FILE)


@contextmanager
def claim(recipe: Recipe, output: Path, may_change: Collection[str]) -> Iterator[None]:
    """Make a folder that of a run, new or unfinished, and keep other processes from it."""
    inputs = inputs_of(recipe)
    check_writable(output / RECIPE_FILE)
    with hold(output / LOCK_FILE):
        if has_begun(output):
            check_same_recipe(recipe, output / RECIPE_FILE, {"model.dtype", *may_change})
            check_same_inputs(inputs, output)
        else:
            # A start that failed, for example for lack of text, has left nothing to resume.
            for name in (TEXT_FILE, START_FILE):
                (output / name).unlink(missing_ok=True)
            for name in (TOKENIZER, "checkpoints", "stages", "logs"):
                shutil.rmtree(output / name, ignore_errors=True)
            write_json(output / INPUTS_FILE, inputs)
        write_text(output / RECIPE_FILE, as_yaml(recipe))
        yield


def stage_folder(recipe: Recipe, output: Path, number: int) -> Path:
    """Where the checkpoints of a stage are."""
    return output / "stages" / recipe.stages[number].name if recipe.stages else output


def has_begun(output: Path) -> bool:
    """Whether a folder holds a run with a checkpoint, whole or not; UserError if something else."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another --output")
    if not (output / RECIPE_FILE).is_file():
        # A start that was killed may have left partial files.
        there = output.iterdir() if output.is_dir() else []
        if any(not p.name.endswith(".partial") and p.name != LOCK_FILE for p in there):
            raise UserError(f"{output} exists and is not a run folder; choose another --output")
        return False
    folders = [output, *output.glob("stages/*")]
    return is_finished(output) or any(
        (folder / STAGE_FILE).is_file() or sorted_checkpoints(folder / "checkpoints")
        for folder in folders
    )


def check_finished(recipe: Recipe, output: Path, may_change: Collection[str] = ()) -> None:
    """Raise UserError if a finished run had another recipe, text, tokenizer, start or teacher."""
    check_same_recipe(recipe, output / RECIPE_FILE, may_change)
    inputs = inputs_of(recipe)
    known = check_same_inputs(inputs, output)
    # A dataset of the Hub has a name alone, and a run of an earlier version no record.
    unknown = [name for name, each in inputs.items() if not known or each.startswith("hf:")]
    if unknown:
        names = ", ".join(unknown)
        log.warning("%s is finished; not known is whether this changed since: %s", output, names)


def check_same_inputs(inputs: dict[str, str], output: Path) -> bool:
    """Raise UserError if `inputs_of` a recipe differ from the run's; False if it has no record."""
    path = output / INPUTS_FILE
    if not path.is_file():
        return False
    before = read_json(path)
    changed = [f"the {name}" for name in inputs if inputs[name] != before.get(name)]
    if changed:
        raise UserError(
            f"{output}: {' and '.join(changed)} has changed since this run was started: restore "
            "it, remove the folder to train again, or choose another --output"
        )
    return True


def check_same_text(fingerprint: dict[str, Digest], output: Path) -> None:
    """Write the fingerprint of the texts into the run folder, or compare it with the one there."""
    texts = fingerprint[TEXT] if list(fingerprint) == [TEXT] else fingerprint
    path = output / TEXT_FILE
    if not path.is_file():
        write_json(path, texts)
    elif read_json(path) != texts:
        raise UserError(
            f"{output}: the training text has changed since this run was started (its fingerprint "
            f"is in {path}); restore the text, or choose another --output"
        )


def inputs_of(recipe: Recipe, start: str = "") -> dict[str, str]:
    """Fingerprints of the texts and models that a recipe names, by what they are.

    That of the start may be given, for one that is yet to be trained. UserError if one is missing.
    """
    data, model, inputs = recipe.data, recipe.model, dict[str, str]()
    read = dict[str, str]()  # the first name of a source
    for text in recipe.texts:
        what = "training text" if text.name == TEXT else f"{text.name} text"
        if read.setdefault(text.source.source, what) == what:
            with error_prefix(text.where):
                inputs[what] = text_fingerprint(text.source.source)
    for name, path in (("tokenizer", data.tokenizer), ("teacher", model.teacher)):
        if path is not None:
            inputs[name] = model_fingerprint(path)
    if model.start is not None:
        inputs["start"] = start or model_fingerprint(model.start)
    return inputs


def tokenizer_key(recipe: Recipe) -> str:
    """Fingerprint of everything that a newly trained tokenizer depends on."""
    data, sources = recipe.data, []
    for text in filter(lambda text: text.trains, recipe.texts):
        source = text.source
        about = [source.text_field, source.bad_lines, text.weight]
        sources.append([text_fingerprint(source.source), *about])
    about = [data.held_out, data.vocab_size, data.split_digits, bool(data.passkey_share)]
    return fingerprint([sources, about])
