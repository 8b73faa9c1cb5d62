"""Endless text in the report: perplexity, speed and memory by position."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from coca_attention.report.figures import colours, draw
from coca_attention.report.lines import DASHES, Cell, line_key, line_label
from coca_attention.report.section import Section


def streaming_sections(cells: Sequence[Cell]) -> list[Section]:
    """A figure of perplexity by position, and a table of perplexity, speed and memory."""
    colour = colours(cell["model"] for cell in cells)
    ends = sorted({r["last"] for cell in cells for r in cell["by_position"]})
    labels = {
        index: f"{line_label(line_key(cell))}, {cell['sinks']} + {cell['window']}"
        for index, cell in enumerate(cells)
    }

    def plot(axes: Axes) -> None:
        for index, cell in enumerate(cells):
            axes.plot(
                [r["last"] for r in cell["by_position"]],
                [math.exp(r["nats"] / r["tokens"]) for r in cell["by_position"]],
                label=labels[index],
                color=colour[cell["model"]],
                ls=DASHES[cell["scaling"]],
                marker="o",
                ms=4,
                lw=1.8,
            )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens read")
        axes.set_ylabel("perplexity of the range that ends here")

    rows = []
    for index, cell in enumerate(cells):
        found = {r["last"]: r for r in cell["by_position"]}
        for what, show in (
            ("perplexity", lambda r: f"{math.exp(r['nats'] / r['tokens']):.1f}"),
            ("tokens per second", lambda r: f"{r['tokens_per_second']:,.0f}"),
            ("memory in MB", lambda r: f"{r['megabytes']:,.0f}"),
        ):
            values = [show(found[end]) if end in found else "–" for end in ends]
            rows.append([f"{labels[index]}: {what}", *values])
    return [
        Section(
            "Endless text",
            text="One text is read from beginning to end; the first tokens (sinks) and the last "
            "ones (window) stay in sight.",
            figure=draw("streaming", plot),
            header=["up to token", *(f"{end:,}" for end in ends)],
            rows=rows,
            note="Each value is that of the range of tokens that ends there. Memory is that of the "
            "whole process (on a GPU, what PyTorch has reserved).",
        )
    ]
