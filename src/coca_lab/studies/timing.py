"""Interleaved timing of variants, and their peak memory."""

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

from coca_attention.errors import UserError
from coca_lab.environment import reset_peak, resident_megabytes


@dataclass
class Variant:
    """One of the ways to compute something that a case compares.

    Attributes:
        name: Its name in the results.
        run: Runs it once. If it returns a float, that is taken as its time in seconds.
        error: Largest error, relative to the largest exact value; None if there is no exact result.
        facts: Further numbers for the results. The report shows ``cache_megabytes`` relative to the
            baseline's.
        close: Called after the last run.
    """

    name: str
    run: Callable[[], Any]
    error: float | None = None
    facts: dict[str, float] = field(default_factory=dict)
    close: Callable[[], Any] = lambda: None


def interleaved(
    variants: Sequence[Variant], device: torch.device, *, rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Time every variant once per round, so that changes in machine load affect all of them.

    Args:
        variants: The first one is the baseline of the ratios.
        device: Synchronized before and after each run.
        rounds: Maximum number of rounds after a warm-up round; at least 3 always run.
        seconds: No round starts after this time.

    Returns:
        For each name: ``rounds``, ``median_ms``, ``quartiles_ms``, and the median ``ratio`` and its
        ``ratio_quartiles``, where ratios are to the baseline's time in the same round.
    """
    durations: dict[str, list[float]] = {variant.name: [] for variant in variants}
    started = time.perf_counter()
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(max(rounds, 3) + 1):
            if turn > 3 and time.perf_counter() - started > seconds:
                break
            shift = turn % len(variants)
            for variant in (*variants[shift:], *variants[:shift]):
                _synchronize(device)
                before = time.perf_counter()
                duration = variant.run()
                _synchronize(device)
                if not isinstance(duration, float):
                    duration = time.perf_counter() - before
                if turn:
                    durations[variant.name].append(duration)
            gc.collect()
    finally:
        if gc_enabled:
            gc.enable()
    base = durations[variants[0].name]
    return {
        name: {
            "rounds": len(times),
            "median_ms": 1e3 * median(times),
            "quartiles_ms": [1e3 * x for x in _quartiles(times)],
            "ratio": median(ratios),
            "ratio_quartiles": _quartiles(ratios),
        }
        for name, times in durations.items()
        for ratios in [[x / y for x, y in zip(times, base, strict=True)]]
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    first, _, last = quantiles(values, n=4, method="inclusive")
    return [first, last]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class IsolatedVariant(Variant):
    """A variant in a process of its own, which measures its runs itself.

    When every run frees and allocates large blocks (a growing cache), variants of different sizes
    fragment a heap that they share, and page faults dominate the time.

    Args:
        make: Module-level function from the arguments to a `Variant`, called in the new process.
        *arguments: Picklable.

    Raises:
        UserError: If the process ends unexpectedly, as it may in a run too.
    """

    def __init__(self, make: Callable[..., Variant], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(
            target=_run_on_request,
            args=(child_pipe, make, arguments, torch.get_num_threads()),
            daemon=True,
        )
        self.process.start()
        child_pipe.close()
        name, error, facts = self._receive()
        super().__init__(name, self._run, error, facts, self._end)

    def _run(self) -> float:
        self.pipe.send(None)
        return self._receive()

    def _receive(self) -> Any:
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise UserError(
                "a benchmark process ended unexpectedly (exit code "
                f"{self.process.exitcode}): it ran out of memory, or the benchmark was started "
                "from a script without if __name__ == '__main__'"
            ) from None
        if isinstance(message, Exception):
            raise message
        return message

    def _end(self) -> None:
        self.pipe.close()
        self.process.join()


def _run_on_request(
    pipe: Any, make: Callable[..., Variant], arguments: tuple[Any, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    try:
        variant = make(*arguments)
        pipe.send((variant.name, variant.error, variant.facts))
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
    """Peak memory of one run above its inputs, in MB (10^6 bytes).

    On a CPU this is the growth of the largest resident size of a new process (on Linux, the largest
    size is reset before the run); on CUDA, the growth of what the allocator has handed out.

    Args:
        make: Module-level function from the arguments to a function that is run once. On a CPU both
            are called in the new process.
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
    # Otherwise the peak includes everything before the run, such as imports.
    before = resident_megabytes("VmRSS" if reset_peak() else "VmHWM")
    run()
    return resident_megabytes("VmHWM") - before
