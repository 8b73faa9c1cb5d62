"""Memory that a call takes."""

import ctypes
import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


def peak_growth(run: Callable[[], object], device: str = "cpu") -> float:
    """Memory that a call takes at most beyond what was in use before, in MB; 0 if unknown.

    On a GPU that of tensors; on a CPU that of the process, which Linux alone tells.
    """
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    reset = Path("/proc/self/clear_refs")
    known = device == "cpu" and sys.platform == "linux"
    if known:
        gc.collect()
        with suppress(AttributeError):  # glibc keeps freed memory, which the call would reuse
            ctypes.CDLL(None).malloc_trim(0)
        reset.write_text("5")  # the largest so far is the present one
    before = _resident("VmRSS") if known else 0.0
    run()
    return _resident("VmHWM") - before if known else 0.0


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))
