"""Time and memory of CoCA beside plain rotary attention: correct first, then timed, interleaved."""

from coca_attention.benchmarks.task import (
    CASES,
    BenchSettings,
    check_settings,
    run_benchmarks,
)

__all__ = ["CASES", "BenchSettings", "check_settings", "run_benchmarks"]
