"""Ratios of two checkouts: ``python -m benchmarks.compare OLD NEW``, their folders.

These benchmarks time the sources of both, in turn, five times: about an hour on a machine that does
nothing else. Exits with 1 if the median of a ratio is more than 2 % worse in NEW and all its rounds
are worse than all of OLD; a ratio of the same code differs by several percent between processes.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

ROUNDS, ALLOWED, OUTPUT = 5, 1.02, Path("runs/compare.json")
OPTIONS = f"--threads 2 --seconds 30 --rounds 31 --longest-contraction 0 --output {OUTPUT}"
RUNS = [
    "--cases operator operator-training --lengths 1024 2048 4096 8192",
    "--cases training prefill --lengths 1024",
    "--cases operator-decode decode --lengths 8192 16384 32768",
    "--cases decode-compiled --lengths 8192 32768",
    "--cases training --lengths 1024 4096 --roles llg --hidden-size 128 --layers 3 --head-width 32",
]


def main(*trees: str) -> int:
    """Print every ratio in both checkouts; return 1 if one is worse."""
    ratios, worse = defaultdict(lambda: ([], [])), 0
    for turn in range(ROUNDS):
        for run in RUNS:
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                command = [sys.executable, "-m", "benchmarks", *run.split(), *OPTIONS.split()]
                environment = {**os.environ, "PYTHONPATH": str(Path(trees[which], "src"))}
                subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
                for cell in json.loads(OUTPUT.read_text())["results"]:
                    for name, variant in cell["variants"].items():
                        key = (cell["case"], cell["length"], name)
                        ratios[key][which].append(variant["ratio"])
    for key, (old, new) in sorted(ratios.items()):
        change = median(new) / median(old)
        bad = change > ALLOWED and min(new) > max(old)
        worse += bad
        print(f"{'WORSE' if bad else '':6}{change:.3f}  {median(old):.3f} {median(new):.3f}  {key}")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
