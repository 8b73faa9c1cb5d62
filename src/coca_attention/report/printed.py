"""Tables for the terminal: header and rows of everything that was measured."""

from collections.abc import Sequence
from typing import Any

from coca_attention.report.angles import angle_cells, angle_table
from coca_attention.report.bench import bench_tables
from coca_attention.report.harness import harness_sections
from coca_attention.report.results import printed_table
from coca_attention.report.retrieval import accuracy_table, by_line, key_table


def printed_tables(cells: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every task's printed table."""
    tables = []
    if any(cell["task"] == "perplexity" for cell in cells):
        tables.append(printed_table(cells))
        keyed = [cell for cell in cells if cell.get("key_tokens")]
        if keyed:
            tables.append(key_table(keyed))
    passkey = by_line(cell for cell in cells if cell["task"] == "passkey")
    if passkey:
        header, rows = accuracy_table(passkey, "accuracy")
        tables.append((["passkeys found at", *header], rows))
    for kind in dict.fromkeys(cell["kind"] for cell in cells if cell["task"] == "needles"):
        lines = by_line(c for c in cells if c["task"] == "needles" and c["kind"] == kind)
        header, rows = accuracy_table(lines, "recall")
        tables.append(([f"{kind}: recall at", *header], rows))
    tables += [(section.header, section.rows) for section in harness_sections(cells)]
    tables += bench_tables(cells)
    if angle_cells(cells):
        tables.append(angle_table(cells))
    return tables
