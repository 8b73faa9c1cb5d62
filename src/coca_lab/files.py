"""Files that are whole or absent, folders that one process writes, and why writing failed."""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from coca_attention.errors import UserError

log = logging.getLogger(__name__)

HUB_PATIENCE = 10.0
"""Seconds in which the Hub has to answer."""
INSTEAD = {
    "recipe.yaml": "its training has not finished: run coca train again with the same recipe",
    "adapter_config.json": "it is an adapter: merge it into its model, and save that",
    "*.gguf": "write {} as one first, see docs/troubleshooting.md",
    "checkpoint-*": "it has checkpoints, such as {}: name one of them",
}
"""What to do with folders that are no model's, by a file in them."""


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: it is complete and on the disk, or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        put_in_place(partial, path)
    except OSError as error:
        error.filename = str(path)  # a full disk comes without
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically; ValueError for numbers that JSON does not support (inf, nan)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file that this package wrote; UserError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: restore it, or remove it to have it written again"
        ) from error


def put_in_place(partial: Path, path: Path) -> None:
    """Move a finished file or folder to its place, on the disk before and after."""
    mask = os.umask(0o022)
    os.umask(mask)
    for weights in [partial, *partial.rglob("*.safetensors")]:
        if weights.suffix == ".safetensors":  # written for the user alone by its library
            weights.chmod(0o666 & ~mask)
    sync([*partial.rglob("*"), partial])
    os.replace(partial, path)
    sync([path.parent])


def sync(paths: Iterable[Path]) -> None:
    """Wait until the content of files, and the names in folders, are on the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError:
            if not path.is_dir():  # some file systems cannot wait for names
                raise
        finally:
            os.close(opened)


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A path beside a new file or folder, which takes the target's place when the block ends."""
    partial = target.with_name(f".{target.name}.coca-partial")

    def remove() -> None:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)

    with _hold_target(target):
        check_new(target)  # another process may have written it since the caller looked
        remove()  # of a process that was killed
        try:
            yield partial
            put_in_place(partial, target)
        finally:
            remove()


@contextmanager
def hold(path: Path, what: Path | None = None) -> Iterator[None]:
    """Keep other processes from a lock file's folder; UserError if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        if not path.exists():  # filelock takes a folder without files, such as /proc, for busy
            try:
                path.touch()
            except OSError as refused:
                raise UserError(
                    f"{what or path.parent} cannot be written ({refused.strerror}): name another "
                    "folder"
                ) from refused
        raise UserError(
            f"{what or path.parent} is in use by another process: wait until it ends, or write "
            "elsewhere"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # some systems remove no open file
            path.unlink()
        lock.release()


def _hold_target(target: Path) -> AbstractContextManager[None]:
    return hold(target.with_name(f".{target.name}.lock"), target)


def check_new(target: Path) -> None:
    """Raise UserError unless a path is free, or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is a file or has content: name another folder, or remove it")


def check_can_be_written(target: Path) -> None:
    """Before long work: an error unless `writing` can begin, which is tried."""
    check_new(target)
    with _hold_target(target):
        pass


def keep_other_results(path: Path, measured: Collection[str]) -> None:
    """Move a result file to a free name, unless all its measurements are among those that follow.

    Measurements are the fingerprints of everything that they depend on, in the file's ``measured``.
    """
    if not path.is_file():
        return
    with suppress(ValueError, LookupError, TypeError, RecursionError):  # of an earlier version
        if {*json.loads(path.read_text(encoding="utf-8"))["measured"]} <= {*measured}:
            return
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(free)
    log.warning("%s held another measurement, which is now %s", path, free)


def plain_name(text: str) -> str:
    """A text as the name of a file or folder."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.")


class Place(NamedTuple):
    """Where a model is: a folder, or a repository of the Hub and a revision of it."""

    path: str
    revision: str = "main"


def find_model(name: str | Path) -> Place:
    """The place of a model or a tokenizer: its folder, or on the Hub ``NAME`` or ``NAME@REVISION``.

    Raises:
        UserError: If there is no such folder, or neither the cache nor the Hub has the name.
    """
    path = os.path.expanduser(name)
    if Path(path).is_dir():
        return Place(path)
    check_may_be_model(name)
    repository, _, revision = path.partition("@")
    place = Place(repository, _cached_commit(repository, revision or "main"))
    _check_hub(path, place)
    return place


def check_may_be_model(name: str | Path) -> None:
    """Raise UserError for a path of this machine that is no folder, unless the Hub may have it."""
    folder = Path(name).expanduser()
    has_parent = folder.parent != Path() and folder.parent.is_dir()
    is_path = folder.is_absolute() or str(name).startswith(("./", "../"))
    is_path |= str(name).endswith("/")
    is_path |= str(name).partition("@")[0].count("/") > 1  # a revision may have more: refs/pr/1
    if folder.is_file():
        found = (folder.parent / "config.json").is_file()
        such_as = f", such as {folder.parent}" if found else ""
        raise UserError(f"{name} is a file: name the model's folder{such_as}")
    if (is_path or has_parent) and not folder.is_dir():
        hub = (
            f"; the Hub is not asked, because there is a folder {folder.parent} here: for a model "
            "there, run the command in another folder"
        )
        raise UserError(
            f"{name}: there is no such folder; check the path (here: {Path.cwd()})"
            f"{'' if is_path else hub}"
        )


def check_model_folder(name: str | Path) -> None:
    """The same, and for folders that are no model's."""
    check_may_be_model(name)
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        hints = (
            what.format(found[0].name)
            for pattern, what in INSTEAD.items()
            if (found := sorted(folder.glob(pattern)))
        )
        otherwise = "name the folder that save_pretrained, or a command such as coca train, wrote"
        raise UserError(
            f"{name}: not a model folder, it has no config.json; {next(hints, otherwise)}"
        )


def _cached_commit(repository: str, revision: str) -> str:
    """The commit of a revision, if its file in the cache ends with a new line, or the revision."""
    # huggingface_hub would take the new line, which editors and echo write, for a part of it.
    folder = f"models--{repository.replace('/', '--')}"
    with suppress(OSError, ValueError):
        commit = Path(constants.HF_HUB_CACHE, folder, "refs", revision).read_text(encoding="utf-8")
        if commit != commit.strip():
            return commit.strip()
    return revision


def belongs_to(folder: Path, path: Path) -> bool:
    """Whether a file is in a model's folder, or in the Hub's cache, whose files are links."""
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parents[1] / "blobs")
    return any(path.resolve().is_relative_to(home) for home in homes)


@cache
def _check_hub(name: str, place: Place) -> None:
    """Raise UserError for a name that is neither in the cache nor on the Hub, without retries."""
    try:
        known = (
            try_to_load_from_cache(place.path, file, revision=place.revision)
            for file in ("config.json", "tokenizer_config.json")
        )
        if any(isinstance(path, str) for path in known):
            return
        HfApi().model_info(place.path, revision=place.revision, timeout=HUB_PATIENCE)
    except HFValidationError:
        return  # which is told by what loads the model
    except Exception as error:  # of the HTTP client, too, which is another in every version
        text = " ".join(str(error).split())[:200]
        why = f"the Hub does not answer ({text})"
        if isinstance(error, RepositoryNotFoundError):
            why = "the Hub has no such model, or it is private"
            if "/" not in place.path:
                why += "; most names there are OWNER/NAME"
        elif isinstance(error, RevisionNotFoundError):
            why = f"the Hub has no revision {place.revision} of {place.path}"
        raise UserError(
            f"{name}: there is no such folder here ({Path.cwd()}), and {why}"
        ) from error


def cache_folder() -> Path:
    """The user's folder for what later commands reuse."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "coca-attention"


def check_writable(path: Path) -> None:
    """Create the folder of a file; an error unless it, or the file, can be written."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; choose a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path.parent} is not writable; choose another file")


@contextmanager
def no_empty_folders(path: Path) -> Iterator[None]:
    """After the block, remove the folders of a file that were made in it and are empty."""
    new = [folder for folder in path.parents if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # one that has content
            for folder in new:
                folder.rmdir()


def check_output(path: Path, what: str, is_one: Callable[[str], bool]) -> None:
    """Before long work: UserError unless a file can be written, or what is there replaced."""
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


# In the messages of PyTorch's file writer, which reports a full disk as a RuntimeError, and of
# NumPy's, whose OSError has no number.
WRITER = r"inline_container|PytorchStreamWriter|iostream error|\d+ requested and \d+ written"
RESUMABLE = "free disk space, then run the same command again; what is done is kept"
"""What `known_problem` advises where a later start can go on."""
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), RESUMABLE),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "choose another folder, or change its permissions"
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR), "a file is where a folder is needed: choose another path"
    ),
}
"""What to do about errors of the system, by their numbers."""


def known_problem(error: BaseException) -> str | None:
    """One line for an exception whose cause lies outside the program, or None."""
    # Full disks, missing permissions and a lack of memory come as many types: OSError, MemoryError,
    # and from PyTorch, safetensors and tokenizers as RuntimeError or a plain Exception with a text.
    text = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory", text):
        return (
            f"there is not enough memory ({text or 'MemoryError'}): use smaller batches, shorter "
            "texts or a smaller model"
        )
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        bad = error.object[max(error.start - 20, 0) : error.end + 20]
        return f"{bad!r}: not UTF-8; rename the file or folder"
    number = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"os error (\d+)", text):  # Rust's wording
        number = int(found[1])
    if number is None:
        is_of_writer = re.search(WRITER, text)
        return f"a file cannot be written ({text}): {RESUMABLE}" if is_of_writer else None
    path = getattr(error, "filename", None)
    where = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes | os.PathLike) else ""
    advice = ADVICE.get(number, "check the path and run the command again")
    return f"{where}{os.strerror(number)}: {advice}"
