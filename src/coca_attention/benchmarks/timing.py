"""Interleaved timing of variants in one process, and peak memory of each in one of its own."""

import gc
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from coca_attention.errors import UserError


@dataclass(frozen=True)
class Variant:
    """One way to do a thing.

    Attributes:
        name: What the results call it.
        run: Does it once. It may return the seconds that it took, where it knows better.
        error: How far it is from the exact result, as a share of the largest number there; None
            where the case has nothing to compare with.
        facts: Further numbers for the results.
        close: Called when all is measured.
    """

    name: str
    run: Callable[[], Any]
    error: float | None = None
    facts: dict[str, float] = field(default_factory=dict)
    close: Callable[[], Any] = lambda: None


def interleaved(
    variants: Sequence[Variant], device: torch.device, *, rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Time every variant once a round, in turn, so that all see the same of the machine's moods.

    Args:
        variants: The first one is the baseline of the ratios.
        device: Waited for before and after each run.
        rounds: Rounds at most, after one that warms up; at least 3 are made.
        seconds: No round is begun after so long.

    Returns:
        For each name: ``median_ms``, ``quartiles_ms``, and ``ratio`` and ``ratio_quartiles`` to the
        baseline, of the quotients within a round.
    """
    taken: dict[str, list[float]] = {variant.name: [] for variant in variants}
    started = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            if turn > 3 and time.perf_counter() - started > seconds:
                break
            shift = turn % len(variants)
            for variant in (*variants[shift:], *variants[:shift]):
                _wait(device)
                before = time.perf_counter()
                seconds_taken = variant.run()
                _wait(device)
                if not isinstance(seconds_taken, float):
                    seconds_taken = time.perf_counter() - before
                if turn:
                    taken[variant.name].append(seconds_taken)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    base = taken[variants[0].name]
    return {
        name: {
            "rounds": len(times),
            "median_ms": 1e3 * median(times),
            "quartiles_ms": [1e3 * x for x in _quartiles(times)],
            "ratio": median(ratios),
            "ratio_quartiles": _quartiles(ratios),
        }
        for name, times in taken.items()
        for ratios in [[x / y for x, y in zip(times, base, strict=True)]]
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    first, _, last = quantiles(values, n=4, method="inclusive")
    return [first, last]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Apart:
    """A variant in a process of its own, which measures itself when it is called.

    Where large blocks are freed and taken anew at every run (a growing cache), variants of other
    sizes in the same heap leave holes that fit nobody, and page faults are timed in place of work.

    Args:
        make: A module's function: from the arguments to a `Variant`.
        *arguments: Picklable.
    """

    def __init__(self, make: Callable[..., Variant], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, make, arguments, torch.get_num_threads()), daemon=True
        )
        self.process.start()
        theirs.close()
        self.error, self.facts = self._received()

    def __call__(self) -> float:
        self.pipe.send(None)
        return self._received()

    def _received(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise UserError(
                "a process that measures on its own ended without a word (exit code "
                f"{self.process.exitcode}): short of memory, or started from a script without "
                "if __name__ == '__main__'"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join()


def _serve(
    pipe: Any, make: Callable[..., Variant], arguments: tuple[Any, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    try:
        variant = make(*arguments)
        pipe.send((variant.error, variant.facts))
    except Exception as error:
        pipe.send(error)
        return
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        before = time.perf_counter()
        variant.run()
        pipe.send(time.perf_counter() - before)


def peak_megabytes(make: Callable[..., Callable[[], Any]], *arguments: Any, device: str) -> float:
    """Memory that one run needs above what it was given, in MB (10^6 bytes).

    On a CPU a process of its own is asked for its largest resident size (reset before the run where
    Linux lets it); on CUDA the allocator.

    Args:
        make: A module's function: from the arguments to what is run. It is called in the process
            that runs it.
        *arguments: Picklable.
        device: ``cpu`` or ``cuda``.
    """
    if device == "cuda":
        run = make(*arguments)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_resident_growth, (make, arguments, torch.get_num_threads()))


def _resident_growth(
    make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], threads: int
) -> float:
    torch.set_num_threads(threads)
    run = make(*arguments)
    before = _resident("VmRSS")
    try:
        # Otherwise the peak is that of the process's past: at the start its parent's size.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        before = _resident("VmHWM")
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    """Resident size of this process in MB: now (``VmRSS``) or the largest so far (``VmHWM``)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) / 1e6
