"""Tables of measured cells: the first variant's time, and ratios to it; or megabytes.

    python -m benchmarks.tables results/cpu/*.json

prints those of files that ``python -m benchmarks`` has written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from coca_lab.files import read_json

Cell = dict[str, Any]


def tables(cells: Sequence[Cell]) -> list[str]:
    """A table as text for every case, device, precision and size.

    It has a row for every variant and a column for every length.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell['case']} ({setting(cell)})", []).append(cell)
    texts = []
    for title, group in groups.items():
        rows: dict[str, dict[str, str]] = {}
        for cell in sorted(group, key=lambda cell: cell["length"]):
            baseline, *_ = cell["variants"]
            for name, variant in cell["variants"].items():
                shown = entry(variant, name == baseline)
                rows.setdefault(label(cell, name), {})[f"{cell['length']:,}"] = shown
        frame = pd.DataFrame.from_dict(rows, orient="index").fillna("–")
        frame.insert(0, title, frame.index)
        texts.append(frame.to_string(index=False))
    return texts


def setting(cell: Cell) -> str:
    """The sizes, precision and device in words."""
    sizes = {**cell["sizes"], "batch": cell["batch"]}
    words = [f"{name.replace('_', ' ')} {size}" for name, size in sizes.items() if size is not None]
    return ", ".join([*words, cell["dtype"], cell["device"]])


def label(cell: Cell, name: str) -> str:
    """The variant's name, and the size of its cache relative to the first one's if they differ."""
    first, *_ = cell["variants"].values()
    size = cell["variants"][name].get("cache_megabytes")
    baseline = first.get("cache_megabytes")
    if not size or not baseline or size == baseline:
        return name
    return f"{name} ({size / baseline:.2f} × bytes)"


def entry(variant: Cell, first: bool) -> str:
    """Peak memory; of the first variant, the median time; of others, ratio and quartiles."""
    if "peak_megabytes" in variant:
        return f"{variant['peak_megabytes']:,.0f} MB"
    if first:
        digits = 0 if variant["median_ms"] >= 100 else 1
        return f"{variant['median_ms']:,.{digits}f} ms"
    low, high = variant["ratio_quartiles"]
    return f"{variant['ratio']:.2f} × ({low:.2f}–{high:.2f})"


def print_tables(paths: Sequence[str | Path]) -> None:
    """Print the names and the tables of files."""
    for path in paths:
        print(path, *tables(read_json(Path(path))["results"]), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    print_tables(sys.argv[1:])
