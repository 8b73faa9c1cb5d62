"""The operator without gradients."""

from functools import partial

from coca_lab.studies.bench.case import Case
from coca_lab.studies.bench.operators import forward_run, gpu_run, operator_variants
from coca_lab.studies.bench.settings import TITLES

CASE = Case(
    "operator",
    TITLES["operator"],
    partial(operator_variants, make_run=forward_run),
    "As in the paper's Figure 6.",
    gpu_runs=(
        gpu_run(lengths=[4096, 8192, 16384, 32768]),
        gpu_run(lengths=[4096, 32768], kv_heads=8),
    ),
)
