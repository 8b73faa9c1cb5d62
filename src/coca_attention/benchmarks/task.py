"""The benchmark task: cases and lengths in, plain JSON values out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from coca_attention.benchmarks import models, operators
from coca_attention.benchmarks.timing import Variant, interleaved, peak_megabytes
from coca_attention.errors import UserError


@dataclass
class BenchSettings:
    """What is timed, and how."""

    cases: list[str] = field(default_factory=lambda: ["operator", "operator-training"])
    """operator, operator-training, operator-decode, training, prefill, decode, decode-compiled,
    memory."""
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    """Tokens of the text; for decode, of the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs."""
    batch: int = 1
    """Texts at once."""
    heads: int = 16
    """Query heads of the operator."""
    groups: int | None = None
    """Key/value heads; by default as many as query heads."""
    head_width: int = 64
    """Numbers of a head."""
    hidden_size: int = 512
    """Width of the models; 12 layers of 512 are 50 million parameters."""
    layers: int = 12
    """Layers of the models."""
    longest_contraction: int = 4096
    """The paper's contraction, whose memory grows with the square, is left out beyond."""
    rounds: int = 15
    """Rounds at most; every round times each variant once."""
    seconds: float = 60.0
    """No round of a case and length is begun after so long (three are always made)."""
    threads: int | None = None
    """CPU threads; by default PyTorch's choice."""


# From a length and settings to variants, each compared with the exact result before it is timed.
CASES: dict[str, Callable[[int, BenchSettings], list[Variant]]] = {
    "operator": operators.forward,
    "operator-training": operators.training,
    "operator-decode": operators.decode,
    "training": models.training,
    "prefill": models.prefill,
    "decode": models.decode,
    "decode-compiled": models.decode_compiled,
}
# Errors as shares of the largest number, beyond which a variant is wrong and not timed.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


def check_settings(settings: BenchSettings) -> None:
    """Raise UserError unless cases are known and numbers in range."""
    known = [*CASES, "memory"]
    unknown = [case for case in settings.cases if case not in known]
    if unknown or not settings.cases:
        raise UserError(f"unknown cases {unknown}; choose from {', '.join(known)}")
    if not settings.lengths or min(settings.lengths) < operators.JUDGED:
        raise UserError(f"lengths must be at least {operators.JUDGED}, got {settings.lengths}")
    for name in ("batch", "heads", "head_width", "hidden_size", "layers", "rounds"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if settings.head_width % 2 or settings.hidden_size % settings.head_width:
        raise UserError(
            f"head_width must be even and divide hidden_size, got {settings.head_width} and "
            f"{settings.hidden_size}"
        )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; use --device cpu")


def run_benchmarks(
    settings: BenchSettings, *, progress: Callable[[str, int, int], Any] | None = None
) -> list[dict[str, Any]]:
    """Check, then time, every case at every length.

    Args:
        settings: What is timed.
        progress: Called with a label, the parts done and the parts to do.

    Returns:
        One cell per case and length: for each variant its times in ms, its ratio to the first one,
        its error, and for decode the size of its cache. For ``memory`` the operator's peak memory.

    Raises:
        UserError: If a setting is out of range, or a variant does not agree with the exact result.
    """
    check_settings(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    jobs = [(case, length) for case in settings.cases for length in settings.lengths]
    cells = []
    for number, (case, length) in enumerate(jobs):
        if progress is not None:
            progress(f"{case} {length}", number, len(jobs))
        measured = _memory(length, settings) if case == "memory" else _times(case, length, settings)
        cells.append(
            {
                "task": "bench",
                "case": case,
                "length": length,
                "dtype": settings.dtype,
                "device": settings.device,
                "batch": settings.batch,
                "sizes": _sizes(case, settings),
                "variants": measured,
            }
        )
    if progress is not None:
        progress("done", len(jobs), len(jobs))
    return cells


def _times(case: str, length: int, settings: BenchSettings) -> dict[str, Any]:
    variants = CASES[case](length, settings)
    for variant in variants:
        if variant.error is not None and not variant.error <= TOLERANCES[settings.dtype]:
            raise UserError(
                f"{case} at {length} tokens: {variant.name} is off by {variant.error:.2g} of the "
                f"largest number (allowed {TOLERANCES[settings.dtype]:g}); a wrong result is not "
                "timed"
            )
    times = interleaved(
        variants, torch.device(settings.device), rounds=settings.rounds, seconds=settings.seconds
    )
    for variant in variants:
        variant.close()
        times[variant.name] |= {"error": variant.error, **variant.facts}
    return times


def _memory(length: int, settings: BenchSettings) -> dict[str, Any]:
    return {
        name: {
            "peak_megabytes": peak_megabytes(
                operators.one_forward, name, length, settings, device=settings.device
            )
        }
        for name in operators.functions(length, settings)
    }


def _sizes(case: str, settings: BenchSettings) -> dict[str, Any]:
    names = ["groups", "head_width"]
    of_model = case in ("training", "prefill", "decode", "decode-compiled")
    names += ["hidden_size", "layers"] if of_model else ["heads"]
    return {name: getattr(settings, name) for name in names}
