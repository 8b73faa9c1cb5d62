"""A quarter of an hour on a GPU: prepared runs, side by side, that end in time and resume.

    PYTHONPATH=src:. python -m studies.gpu far --model FOLDER --books books.jsonl
    PYTHONPATH=src:. python -m studies.gpu retrieval
    PYTHONPATH=src:. python -m studies.gpu pretrained --books 'BOOKS/*.jsonl.xz'
    PYTHONPATH=src:. python -m studies.gpu paper --books 'BOOKS/*.jsonl.xz'

Every run writes what is finished as it goes, so the same command continues; after the minutes all
runs are interrupted. ``--dry-run`` does the same at a hundredth of the size, on any machine: one
after another in one process, because imports would take most of the time.
"""

import argparse
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

STUDY = "-m coca_lab.cli study {name} --output {output}/{name}"
SMOLLM2 = (
    "--models '{{SmolLM2-135M-Instruct: {model}}}' --perplexity.source {books} "
    "--needles.source {books} --device cuda --dtype bfloat16"
)
QUARTERS = {
    "far": [
        "-m coca_lab.cli study smollm2 --output {output}/smollm2 --workers 8 "
        "--ruler.source {books} --ruler.batch-tokens 65536 " + SMOLLM2,
        "-m coca_lab.cli study smollm2-16k --output {output}/smollm2-16k --workers 4 " + SMOLLM2,
    ],
    "retrieval": [STUDY + " --workers 14"],
    "pretrained": [STUDY + " --text {books} --workers 4"],
    "paper": [STUDY + " --text {books} --workers 4"],
}
"""The commands of Python that run side by side."""
NAMES = {"paper": "paper-125m"}
STEPS = (
    "--training.steps 2 --validation.every 2 --validation.batches 1 --validation.passkeys 0 "
    "--passkey.samples 1 --passkey.max-new-tokens 2 --workers 0"
)
DRY = {
    "far": "--device cpu --dtype float32 --workers 0 --perplexity.max-tokens 513 "
    "--perplexity.windows 256,512 --perplexity.stride 128 --perplexity.attend-last 256 "
    "--needles.lengths 512 --needles.count 2 --ruler.lengths 1024 --ruler.kinds niah_single_1 "
    "--ruler.samples 1 --ruler.chat false --perplexity.max-documents 1 "
    "--needles.max-documents 1",
    "retrieval": f"{STEPS} --seeds 0 --training.global-batch-size 2 --training.micro-batch-size 2 "
    "--passkey.lengths 256 --perplexity.windows 256 --perplexity.max-tokens 385 "
    "--perplexity.max-documents 1",
    # Stages have steps of their own: shorter blocks.
    "pretrained": f"{STEPS} --data.block-length 128 --training.global-batch-size 1 "
    "--training.micro-batch-size 1 --passkey.lengths 256 "
    "--perplexity.max-documents 1 --perplexity.windows 128,256 --perplexity.max-tokens 257 "
    "--perplexity.stride 128",
    "paper": f"{STEPS} --training.global-batch-size 1 "
    "--training.micro-batch-size 1 --model.num-layers 3 --model.hidden-size 192 "
    "--passkey.lengths 512 --perplexity.max-documents 1 --perplexity.windows 512,1024 "
    "--perplexity.max-tokens 1025",
}
"""What a dry run adds to every command; the last of two equal options counts."""
GRACE = 20.0
"""Seconds in which interrupted runs save."""


def commands(options: argparse.Namespace) -> list[list[str]]:
    """The words of every run of a quarter."""
    found = []
    for text in QUARTERS[options.quarter]:
        name = NAMES.get(options.quarter, options.quarter)
        words = text.format(
            name=name,
            model=shlex.quote(str(options.model)),
            books=shlex.quote(str(options.books)),
            output=options.output,
        )
        found.append(shlex.split(words + (f" {DRY[options.quarter]}" if options.dry_run else "")))
    return found


def run(every: Sequence[Sequence[str]], folder: Path, seconds: float) -> list[int | None]:
    """The exit codes of commands that run side by side; None for one that was interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if torch.cuda.is_available():  # small models share the GPU through NVIDIA's MPS
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    # A shell lets what it starts in the background ignore interrupts, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = time.monotonic() + seconds
    started = []
    for number, words in enumerate(every):
        log = open(folder / f"log-{number}.txt", "a")  # noqa: SIM115 (the process has it)
        command = [sys.executable, *words]
        started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    codes: list[int | None] = []
    for process in started:
        try:
            codes.append(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            process.send_signal(signal.SIGINT)
    for process in started:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    return codes


def run_here(every: Sequence[Sequence[str]]) -> list[int | None]:
    """The exit codes of commands that run in this process, one after another."""
    codes: list[int | None] = []
    before = sys.argv
    for _, module, *words in every:
        try:
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__")
            codes.append(0)
        except SystemExit as ended:
            said = ended.code
            if isinstance(said, str):
                print(said, file=sys.stderr)
            codes.append(said if isinstance(said, int) else int(said is not None))
        finally:
            sys.argv = before
    return codes


def main(words: Sequence[str] | None = None) -> int:
    """Run a quarter; 1 if one of its runs failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("quarter", choices=QUARTERS)
    parser.add_argument("--model", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--books", default="books", help="text; for far that of studies.smollm2.books"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--dry-run", action="store_true", help="at a hundredth of the size")
    options = parser.parse_args(words)
    every = commands(options)
    seconds = 60 * options.minutes
    codes = run_here(every) if options.dry_run else run(every, options.output, seconds)
    for words, code in zip(every, codes, strict=True):
        ended = "interrupted; the same command continues" if code is None else f"exit code {code}"
        print(f"{shlex.join(words)}: {ended}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
