"""Run benchmark cases: settings in, plain JSON values out."""

from collections.abc import Callable
from typing import Any

import torch

from coca_attention.errors import UserError
from coca_lab.studies.bench import cases as _built_in  # noqa: F401 (registers the cases)
from coca_lab.studies.bench.case import CASES, Case
from coca_lab.studies.bench.settings import BenchSettings, check_settings
from coca_lab.studies.bench.timing import interleaved

# Largest error, relative to the largest value of the exact result, of a variant that is timed.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


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
