"""Time and memory of CoCA beside plain rotary attention: results are checked, then timed."""

from typing import TYPE_CHECKING

from coca_attention.lazy import attach

if TYPE_CHECKING:
    from coca_attention.benchmarks.case import CASES, Case, register_case
    from coca_attention.benchmarks.runner import check_settings, run_benchmarks
    from coca_attention.benchmarks.settings import BenchSettings
    from coca_attention.benchmarks.timing import IsolatedVariant, Variant, peak_megabytes

__all__ = [
    "CASES",
    "BenchSettings",
    "Case",
    "IsolatedVariant",
    "Variant",
    "check_settings",
    "peak_megabytes",
    "register_case",
    "run_benchmarks",
]

__getattr__, __dir__ = attach(
    __name__,
    case="Case",
    cases="register_case",
    runner="CASES run_benchmarks",
    settings="BenchSettings check_settings",
    timing="IsolatedVariant Variant peak_megabytes",
)
