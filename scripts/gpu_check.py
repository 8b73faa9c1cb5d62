"""Run the GPU tests and benchmarks: ``make gpu-check`` (under 8 minutes, no network).

The Python that runs it needs PyTorch 2.11 or later for CUDA, Triton, Transformers, pytest,
Altair and vl-convert; nothing is installed. Runs the GPU tests, then every benchmark case with its
``gpu_runs``, and writes results/gpu-NAME.json and results/gpu-NAME.html, where NAME is the GPU's.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
TESTS = ["tests/ops/test_gpu.py", "tests/ops/test_kernels.py"]


def main() -> int:
    """Run tests and benchmarks; return 0 if both succeed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=str(ROOT / "results"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=7.0, help="time for tests and benchmarks")
    options = parser.parse_args()
    started = time.monotonic()

    import torch

    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device and a PyTorch built for CUDA; found none")
        return 2
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu or not slow", *TESTS],
                           cwd=ROOT, env=_environment())  # fmt: skip

    from coca_attention.errors import UserError
    from coca_lab.environment import describe_environment, write_json
    from coca_lab.studies.bench import CASES, run_benchmarks

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    results = Path(options.output) / f"gpu-{name}.json"
    runs = [
        replace(run, cases=[case.name], device="cuda", dtype="bfloat16", rounds=30)
        for case in CASES.values()
        for run in case.gpu_runs
    ]
    cells, failures = [], []
    for number, run in enumerate(runs):
        left = options.minutes * 60 - (time.monotonic() - started)
        if left < 10:
            failures.append(f"no time left for {run.cases[0]}")
            continue
        seconds = left / sum(len(other.lengths) for other in runs[number:])
        try:
            cells += run_benchmarks(replace(run, seconds=seconds), progress=_say)
        except (UserError, torch.OutOfMemoryError, RuntimeError) as error:
            failures.append(f"{run.cases[0]}: {' '.join(str(error).split())[:300]}")
            print(f"  {failures[-1]}")
        torch.cuda.empty_cache()
        content = {"results": cells, "failures": failures, "environment": describe_environment()}
        write_json(results, content)
    if cells:
        from coca_lab.report import write_report

        write_report([results], results.with_suffix(".html"), title=torch.cuda.get_device_name())
    print(f"{results}: {len(cells)} cells, {len(failures)} failures")
    return tests.returncode or bool(failures)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def _say(label: str, done: int, total: int) -> None:
    print(f"  {label} ({done} of {total})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
