"""Results of the lm-evaluation-harness in the report: the layout of the paper's Table 5."""

from collections.abc import Sequence
from typing import Any

from coca_lab.report.section import Section


def harness_sections(cells: Sequence[dict[str, Any]]) -> list[Section]:
    """One table: a row per model, a column per metric of a task."""
    found = {
        (cell["model"], cell["name"], metric): value
        for cell in cells
        for metric, value in cell["metrics"].items()
        if "stderr" not in metric
    }
    columns = list(dict.fromkeys((name, metric) for _, name, metric in found))
    rows = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        values = [found.get((model, *column)) for column in columns]
        rows.append([model, *("–" if v is None else f"{v:.4g}" for v in values)])
    versions = ", ".join(sorted({str(cell["harness"]) for cell in cells}))
    limits = sorted({cell["limit"] for cell in cells if cell["limit"] is not None})
    return [
        Section(
            "Short context",
            header=["model", *(f"{name}: {metric.partition(',')[0]}" for name, metric in columns)],
            rows=rows,
            note=f"lm-evaluation-harness {versions}."
            + (f" At most {limits[-1]} questions per task." if limits else ""),
        )
    ]
