"""Benchmark cases: what a case consists of, and the table of all cases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from coca_lab.studies.bench.settings import TITLES, BenchSettings
from coca_lab.studies.bench.timing import Variant


@dataclass(frozen=True)
class Case:
    """Something that can be computed in several ways, which are measured side by side.

    Attributes:
        name: Its name for ``--cases`` and in result files.
        title: Title of its section in the report.
        make: Returns the variants for a length in tokens; the first one is the baseline.
        text: Text below the title.
        sizes: Fields of `BenchSettings` to report with the results.
        measure: ``ratio`` times the variants and reports ratios to the baseline. For ``memory``,
            each variant's ``run`` returns megabytes (see `peak_megabytes`) and is called once.
        gpu_runs: Settings of its runs in ``make gpu-check``, which sets the device, the precision
            and the time limit itself.
    """

    name: str
    title: str
    make: Callable[[int, BenchSettings], Sequence[Variant]]
    text: str = ""
    sizes: tuple[str, ...] = ("heads", "kv_heads", "head_width")
    measure: Literal["ratio", "memory"] = "ratio"
    gpu_runs: tuple[BenchSettings, ...] = (BenchSettings(),)


CASES: dict[str, Case] = {}
"""Registered cases by name: ``coca bench --cases NAME``."""


def register_case(case: Case) -> None:
    """Make a case available to `run_benchmarks`, ``coca bench --cases`` and ``make gpu-check``.

    Raises:
        ValueError: If the name is taken, or a size is not a field of `BenchSettings`.
    """
    known = [field.name for field in fields(BenchSettings)]
    unknown = [name for name in case.sizes if name not in known]
    if unknown:
        raise ValueError(f"case {case.name!r}: sizes {unknown} must be among {', '.join(known)}")
    if case.name in CASES:
        raise ValueError(f"there already is a benchmark case {case.name!r}; choose another name")
    CASES[case.name] = case
    TITLES.setdefault(case.name, case.title)
