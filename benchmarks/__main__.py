"""Time and memory of CoCA beside rotary attention: results are checked, then timed."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cases import CASES
from benchmarks.tables import print_tables
from benchmarks.timing import interleaved
from coca_attention.errors import UserError
from coca_lab.engine import import_extensions
from coca_lab.environment import describe_environment
from coca_lab.files import write_json

TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest error, relative to the largest exact value, of a variant that is timed."""


def parser() -> ArgumentParser:
    """The options of ``python -m benchmarks``."""
    titles = "; ".join(f"{name}: {case.title}" for name, case in CASES.items())
    options = ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=titles)
    option, number = options.add_argument, {"type": int, "metavar": "N"}
    option("--cases", nargs="+", choices=CASES, default=["operator", "operator-training"])
    option("--lengths", nargs="+", default=[1024, 2048, 4096, 8192], **number, help="tokens")
    option("--dtype", choices=TOLERANCES, default="float32")
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--batch", default=1, **number)
    option("--heads", default=16, **number, help="query heads of the operator")
    option("--kv-heads", **number, help="key/value heads; by default as many as query heads")
    option("--head-width", default=64, **number)
    option("--hidden-size", default=512, **number, help="of models; 12 layers of 512 have 50M")
    option("--layers", default=12, **number, help="of models")
    option("--roles", help="of the layers in training and prefill, such as llg")
    option("--window", default=32, **number, help="tokens that a local layer sees")
    option("--decay", default=0.0, type=float, help="of roles")
    option("--flex", action="store_true", help="layers with roles by FlexAttention, too")
    option("--longest-contraction", default=4096, **number, help="its memory is quadratic")
    option("--rounds", default=15, **number, help="most; each times every variant once")
    option("--seconds", default=60.0, type=float, help="for a case and length")
    option("--threads", **number, help="of the CPU")
    option("--output", default="runs/bench.json", type=Path, help="result file")
    return options


def measure(name: str, length: int, settings: Namespace) -> dict[str, object]:
    """A cell of a result file: a case at a length; UserError if a variant is wrong."""
    case, allowed = CASES[name], TOLERANCES[settings.dtype]
    variants = case.make(length, settings)
    for variant in variants:
        if variant.error is not None and not variant.error <= allowed:
            raise UserError(
                f"{name} at {length} tokens: {variant.name} is off by {variant.error:.2g}, relative"
                f" to the largest exact value (allowed: {allowed:g}); wrong results are not timed"
            )
    if name == "memory":
        measured = {variant.name: {"peak_megabytes": variant.run()} for variant in variants}
    else:
        times = interleaved(variants, settings)
        measured = {v.name: times[v.name] | {"error": v.error, **v.facts} for v in variants}
    return {
        "task": "bench",
        "case": name,
        "title": case.title,
        "text": case.text,
        "measure": "memory" if name == "memory" else "ratio",
        "length": length,
        "sizes": {size: getattr(settings, size) for size in case.sizes},
        "variants": measured,
        **{field: getattr(settings, field) for field in ("dtype", "device", "batch")},
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure every case at every length, write the cells as JSON, and print them."""
    settings = parser().parse_args(words)
    settings.window = settings.window if settings.roles else None
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    import_extensions()
    cells = []
    for name in settings.cases:
        for length in settings.lengths:
            print(f"{name} at {length:,} tokens", flush=True)
            cells.append(measure(name, length, settings))
    options = {**vars(settings), "output": str(settings.output)}
    content = {"settings": options, "environment": describe_environment()}
    write_json(settings.output, {"results": cells, **content})
    print_tables([settings.output])


if __name__ == "__main__":
    main()
