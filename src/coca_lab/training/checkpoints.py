"""Checkpoints on disk: how they are written, which one a run resumes, and errors in their files."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from pickle import UnpicklingError

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coca_attention.errors import UserError
from coca_lab.files import WRITER, known_problem, sync, sync_folder, write_text

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
UNFINISHED = "unfinished"
"""In a checkpoint's folder while it is written."""


@contextmanager
def writing_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Mark a checkpoint until all processes have written it and it is on the disk."""
    state = PartialState()
    if state.is_main_process:
        shutil.rmtree(checkpoint, ignore_errors=True)  # what is left of it was not complete
        write_text(checkpoint / UNFINISHED, "")
    state.wait_for_everyone()
    yield
    sync(checkpoint)
    state.wait_for_everyone()
    if state.is_main_process:
        (checkpoint / UNFINISHED).unlink()
        for folder in (checkpoint, checkpoint.parent):
            sync_folder(folder)


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


def _is_whole(checkpoint: Path) -> bool:
    """Whether it was written to its end."""
    if (checkpoint / UNFINISHED).exists():
        return False
    try:
        int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return True


def last_checkpoint(folder: Path) -> Path | None:
    """The latest complete checkpoint in a folder, or None."""
    return next(filter(_is_whole, sorted_checkpoints(folder)), None)


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
