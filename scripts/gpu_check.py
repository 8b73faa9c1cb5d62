"""Test and time on a machine with an NVIDIA GPU: ``make gpu-check`` (under 8 minutes, no network).

Needs PyTorch 2.11 or later for CUDA, Triton, Transformers, pytest and matplotlib in the Python that
runs it; nothing is installed. Runs the GPU tests, then the benchmarks, and writes
results/gpu-NAME.json and results/gpu-NAME.html, NAME after the GPU.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
TESTS = ["tests/ops/test_gpu.py", "tests/ops/test_kernels.py"]
# Settings of every part: the shapes of a 7B model's attention (32 heads of 128), of one with 8
# key/value heads, and a small Llama of 16 layers of 1,024.
ATTENTION = {"heads": 32, "head_width": 128, "longest_contraction": 8192}
MODEL = {"hidden_size": 1024, "layers": 16, "head_width": 64}
PARTS = [
    {
        "cases": ["operator", "operator-training"],
        "lengths": [4096, 8192, 16384, 32768],
        **ATTENTION,
    },
    {"cases": ["operator"], "lengths": [4096, 32768], **ATTENTION, "groups": 8},
    {"cases": ["operator-decode"], "lengths": [8192, 32768, 131072], **ATTENTION, "groups": 8},
    {"cases": ["operator-decode"], "lengths": [8192, 32768, 131072], **ATTENTION},
    {"cases": ["memory"], "lengths": [2048, 4096, 8192, 32768, 131072], **ATTENTION, "heads": 8},
    {"cases": ["training"], "lengths": [2048, 8192], "batch": 2, **MODEL},
    {"cases": ["prefill"], "lengths": [8192, 32768], **MODEL},
    {"cases": ["decode"], "lengths": [32768, 131072], **MODEL, "groups": 4},
    {"cases": ["decode-compiled"], "lengths": [32768], **MODEL, "layers": 4, "groups": 4},
]


def main() -> int:
    """Run both; return the exit code of the tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=str(ROOT / "results"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=7.0, help="time for tests and benchmarks")
    options = parser.parse_args()
    started = time.monotonic()

    import torch

    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device and a PyTorch built for it; there is none here")
        return 2
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu or not slow", *TESTS],
                           cwd=ROOT, env=_environment())  # fmt: skip

    from coca_attention.benchmarks import BenchSettings, run_benchmarks
    from coca_attention.environment import describe_environment, write_json
    from coca_attention.errors import UserError

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    results = Path(options.output) / f"gpu-{name}.json"
    cells, failures = [], []
    for number, part in enumerate(PARTS):
        left = options.minutes * 60 - (time.monotonic() - started)
        if left < 10:
            failures.append(f"no time left for {', '.join(part['cases'])}")
            continue
        runs = sum(len(rest["cases"]) * len(rest["lengths"]) for rest in PARTS[number:])
        common = {"device": "cuda", "dtype": "bfloat16", "rounds": 30, "seconds": left / runs}
        settings = BenchSettings(**{**common, **part})
        try:
            cells += run_benchmarks(settings, progress=_say)
        except (UserError, torch.OutOfMemoryError, RuntimeError) as error:
            failures.append(f"{', '.join(part['cases'])}: {' '.join(str(error).split())[:300]}")
            print(f"  {failures[-1]}")
        torch.cuda.empty_cache()
        content = {"results": cells, "failures": failures, "environment": describe_environment()}
        write_json(results, content)
    if cells:
        from coca_attention.report import write_report

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
