"""Checkpoints on disk: which are whole, and what writing them reports."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from coca_attention.errors import WRITER, UserError, known_problem
from coca_lab.training.sharding import first_failure

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# Written last: size and SHA-256 of every file of a checkpoint.
CHECKSUM_FILE = "checksums.json"


@contextmanager
def catch_write_errors(folder: Path, describe_saved: Callable[[], str]) -> Iterator[None]:
    """Turn errors in writing files, such as a full disk, into a UserError.

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
        raise UserError(
            f"{folder} cannot be written: training stopped, {describe_saved()}. {problem}"
        ) from error


def checksums(folder: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of every file in a folder, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != CHECKSUM_FILE and not name.endswith(".partial"):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = [path.stat().st_size, digest]
    return found


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the newest first."""
    steps = {
        path: int(step)
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (step := path.name.rpartition("-")[2]).isdecimal() and path.is_dir()
    }
    return sorted(steps, key=steps.__getitem__, reverse=True)


def problem_of(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole, or None.

    The first process writes ``trainer_state.json`` after all others have written their parts, and
    ``checksums.json`` last; checkpoints of earlier versions have none.
    """
    try:
        int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    except FileNotFoundError:
        return "it is incomplete"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{STATE_FILE} is damaged"
    path = checkpoint / CHECKSUM_FILE
    if not path.is_file():
        return None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["files"]
        found = checksums(checkpoint)
        for name, value in known.items():
            if found.get(name) != value:
                return f"{name} is {'damaged' if name in found else 'missing'}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUM_FILE} is damaged"
    return None


def last_checkpoint(folder: Path, *, say: bool = False) -> Path | None:
    """The latest whole checkpoint, or None.

    Args:
        folder: The folder of the checkpoints.
        say: Whether to log which later ones are not whole.
    """
    problems: list[str] = []
    found = None
    for path in sorted_checkpoints(folder):
        problem = problem_of(path)
        if problem is None:
            found = path
            break
        problems.append(f"{path.name} cannot be used ({problem})")
    if say and problems:
        then = f"goes on from {found.name}" if found else "starts again at the first step"
        log.warning("%s: %s; training %s", folder, ", ".join(problems), then)
    return found
