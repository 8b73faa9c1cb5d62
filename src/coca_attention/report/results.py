"""Result files in, the series and tables of a report out: pure data."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError
from coca_attention.evaluation.perplexity import DocumentScore

SCALING_NAMES = {"linear": "PI", "ntk": "NTK", "dynamic": "dynamic NTK"}


@dataclass(frozen=True)
class Point:
    """Perplexity at one window; ``low`` and ``high`` are the ends of the 95 % interval."""

    window: int
    perplexity: float
    low: float | None
    high: float | None
    documents: tuple[DocumentScore, ...] = ()


@dataclass(frozen=True)
class Series:
    """One line of the figure and one row of the table.

    ``kind`` is the scaling; for ``attend-last`` there is one point, which holds at every window.
    """

    model: str
    kind: str
    label: str
    points: tuple[Point, ...]

    def at(self, window: int) -> Point | None:
        """The point of a window; the only one for attend-last."""
        if self.kind == "attend-last":
            return self.points[0]
        return next((p for p in self.points if p.window == window), None)


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Result files, or the ``training.json`` of run folders.

    Raises:
        UserError: If a file is missing, is no JSON, or holds no results.
    """
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            path = path / "training.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{path}: not a result file, no valid JSON ({error})") from error
        if not isinstance(content, dict) or not {"results", "training", "curve"} & set(content):
            raise UserError(
                f"{path}: not a result file: expected an object with results (from coca eval) or "
                "a curve (training.json of a run)"
            )
        if "curve" in content:
            # A copy of a run's file is called as the run was.
            name = path.parent.name if path.name == "training.json" else path.stem
            content = {**content, "training": [{"name": name, **content}]}
        found.append(content)
    return found


def perplexity_series(cells: Sequence[dict[str, Any]]) -> list[Series]:
    """Lines of perplexity against the window, in the order of the models' first appearance.

    Raises:
        UserError: If two cells claim one point with different figures.
    """
    grouped: dict[tuple[str, str, Any], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell.get("task") == "perplexity":
            key = (cell["model"], cell["scaling"], cell.get("factor"))
            group = grouped.setdefault(key, [])
            # Two evaluations of a model share its attend-last line: the same figure is one point.
            if not any(_same(cell, other) for other in group):
                group.append(cell)
    models = list(dict.fromkeys(model for model, _, _ in grouped))
    series = []
    for (model, kind, factor), group in grouped.items():
        windows = [cell["window"] for cell in group]
        if len(set(windows)) < len(windows):
            raise UserError(
                f"the results hold {model} ({kind}) at one window twice; give result files of "
                "different models or settings"
            )
        points = [_point(cell) for cell in sorted(group, key=lambda cell: cell["window"])]
        series.append(Series(model, kind, _label(model, kind, factor, group), tuple(points)))
    return sorted(series, key=lambda item: (models.index(item.model), _rank(item.kind)))


def _same(cell: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two cells measured the same thing and found the same."""
    names = ("window", "stride", "targets", "documents")
    return all(cell[name] == other[name] for name in names)


def _point(cell: dict[str, Any]) -> Point:
    low, high = cell.get("ci95") or (None, None)
    documents = tuple(
        DocumentScore(d["id"], math.inf if d["nats"] is None else d["nats"], d["tokens"])
        for d in cell["documents"]
    )
    value = math.inf if cell["perplexity"] is None else cell["perplexity"]
    return Point(cell["window"], value, low, high, documents)


def _label(model: str, kind: str, factor: float | None, group: Sequence[dict[str, Any]]) -> str:
    if kind == "none":
        return model
    if kind == "attend-last":
        return f"{model}, last {group[0]['window']} tokens only"
    return f"{model} + {SCALING_NAMES.get(kind, kind)} ({factor:g})"


def _rank(kind: str) -> int:
    return ["none", "ntk", "dynamic", "linear", "attend-last"].index(kind)


def all_windows(series: Sequence[Series]) -> list[int]:
    """Window sizes of the table's columns."""
    return sorted({p.window for s in series if s.kind != "attend-last" for p in s.points})


def best_per_window(series: Sequence[Series], windows: Sequence[int]) -> dict[int, float]:
    """Lowest perplexity of every column, the attend-last baseline left aside."""
    best = {}
    for window in windows:
        values = [
            point.perplexity
            for item in series
            if item.kind != "attend-last" and (point := item.at(window)) is not None
        ]
        best[window] = min(values, default=math.nan)
    return best


def printed_table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the printed table: a row a model and scaling, a column a window."""
    series = perplexity_series(results)
    windows = all_windows(series)
    rows = []
    for item in series:
        points = [item.at(window) for window in windows]
        rows.append([item.label, *(f"{p.perplexity:.1f}" if p else "–" for p in points)])
    return ["perplexity at", *(f"{window:,}" for window in windows)], rows
