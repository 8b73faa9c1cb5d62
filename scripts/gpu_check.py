"""Run the GPU tests and benchmarks: ``make gpu-check`` (under 8 minutes, no network).

The Python that runs it needs PyTorch 2.11 or later for CUDA, Triton, Transformers, pytest,
Altair and vl-convert; nothing is installed. Runs the GPU tests, then every benchmark case with its
`GPU_RUNS`, and writes results/gpu-NAME.json and results/gpu-NAME.html, where NAME is the GPU's.
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
# Settings of every case's runs: the attention of a 7B model, and a small Llama.
OPERATOR = {"heads": 32, "head_width": 128, "longest_contraction": 8192}
MODEL = {"hidden_size": 1024, "layers": 16, "head_width": 64}
GPU_RUNS = [
    ("decode", {**MODEL, "lengths": [32768, 131072], "kv_heads": 4}),
    ("decode-compiled", {**MODEL, "lengths": [32768], "layers": 4, "kv_heads": 4}),
    ("memory", {**OPERATOR, "lengths": [2048, 4096, 8192, 32768, 131072], "heads": 8}),
    ("operator", {**OPERATOR, "lengths": [4096, 8192, 16384, 32768]}),
    ("operator", {**OPERATOR, "lengths": [4096, 32768], "kv_heads": 8}),
    ("operator-decode", {**OPERATOR, "lengths": [8192, 32768, 131072], "kv_heads": 8}),
    ("operator-decode", {**OPERATOR, "lengths": [8192, 32768, 131072]}),
    ("operator-training", {**OPERATOR, "lengths": [4096, 8192, 16384, 32768]}),
    ("prefill", {**MODEL, "lengths": [8192, 32768]}),
    ("training", {**MODEL, "lengths": [2048, 8192], "batch": 2}),
]


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
    from coca_lab.environment import describe_environment
    from coca_lab.files import write_json
    from coca_lab.studies.bench import BenchSettings, run_benchmarks

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    results = Path(options.output) / f"gpu-{name}.json"
    runs = [
        BenchSettings(cases=[case], device="cuda", dtype="bfloat16", rounds=30, **sizes)
        for case, sizes in GPU_RUNS
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
