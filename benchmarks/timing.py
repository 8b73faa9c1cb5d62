"""Interleaved timing of variants, and their peak memory."""

import gc
import multiprocessing
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.memory import peak_growth

QUARTILES = (0.25, 0.5, 0.75)


class Variant(NamedTuple):
    """One of the ways to compute something that a case compares."""

    name: str
    run: Callable[[], Any]
    """Runs it once. If it returns a float, that is taken as its time in seconds."""
    error: float | None = None
    """Largest error, relative to the largest exact value; None if there is no exact result."""
    facts: dict[str, float] = {}
    """Further numbers for the results, such as the megabytes of its cache."""


def interleaved(variants: Sequence[Variant], settings: Namespace) -> dict[str, dict[str, Any]]:
    """Time every variant once per round, so that changes in machine load affect all of them.

    Ratios are to the first variant in the same round. Three rounds run even if the time is over.
    """
    synchronize = torch.cuda.synchronize if settings.device == "cuda" else lambda: None
    durations: dict[str, list[float]] = {variant.name: [] for variant in variants}
    started = time.perf_counter()
    gc.disable()
    gc.freeze()  # what exists already need not be searched after every round
    try:
        for turn in range(max(settings.rounds, 3) + 1):  # the first warms up
            if turn > 3 and time.perf_counter() - started > settings.seconds:
                break
            shift = turn % len(variants)
            for variant in (*variants[shift:], *variants[:shift]):
                synchronize()
                before = time.perf_counter()
                measured = variant.run()
                synchronize()
                passed = time.perf_counter() - before
                durations[variant.name].append(measured if isinstance(measured, float) else passed)
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    times = {name: np.array(each[1:]) for name, each in durations.items()}
    base, results = times[variants[0].name], {}
    for name, series in times.items():
        low, middle, high = np.quantile(1e3 * series, QUARTILES).tolist()
        low_ratio, ratio, high_ratio = np.quantile(series / base, QUARTILES).tolist()
        results[name] = {
            "rounds": len(series),
            "median_ms": middle,
            "quartiles_ms": [low, high],
            "ratio": ratio,
            "ratio_quartiles": [low_ratio, high_ratio],
        }
    return results


def isolated(make: Callable[..., Variant], *arguments: Any) -> Variant:
    """A variant made in a process of its own, which measures its runs itself, and ends with it."""
    # When every run frees and allocates large blocks (a growing cache), variants of different sizes
    # fragment a heap that they share, and page faults dominate the time.
    pool = _process()
    name, error, facts = pool.submit(_make, make, *arguments).result()
    return Variant(name, lambda: pool.submit(_run).result(), error, facts)


def peak_megabytes(device: str, make: Callable[..., Callable[[], Any]], *arguments: Any) -> float:
    """Peak memory of one run above its inputs, in MB; on a CPU that of a new process, on Linux."""
    if device == "cpu":
        return _process().submit(_resident_growth, make, *arguments).result()
    return peak_growth(make(*arguments), device)


def _process() -> ProcessPoolExecutor:
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    return ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,))


def _make(make: Callable[..., Variant], *arguments: Any) -> tuple[str, float | None, dict]:
    global _variant
    _variant = make(*arguments)
    return _variant.name, _variant.error, _variant.facts


def _run() -> float:
    before = time.perf_counter()
    _variant.run()
    return time.perf_counter() - before


def _resident_growth(make: Callable[..., Callable[[], Any]], *arguments: Any) -> float:
    return peak_growth(make(*arguments))
