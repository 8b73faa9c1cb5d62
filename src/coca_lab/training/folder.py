"""The folder of a run: whose it is, its records and checkpoints, and errors in these files."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coca_attention.errors import UserError
from coca_lab.files import (
    WRITER,
    check_writable,
    hold,
    known_problem,
    no_empty_folders,
    read_json,
    sync,
    write_json,
    write_text,
)
from coca_lab.recipe import TEXT, Recipe, as_yaml, check_same_recipe

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
STATE_FILE = "trainer_state.json"
UNFINISHED = "unfinished"
"""In a checkpoint's folder while it is written."""


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a fully trained model."""
    return (Path(output) / SUMMARY_FILE).is_file()


def read_summary(output: str | Path) -> Summary:
    """The ``training.json`` of a finished run folder."""
    return read_json(Path(output) / SUMMARY_FILE)


@contextmanager
def claim(
    recipe: Recipe,
    inputs: Mapping[str, str],
    output: Path,
    may_change: Collection[str] = (),
) -> Iterator[None]:
    """Make a folder that of a run, new or unfinished, and keep other processes from it.

    An error before the first step leaves nothing in it. ``inputs`` are fingerprints of what the
    recipe names.
    """
    with no_empty_folders(output / RECIPE_FILE):
        check_writable(output / RECIPE_FILE)
        with hold(output / LOCK_FILE):
            if has_begun(output):
                check_same_recipe(recipe, output / RECIPE_FILE, {"model.dtype", *may_change})
                check_same_inputs(inputs, output)
            else:
                # What a kill has left before the first checkpoint.
                remove_start(output)
                write_json(output / INPUTS_FILE, inputs)
            write_text(output / RECIPE_FILE, as_yaml(recipe))
            try:
                yield
            except BaseException:
                # A run that has trained keeps its curves.
                if not has_begun(output) and not (output / "logs").exists():
                    remove_start(output)
                raise


def remove_start(output: Path) -> None:
    """Remove all files of a run that has no checkpoint."""
    for name in (RECIPE_FILE, INPUTS_FILE, TEXT_FILE, START_FILE):
        (output / name).unlink(missing_ok=True)
    for name in (TOKENIZER, "checkpoints", "stages", "logs"):
        shutil.rmtree(output / name, ignore_errors=True)


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


def check_finished(
    recipe: Recipe, inputs: Mapping[str, str], output: Path, may_change: Collection[str] = ()
) -> None:
    """Raise UserError if a finished run had another recipe, text, tokenizer, start or teacher."""
    check_same_recipe(recipe, output / RECIPE_FILE, may_change)
    known = check_same_inputs(inputs, output)
    # A dataset of the Hub has a name alone, and a run of an earlier version no record.
    unknown = [name for name, each in inputs.items() if not known or each.startswith("hf:")]
    if unknown:
        names = ", ".join(unknown)
        log.warning("%s is finished; not known is whether this changed since: %s", output, names)


def check_same_inputs(inputs: Mapping[str, str], output: Path) -> bool:
    """Raise UserError if inputs differ from those of the run; False if it has no record."""
    path = output / INPUTS_FILE
    if not path.is_file():
        return False
    before = read_json(path)
    changed = [f"the {name}" for name in inputs if inputs[name] != before.get(name)]
    if changed:
        raise UserError(
            f"{output}: {' and '.join(changed)} {'has' if len(changed) == 1 else 'have'} changed "
            "since this run was started: restore it, remove the folder to train again, or choose "
            "another --output"
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


# Checkpoints


@contextmanager
def writing_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Mark a checkpoint until all processes have written it and it is on the disk."""
    state = PartialState()
    if state.is_main_process:
        shutil.rmtree(checkpoint, ignore_errors=True)  # what is left of it was not complete
        write_text(checkpoint / UNFINISHED, "")
    state.wait_for_everyone()
    yield
    sync([*checkpoint.rglob("*"), checkpoint])
    state.wait_for_everyone()
    if state.is_main_process:
        (checkpoint / UNFINISHED).unlink()
        sync([checkpoint, checkpoint.parent])


@contextmanager
def catch_write_errors(folder: Path, describe_saved: Callable[[], str]) -> Iterator[None]:
    """Turn errors in writing, such as a full disk, into a UserError that says what was saved."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        cause = _first_failure(error)
        if isinstance(cause, RuntimeError) and not re.search(WRITER, str(cause)):
            raise
        text = " ".join(str(cause).split())[:200]
        problem = known_problem(cause) or f"{text}: run the same command again to resume"
        raise UserError(
            f"{folder} cannot be written: training stopped, {describe_saved()}. {problem}"
        ) from error


@contextmanager
def catch_read_errors(checkpoint: Path) -> Iterator[None]:
    """Turn errors in reading a checkpoint into a UserError."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        cause = _first_failure(error)
        # What PyTorch says of a damaged file is advice to run code in it.
        safe = not isinstance(cause, UnpicklingError)
        reason = f" ({' '.join(str(cause).split())[:500]})" if safe else ""
        raise UserError(
            f"{checkpoint} cannot be read{reason}: restore its files, or remove the folder to "
            "resume from the previous checkpoint"
        ) from error


def check_complete(checkpoint: Path, trainer: Trainer, processes: int | None) -> None:
    """Raise UserError if a file is missing without which a run would end with other weights.

    Args:
        checkpoint: The folder.
        trainer: It resumes there, with the optimizer's and the random state of its process.
        processes: How many have written the checkpoint; None if that is not known.
    """
    count = trainer.args.world_size
    index = trainer.args.process_index
    missing = []
    # DeepSpeed has files of its own, which it reads itself. Those of FSDP are in a folder.
    if not trainer.is_deepspeed_enabled and not any(checkpoint.glob("optimizer*")):
        missing.append(OPTIMIZER_NAME)
    if not (checkpoint / SCHEDULER_NAME).is_file():
        missing.append(SCHEDULER_NAME)
    if trainer.accelerator.scaler is not None and not (checkpoint / SCALER_NAME).is_file():
        missing.append(SCALER_NAME)
    random = "rng_state.pth" if count == 1 else f"rng_state_{index}.pth"
    if not (checkpoint / random).is_file():
        others = any(checkpoint.glob("rng_state*.pth"))
        if others and processes not in (count, None):
            log.warning(
                "%s was written by %s processes and is read by %s: random numbers, as of dropout, "
                "are others from here on",
                checkpoint,
                processes,
                count,
            )
        else:
            missing.append(random)
    if missing:
        raise UserError(
            f"{checkpoint} has no {' and no '.join(missing)}, without which training would end "
            "with other weights: restore it, or remove the folder to resume from the previous "
            "checkpoint"
        )


def reads_checkpoint(load: Callable[..., None]) -> Callable[..., None]:
    """A method of Trainer that reads a checkpoint, its first argument, by `catch_read_errors`."""

    @wraps(load)
    def named(trainer: object, checkpoint: str | None, *args: object, **kwargs: object) -> None:
        with catch_read_errors(Path(checkpoint or "")):
            load(trainer, checkpoint, *args, **kwargs)

    return named


def _first_failure(error: BaseException) -> BaseException:
    """What failed first: under FSDP, all processes raise the failures of all."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next(iter(failures.values()))[0] if failures else error


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the newest first."""
    steps = {
        path: int(step)
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (step := path.name.rpartition("-")[2]).isdecimal() and path.is_dir()
    }
    return sorted(steps, key=steps.__getitem__, reverse=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint in a folder that was written to its end, or None."""
    for checkpoint in sorted_checkpoints(folder):
        if (checkpoint / UNFINISHED).exists():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
            return checkpoint
    return None


def last_state(folder: Path) -> tuple[Path | None, TrainerState]:
    """The checkpoint to resume from, or None, and its state; a warning names incomplete ones."""
    chosen = None
    if PartialState().is_main_process:  # others may see an older state of a network file system
        chosen = last_checkpoint(folder)
        every = sorted_checkpoints(folder)
        unfinished = [path.name for path in every[: every.index(chosen) if chosen else None]]
        if unfinished:
            then = f"resumes from {chosen.name}" if chosen else "starts again at the first step"
            log.warning("%s: %s not complete; training %s", folder, ", ".join(unfinished), then)
    chosen = broadcast_object_list([chosen])[0]
    if chosen is None:
        return None, TrainerState()
    with catch_read_errors(chosen):
        return chosen, TrainerState.load_from_json(str(chosen / STATE_FILE))
