"""Run benchmark cases: settings in, plain JSON values out."""

from collections.abc import Callable
from typing import Any

import torch

from coca_attention.benchmarks import cases as _built_in  # noqa: F401 (registers the cases)
from coca_attention.benchmarks.case import CASES, Case
from coca_attention.benchmarks.operators import CHECKED_QUERIES
from coca_attention.benchmarks.settings import BenchSettings
from coca_attention.benchmarks.timing import interleaved
from coca_attention.errors import UserError

# Largest error, relative to the largest value of the exact result, of a variant that is timed.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


def check_settings(settings: BenchSettings) -> None:
    """Raise UserError unless all cases are known and all numbers in range."""
    unknown = [name for name in settings.cases if name not in CASES]
    if unknown or not settings.cases:
        raise UserError(f"unknown cases {unknown}; choose from {', '.join(CASES)}")
    if not settings.lengths or min(settings.lengths) < CHECKED_QUERIES:
        raise UserError(f"lengths must be at least {CHECKED_QUERIES}, got {settings.lengths}")
    for name in ("batch", "heads", "head_width", "hidden_size", "layers", "rounds"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if settings.threads is not None and settings.threads < 1:
        raise UserError(f"threads must be at least 1, got {settings.threads}")
    if settings.head_width % 2 or settings.hidden_size % settings.head_width:
        raise UserError(
            f"head_width must be even and divide hidden_size, got {settings.head_width} and "
            f"{settings.hidden_size}"
        )
    if set(settings.roles or "l") - {"l", "g"} or (settings.window or 0) < bool(settings.roles):
        raise UserError(
            "roles must consist of the letters l and g, and requires a window of at least 1; got "
            f"roles {settings.roles!r} and window {settings.window}"
        )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; use --device cpu")


def run_benchmarks(
    settings: BenchSettings, *, progress: Callable[[str, int, int], Any] | None = None
) -> list[dict[str, Any]]:
    """Measure every case at every length.

    Args:
        settings: What is measured.
        progress: Called with a label, the number of finished measurements, and their total.

    Returns:
        One cell per case and length, with the title, text and measure of its case. For each
        variant, ``ratio`` cells hold times in ms, ratios to the first variant, the error and, where
        a cache is read, its size in MB; ``memory`` cells hold the peak memory in MB.

    Raises:
        UserError: If a setting is out of range, or a variant differs from the exact result.
    """
    check_settings(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    jobs = [(CASES[name], length) for name in settings.cases for length in settings.lengths]
    cells = []
    for number, (case, length) in enumerate(jobs):
        if progress is not None:
            progress(f"{case.name} {length}", number, len(jobs))
        cells.append(
            {
                "task": "bench",
                "case": case.name,
                "title": case.title,
                "text": case.text,
                "measure": case.measure,
                "length": length,
                "dtype": settings.dtype,
                "device": settings.device,
                "batch": settings.batch,
                "sizes": {name: getattr(settings, name) for name in case.sizes},
                "variants": _measure(case, length, settings),
            }
        )
    if progress is not None:
        progress("done", len(jobs), len(jobs))
    return cells


def _measure(case: Case, length: int, settings: BenchSettings) -> dict[str, Any]:
    variants = case.make(length, settings)
    try:
        for variant in variants:
            if variant.error is not None and not variant.error <= TOLERANCES[settings.dtype]:
                raise UserError(
                    f"{case.name} at {length} tokens: {variant.name} is off by "
                    f"{variant.error:.2g}, relative to the largest exact value (allowed: "
                    f"{TOLERANCES[settings.dtype]:g}); wrong results are not timed"
                )
        if case.measure == "memory":
            return {variant.name: {"peak_megabytes": variant.run()} for variant in variants}
        device = torch.device(settings.device)
        times = interleaved(variants, device, rounds=settings.rounds, seconds=settings.seconds)
        return {v.name: times[v.name] | {"error": v.error, **v.facts} for v in variants}
    finally:
        for variant in variants:
            variant.close()
