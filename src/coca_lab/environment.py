"""The environment of a measurement: versions, hardware and command."""

import os
import platform
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("coca-attention", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def describe_environment() -> dict[str, Any]:
    """Versions, processor, threads, GPUs and command line, as JSON values."""
    installed: dict[str, str] = {}
    for each in distributions():  # the first of a name is the one that is imported
        installed.setdefault(each.name, each.version)
    versions = {name: installed[name] for name in PACKAGES if name in installed}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": command_line(),
    }


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
