"""Fingerprints: what a value depends on, by content, so that nothing stale is taken for it.

The key of a value that is kept has the fingerprints of the text, the weights, the tokenizer and the
code that it depends on, and the settings; docs/architecture.md has a table of all caches.
"""

import hashlib
import importlib.util
import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from coca_attention.errors import UserError
from coca_lab.engine import EXTENSIONS
from coca_lab.files import cache_folder, find_model, write_text
from coca_lab.weights import SAFE_WEIGHTS_INDEX_NAME, indexed_files

RECORDS = (
    "conversion.json", "inputs.json", "results.json", "stage.json", "start.json", "text.json",
    "training.json",
)  # fmt: skip
"""Files of a model folder that say how it was made or measured, which no loader reads."""
SETTLED = 2 * 10**9
"""Nanoseconds after which a file that is written again has another time of change, on any disk."""
MEASURING = (
    "data", "evaluation", "fingerprints.py", "generation.py", "intervals.py", "loading.py",
    "settings", "source_files.py", "weights.py",
)  # fmt: skip
"""What measured values depend on in this package, beside all of the library."""
PACKAGES = ("torch", "transformers", "tokenizers")


def fingerprint(value: Any) -> str:
    """SHA-256 of a JSON value: equal for equal values, whatever the order of their fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def files_fingerprint(paths: Sequence[Path]) -> str:
    """SHA-256 of names and contents of files, in their order.

    It is remembered in the user's cache under device, inode, size and both times of every file, so
    files of hundreds of GB are read once. This is enough: the kernel sets the time of change
    (``ctime``) whenever a file is written or replaced, and no program can set it back, as it can
    the time of modification. Files changed less than 2 seconds ago are read every time, because a
    second change could have the same time. What this trusts is the clock of the machine.
    """
    now = time.time_ns()
    states = _states(paths)
    kept = cache_folder() / "digests" / fingerprint(states)
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")

    def digest(path: Path) -> list[str]:
        with open(path, "rb") as file:
            return [path.name, hashlib.file_digest(file, "sha256").hexdigest()]

    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter
        value = fingerprint([*pool.map(digest, paths)])
    if all(changed + SETTLED < now for *_, changed in states) and _states(paths) == states:
        with suppress(OSError):  # without a cache, files are read every time
            write_text(kept, value)
    return value


def _states(paths: Sequence[Path]) -> list[list[Any]]:
    every = [(path.name, path.stat()) for path in paths]
    return [
        [name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in every
    ]


def model_fingerprint(path: str | Path) -> str:
    """Of what is loaded from a model's or tokenizer's folder, or the commit of a name on the Hub.

    Raises:
        UserError: If there is nothing of that name.
    """
    place = find_model(path)
    folder = Path(place.path)
    if not folder.is_dir():
        try:
            found = cached_file(place.path, "config.json", revision=place.revision)
        except OSError as error:
            raise UserError(f"{path}: no model could be loaded: {error}") from error
        return f"{place.path} {Path(str(found)).parent.name}"
    files = {
        file
        for file in folder.iterdir()
        if file.is_file()
        and file.name not in RECORDS
        and file.suffix not in (".md", ".yaml")
        and not file.name.startswith(".")
    }
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index in files:
        named = {folder / name for name in indexed_files(index)}  # it may be in folders below
        files |= {file for file in named if file.is_file()}
    return files_fingerprint(sorted(files))


def code_fingerprint(function: Callable[..., Any]) -> str:
    """Of the code that measures: what a task's figures depend on beside data and settings.

    It is the source of the library and of the parts of this package in `MEASURING`, of the file in
    which a function is defined, and of the user's own modules in ``COCA_IMPORT``, with the versions
    of `PACKAGES`. A comment counts, too; hardware and other packages do not.
    """
    function = getattr(function, "func", function)  # of functools.partial
    function = inspect.unwrap(getattr(function, "__func__", function))  # of a method
    theirs = function if inspect.isfunction(function) else type(function)
    return fingerprint([_package_code(os.environ.get(EXTENSIONS, "")), _defining(theirs)])


@cache
def _defining(theirs: Any) -> str:
    """Of the file that defines a function or class, or of what there is of one without a file."""
    with suppress(OSError, TypeError):
        path = Path(inspect.getfile(theirs))
        return files_fingerprint([path]) if path.is_file() else inspect.getsource(theirs)
    return repr(getattr(theirs, "__code__", theirs))


@cache
def _package_code(extensions: str) -> str:
    """Of what a process has imported, which later changes of the files do not concern."""
    ours = Path(__file__).parent
    roots = [ours.parent / "coca_attention", *(ours / name for name in MEASURING)]
    for name in filter(None, extensions.split(",")):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            file = Path(found.origin)
            roots.append(file.parent if file.name == "__init__.py" else file)
    sources = []
    for root in roots:
        every = [root] if root.is_file() else sorted(root.rglob("*"))
        read = [path for path in every if path.is_file() and path.suffix != ".pyc"]
        sources.append([root.name, files_fingerprint(read)])
    return fingerprint([sources, {name: version(name) for name in PACKAGES}])
