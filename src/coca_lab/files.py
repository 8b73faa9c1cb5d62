"""Files that are whole or absent, folders that one process writes, and what may be replaced."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from coca_attention.errors import TemporaryError, UserError

log = logging.getLogger(__name__)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: it is complete and on the disk, or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            partial.write_text(text, encoding="utf-8")
            replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; ValueError for numbers that JSON does not support (inf, nan)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file that this package wrote.

    Raises:
        UserError: If it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: restore it, or remove it to have it written again"
        ) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name into errors in writing it; a full disk comes without."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def replace(partial: Path, path: Path) -> None:
    """Move a finished file or folder to its place, on the disk before and after."""
    _share_weights(partial)
    sync(partial)
    os.replace(partial, path)
    sync_folder(path.parent)


def _share_weights(path: Path) -> None:
    """Give weights, which safetensors writes for the user alone, the mode of any new file."""
    weights = [path] if path.suffix == ".safetensors" else [*path.rglob("*.safetensors")]
    if weights:
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe"
            probe.touch()
            for file in weights:
                file.chmod(probe.stat().st_mode)


def sync(path: Path) -> None:
    """Wait until a file, or a folder and everything in it, is on the disk."""
    for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
        if each.is_dir():
            sync_folder(each)
        else:
            with open(each, "rb") as file:
                os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A path beside a new file or folder, which takes the target's place when the block ends.

    Only one process at a time writes a target; an interruption leaves nothing of it.

    Args:
        target: Must not exist, or be an empty folder.

    Raises:
        UserError: If the target exists, or another process writes it.
    """
    partial = target.with_name(f".{target.name}.coca-partial")

    def remove() -> None:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)

    with hold(target.with_name(f".{target.name}.lock"), target):
        check_new(target)  # another process may have written it since the caller looked
        remove()  # of a process that was killed
        try:
            yield partial
            replace(partial, target)
        finally:
            remove()


@contextmanager
def hold(path: Path, what: Path | None = None) -> Iterator[None]:
    """Keep other processes from what a lock file stands for, in the ``with`` block.

    The lock ends with the process, however it ends.

    Args:
        path: The lock file, which is removed at the end.
        what: What it stands for; by default its folder.

    Raises:
        TemporaryError: If another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        if not path.exists():  # filelock takes a folder without files, such as /proc, for busy
            raise UserError(f"{what or path.parent} cannot be written") from error
        raise TemporaryError(
            f"{what or path.parent} is in use by another process: wait until it ends, or write "
            "elsewhere"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # some systems remove no open file
            path.unlink()
        lock.release()


def check_new(target: Path) -> None:
    """Raise UserError unless a path is free, or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not empty: name another folder, or remove it")


def keep_other_results(path: Path, field: str, value: Any) -> None:
    """Before a result file is written: move one of another measurement to a free name beside it.

    Args:
        path: The file that will be written.
        field: Field of its content that says what was measured.
        value: The field's new value; a file with the same one may be replaced.
    """
    if not path.is_file():
        return
    try:
        if json.loads(path.read_text(encoding="utf-8"))[field] == json.loads(json.dumps(value)):
            return
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # of an earlier version, or changed since `check_results`
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    log.warning("%s held another measurement, which is now %s", path, kept)


def check_writable(path: Path) -> None:
    """Check before long work that a file can be written, and create its folder.

    Raises:
        UserError: If the path is a folder, or the file's folder cannot be created or written to.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; choose a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path.parent} is not writable; choose another file")


def check_output(path: Path, what: str, is_one: Callable[[str], bool]) -> None:
    """Check before long work that a file can be written, and replaces only one of its own kind.

    Args:
        path: The file.
        what: What it will be, for the message.
        is_one: Whether a file with this text is one; ValueError counts as no.

    Raises:
        UserError: As `check_writable`, or if there is something else.
    """
    check_writable(path)
    if not path.exists():
        return
    with suppress(ValueError, RecursionError):
        if path.is_file() and is_one(path.read_text(encoding="utf-8")):
            return
    raise UserError(f"{path} is there and no {what}: choose another --output, or remove it")


def check_results(path: Path) -> None:
    """`check_output` of a result file."""

    def is_one(text: str) -> bool:
        content = json.loads(text)
        return isinstance(content, dict) and isinstance(content.get("results"), list)

    check_output(path, "result file", is_one)
