"""Checkpoints on disk: which are complete, and what writing them reports."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coca_attention.errors import WRITER, TemporaryError, known_problem
from coca_lab.training.sharding import first_failure

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"


@contextmanager
def catch_write_errors(folder: Path, describe_saved: Callable[[], str]) -> Iterator[None]:
    """Turn errors in writing files, such as a full disk, into a TemporaryError.

    Args:
        folder: The folder to write to.
        describe_saved: Says in the message what has been saved before.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        cause = first_failure(error) if isinstance(error, CheckpointException) else error
        if isinstance(cause, RuntimeError) and not re.search(WRITER, str(cause)):
            raise
        text = " ".join(str(cause).split())[:200]
        problem = known_problem(cause) or f"{text}: run the same command again to resume"
        raise TemporaryError(
            f"{folder} cannot be written: training stopped, {describe_saved()}. {problem}"
        ) from error


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the newest first."""
    steps = {
        path: int(step)
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (step := path.name.rpartition("-")[2]).isdecimal() and path.is_dir()
    }
    return sorted(steps, key=steps.__getitem__, reverse=True)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end.

    The first process writes ``trainer_state.json`` after all others have written their parts. What
    damages files later is noticed when they are read, see `catch_read_errors`.
    """
    try:
        int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return True


def last_checkpoint(folder: Path, *, say: bool = False) -> Path | None:
    """The latest complete checkpoint, or None.

    Args:
        folder: The folder of the checkpoints.
        say: Whether to log which later ones are not complete.
    """
    unfinished: list[str] = []
    for path in sorted_checkpoints(folder):
        if is_whole(path):
            break
        unfinished.append(path.name)
    else:
        path = None
    if say and unfinished:
        then = f"goes on from {path.name}" if path else "starts again at the first step"
        log.warning("%s: %s not complete; training %s", folder, ", ".join(unfinished), then)
    return path
