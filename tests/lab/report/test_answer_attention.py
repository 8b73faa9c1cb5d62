"""Sections of the report about the attention of an answer, from hand-made results."""

import pytest

from coca_lab.report import build_report, printed_tables
from coca_lab.report.attention import attention_sections

SHARES = {256: [[0.0, 0.1], [0.9, 0.3]], 1024: [[0.0, 0.05], [0.6, 0.2]]}


def mean(value):
    return {"mean": value, "interval95": [value / 2, value]}


def cell(model, length, shares, trained=256):
    kinds = [("strict", 32, 3.4), ("dot product", None, 5.5)]
    layers = [
        {
            "layer": index,
            "attention": attention,
            "window": window,
            "log_keys": keys,
            "heads": [
                {
                    "fact": mean(share),
                    **{n: mean(0.25) for n in ("digit", "before_digit", "near", "trained")},
                    "entropy": mean(keys * (1 - share)),
                    "peak": mean(0.125),
                    "peak_distance": 1000.0 + head,
                }
                for head, share in enumerate(row)
            ],
        }
        for index, (row, (attention, window, keys)) in enumerate(zip(shares, kinds, strict=True))
    ]
    return {
        "task": "attention", "model": model, "training_length": trained, "length": length,
        "prompts": 10, "near": 32, "seed": 0, "digits_right": mean(0.5), "layers": layers,
        "samples": [],
    }  # fmt: skip


CELLS = [cell("A", length, SHARES[length]) for length in (1024, 256)]
CELLS += [cell("B", 256, [[0.0, 0.1], [0.2, 0.0]])]


def test_the_figures_show_the_numbers():
    sections = attention_sections(CELLS)
    assert [section.title for section in sections] == [
        "Attention of the answer to the line with the key: A",
        "Attention of the answer to the line with the key: B",
        "Entropy of the answer’s attention",
        "Heads that retrieve",
    ]
    # A row per head, a column per length.
    heat = sections[0].chart
    assert heat.values == [[0.0, 0.0], [0.1, 0.05], [0.9, 0.6], [0.3, 0.2]]
    assert heat.y[1][::2] == [
        "layer 0, head 0 (local 32, strict)",
        "layer 1, head 0 (global, dot product)",
    ]
    lines = {line.label: line for line in sections[2].chart.lines}
    found = lines["A, global, dot product"]
    assert found.x == [256, 1024] and found.y == pytest.approx([5.5 * 0.4, 5.5 * 0.6])
    assert lines["ln n"].y == [5.5, 5.5]
    assert len(lines) == 5


def test_the_table_names_the_heads_that_retrieve():
    table = attention_sections(CELLS)[-1]
    heads = [(str(row[0]), row[0].small, row[1]) for row in table.rows]
    kind = "global, dot product"
    assert heads == [
        *(("A, layer 1, head 0", kind, length) for length in ("256", "1,024")),
        *(("A, layer 1, head 1", kind, length) for length in ("256", "1,024")),
        ("B, layer 1, head 0", kind, "256"),  # none reaches a quarter: the best
    ]
    assert [str(entry) for entry in table.rows[1][2:]] == [
        *("0.50", "0.60", "0.25", "0.25", "0.25", "0.25", "2.20 of 5.50", "0.12 at 1,000")
    ]
    assert table.rows[1][3].small == "0.30 to 0.60"
    assert table.header[6:8] == ["nearest 32", "last 256"]
    text = attention_sections(CELLS)[0].text
    assert (
        "0.50 at 256, 0.50 at 1,024" in text and "head 0 (global, dot product): 0.90, 0.60" in text
    )


def test_tables_for_the_terminal():
    (header, rows), (_, other) = printed_tables(CELLS)
    assert header == ["A: attention to the key’s line at", "256", "1,024"]
    assert rows[0] == ["digits right", "0.50", "0.50"]
    assert rows[1] == ["layer 1, head 0 (global, dot product)", "0.90", "0.60"]
    assert len(rows) == 3 and len(other) == 2


def test_a_page_of_models_trained_differently():
    other = cell("B", 256, SHARES[256], trained=None)
    for head in (h for layer in other["layers"] for h in layer["heads"]):
        del head["trained"]
        head["near"]["interval95"] = None
    page = build_report([{"results": [*CELLS[:2], other]}])
    assert "<h1>Where the answer’s attention goes</h1>" in page
    assert "last training length" in page and page.count('class="marks"') == 3
