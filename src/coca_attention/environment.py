"""The environment of a measurement (versions, hardware, command), and atomic file writes."""

import json
import os
import platform
import resource
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError

PACKAGES = ("coca-attention", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def describe_environment() -> dict[str, Any]:
    """Versions, processor, threads, GPUs and command line, as JSON values."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "command": command_line(),
    }


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_line() -> str:
    """The command line of this process, with the program's name instead of its path."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def resident_megabytes(field: str = "VmRSS") -> float:
    """Resident size of this process in MB: now (``VmRSS``) or the largest so far (``VmHWM``).

    Where /proc is missing, the largest so far.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) / 1e6


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: it is complete or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; ValueError for numbers that JSON does not support (inf, nan)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
