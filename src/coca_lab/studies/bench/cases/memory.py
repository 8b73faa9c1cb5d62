"""Peak memory of the operator without gradients."""

from collections.abc import Callable
from functools import partial

from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.operators import forward_run, gpu_run, operators, random_inputs
from coca_lab.studies.bench.settings import TITLES, BenchSettings
from coca_lab.studies.bench.timing import Variant, peak_megabytes


def single_forward(name: str, length: int, settings: BenchSettings) -> Callable[[], None]:
    """One operator for the process that measures its memory, after a short run to warm up."""
    operators(64, settings)[name].function(**random_inputs(64, settings))
    return forward_run(operators(length, settings)[name].function, random_inputs(length, settings))


def make(length: int, settings: BenchSettings) -> list[Variant]:
    """A variant per operator."""
    return [
        Variant(
            name,
            partial(peak_megabytes, single_forward, name, length, settings, device=settings.device),
        )
        for name in operators(length, settings)
    ]


CASE = Case(
    "memory",
    TITLES["memory"],
    make,
    "Linear or quadratic in the length, as in the paper's Table 6.",
    measure="memory",
    gpu_runs=(gpu_run(lengths=[2048, 4096, 8192, 32768, 131072], heads=8),),
)
