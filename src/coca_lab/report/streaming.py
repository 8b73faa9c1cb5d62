"""Endless text in the report: perplexity, speed and memory by position."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from coca_lab.intervals import DocumentScore, perplexity
from coca_lab.report.figures import colours, draw
from coca_lab.report.lines import DASHES, Cell, line_key, line_label
from coca_lab.report.section import Section


def streaming_sections(cells: Sequence[Cell]) -> list[Section]:
    """A figure of perplexity by position; for every model a table with speed and memory."""
    colour = colours(cell["model"] for cell in cells)
    labels = [
        f"{line_label(line_key(cell))}, {cell['sinks']:,} + {cell['window']:,} tokens in sight"
        for cell in cells
    ]
    if len(set(labels)) < len(labels):
        labels = [f"{a}, {c['piece']:,} at a time" for a, c in zip(labels, cells, strict=True)]

    def plot(axes: Axes) -> None:
        for cell, label in zip(cells, labels, strict=True):
            axes.plot(
                [r["last"] for r in cell["by_position"]],
                [_perplexity(r) for r in cell["by_position"]],
                label=label,
                color=colour[cell["model"]],
                ls=DASHES[cell["scaling"]],
                marker="o",
                ms=4,
                lw=1.8,
            )
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens read")
        axes.set_ylabel("perplexity of the range that ends here")

    sections = [
        Section(
            "Endless text",
            text="One text is read from beginning to end; its first tokens (sinks) and the last "
            "ones (window) stay in sight.",
            figure=draw("streaming", plot),
        )
    ]
    for cell, label in zip(cells, labels, strict=True):
        rows = [
            [
                f"{r['first']:,} to {r['last']:,}",
                f"{_perplexity(r):.1f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['megabytes']:,.0f}",
            ]
            for r in cell["by_position"]
        ]
        sections.append(
            Section(
                label,
                header=[label, "perplexity", "tokens/s", "memory in MB"],
                rows=rows,
                note=f"Tokens in a pass: {cell['piece']:,}. Memory is that of the whole process "
                "(on a GPU, what PyTorch has reserved).",
            )
        )
    return sections


def _perplexity(found: dict[str, Any]) -> float:
    return perplexity([DocumentScore("", found["nats"], found["tokens"])])
