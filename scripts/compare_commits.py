"""Compares the ratios of `coca bench` at two commits, on a machine that does nothing else.

.venv/bin/python scripts/compare_commits.py OLD NEW

The measurements of docs/performance.md run at both commits in turn, several times. Exits with 1 if
the median of a ratio at NEW is more than 2 % worse, and all its rounds are worse than all of OLD. A
ratio of the same code differs by several percent from process to process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ALLOWED = 1.02
MEASUREMENTS = [
    "--cases operator,operator-training --lengths 1024,2048,4096,8192 --longest-contraction 0",
    "--cases training,prefill --lengths 1024",
    "--cases operator-decode,decode --lengths 8192,16384,32768",
    "--cases decode-compiled --lengths 8192,32768",
    "--cases training --lengths 1024,4096 --roles llg --window 32 --hidden-size 128 --layers 3"
    " --head-width 32",
]


def bench(tree: Path, options: str, output: Path) -> dict[tuple, float]:
    """Ratios to rotary attention by measurement, case, length and variant."""
    command = [sys.executable, "-m", "coca_lab.cli", "bench", *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    subprocess.run([*command, "--output", str(output)], check=True, env=environment, cwd=tree)
    return {
        (options, cell["case"], cell["length"], name): found["ratio"]
        for cell in json.loads(output.read_text())["results"]
        for name, found in cell["variants"].items()
        if "ratio" in found
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", nargs=2)
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--bench", default="--threads 2 --seconds 30 --rounds 31")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(MEASUREMENTS)))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / name for name in ("old", "new")]
        for tree, commit in zip(trees, options.commits, strict=True):
            command = ["git", "worktree", "add", "--detach", str(tree), commit]
            subprocess.run(command, check=True, cwd=ROOT)
        found: tuple[dict, dict] = {}, {}
        try:
            for number in range(options.rounds):
                for index in options.only:
                    for which in (0, 1) if number % 2 == 0 else (1, 0):
                        words = f"{MEASUREMENTS[index]} {options.bench}"
                        for key, ratio in bench(
                            trees[which], words, Path(folder) / "bench.json"
                        ).items():
                            found[which].setdefault(key, []).append(ratio)
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT)
    worse = 0
    for key in sorted(found[0].keys() & found[1].keys()):
        old, new = (median(x[key]) for x in found)
        bad = new > ALLOWED * old and min(found[1][key]) > max(found[0][key])
        worse += bad
        print(f"{'WORSE' if bad else '':6}{new / old:.3f}  {old:.3f} {new:.3f}  {key[1:]}")
    print(f"{worse} ratios are more than 2 % worse")
    return int(worse > 0)


if __name__ == "__main__":
    raise SystemExit(main())
