"""Time and memory of CoCA beside plain rotary attention: results are checked, then timed."""

from typing import TYPE_CHECKING

from coca_lab.lazy import attach

if TYPE_CHECKING:
    from coca_lab.studies.bench.case import CASES, Case, register_case
    from coca_lab.studies.bench.runner import check_settings, run_benchmarks
    from coca_lab.studies.bench.settings import BenchSettings
    from coca_lab.studies.bench.timing import IsolatedVariant, Variant, peak_megabytes

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
