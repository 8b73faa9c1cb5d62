"""Run the GPU tests and every benchmark case: ``make gpu-check``; writes results/gpu-NAME."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.__main__ import main as benchmark

TESTS = ["tests/ops/test_gpu.py", "tests/ops/test_kernels.py"]
OPTIONS = "--device cuda --dtype bfloat16 --rounds 30 --seconds 2 --longest-contraction 8192"
OPERATOR = "--heads 32 --head-width 128"  # of a model of 7B parameters
LAYERS = "--hidden-size 4096 --head-width 128 --layers 4"  # likewise, four of its layers
MODEL = "--hidden-size 1024 --layers 18"
ROLES = f"{MODEL} --roles llg --window 64"
RUNS = [
    f"operator --lengths 4096 8192 16384 32768 {OPERATOR}",
    f"operator --lengths 4096 32768 {OPERATOR} --kv-heads 8",
    f"operator-training --lengths 4096 8192 16384 32768 {OPERATOR}",
    f"operator-decode --lengths 8192 32768 131072 {OPERATOR}",
    f"operator-decode --lengths 8192 32768 131072 {OPERATOR} --kv-heads 8",
    "memory --lengths 2048 4096 8192 32768 131072 --heads 8 --head-width 128",
    f"limits limits-training --lengths 8192 32768 {OPERATOR}",
    f"decode --lengths 32768 {LAYERS} --batch 4",
    f"decode --lengths 131072 {LAYERS}",
    f"prefill --lengths 8192 32768 {MODEL}",
    f"training --lengths 2048 8192 {MODEL} --batch 2",
    f"prefill --lengths 32768 {ROLES}",
    f"training --lengths 16384 {ROLES}",
    f"prefill --lengths 32768 {ROLES} --flex",
    f"training --lengths 16384 {ROLES} --flex",
    f"decode-compiled --lengths 32768 {MODEL} --layers 4 --kv-heads 4",
]


def main() -> int:
    """Run tests and benchmarks; return 0 if all succeed."""
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device and a PyTorch built for CUDA; there is none")
        return 2
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu or not slow", *TESTS]
    failures = [*TESTS] if subprocess.run(command).returncode else []
    gpu = torch.cuda.get_device_name()
    folder = Path("results", "gpu-" + re.sub("[^a-z0-9]+", "-", gpu.lower()).strip("-"))
    for number, run in enumerate(RUNS):
        path = folder / f"{number}-{run.split()[0]}.json"
        try:
            benchmark(["--cases", *run.split(), *OPTIONS.split(), "--output", str(path)])
        except (RuntimeError, ValueError) as error:  # out of memory, or a wrong result
            failures.append(f"{run}: {error}")
        torch.cuda.empty_cache()
    print("\n".join([f"Results: {folder}, {len(failures)} failures", *failures]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
