"""The environment of a measurement: versions, hardware and command; and which devices it has."""

import os
import platform
import shlex
import sys
import textwrap
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from coca_attention.errors import UserError

REPORTED = ("coca-attention", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def describe_environment() -> dict[str, Any]:
    """Versions, processor, threads, GPUs and command line, as JSON values."""
    versions = {}
    for name in REPORTED:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": command_line(),
    }


def usable_device(name: str) -> torch.device:
    """The device of a name; UserError if there is none, or nothing can be put on it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if accelerator is None else f"cpu and {accelerator.type}"
    try:
        device = torch.device(name)
    except RuntimeError as error:  # which lists twenty of them
        raise UserError(
            f"`device` {name!r} is no device of torch: here there is {there}"
        ) from error
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        why = textwrap.shorten(str(error), 300, placeholder=" …")
        raise UserError(
            f"`device` {name!r} cannot be used here ({why}): here there is {there}"
        ) from error


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_line() -> str:
    """The command line of this process, with the program's name instead of its path."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        program = [Path(sys.argv[0]).name]
    else:
        program = ["python", "-m", module.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
