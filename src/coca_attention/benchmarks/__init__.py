"""Time and memory of CoCA beside plain rotary attention: results are checked, then timed."""

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
