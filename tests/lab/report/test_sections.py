"""What the report says of hand-made results: every sentence, table and line, in sections.txt.

After a change that is meant: ``python tests/lab/report/test_sections.py > …/sections.txt``.
"""

import math
from pathlib import Path

import pytest
from result_cells import CELLS, lines, needles, passkey, perplexity, read, study, training

from coca_lab.report import Section, printed_tables
from coca_lab.report.perplexity import perplexity_sections
from coca_lab.report.prompts import distance_edges, needle_sections, passkey_sections
from coca_lab.report.study import gather_seeds, study_sections
from coca_lab.report.tasks import paper_sections
from coca_lab.report.training import training_sections

PROMPTS = [
    passkey("RoFormer", 512, 9),
    passkey("RoFormer", 4096, 3),
    passkey("CoCA-Slack", 512, 10),
    passkey("CoCA-Slack", 4096, 5),
    passkey("CoCA-Slack", 4096, 7, "ntk", 4.0),
    passkey("CoCA-Strict", 4096, 2),
]


def scored(*nats: float, tokens: int = 100) -> list[dict]:
    return [{"id": str(i), "nats": each, "tokens": tokens} for i, each in enumerate(nats)]


def paired(model: str, factor: float, spread: float = 0) -> dict:
    """Of documents that are hard for every model; ``factor`` is a constant, ``spread`` is not."""
    documents = scored(*(100 * (3 + i % 4 + factor) + spread * i for i in range(20)))
    return perplexity(model, 64, 40.0 * math.exp(factor), documents=documents)


def repeated(window: int, far: float, rest: float, scaling: str = "none") -> dict:
    """Of 10 tokens a document that can be copied from far back, and 90 others."""
    about = {"n": 4, "beyond": 64, "documents": [{"nats": far, "tokens": 10}] * 20}
    documents = scored(*(far + rest + i for i in range(20)))
    more = {"documents": documents, "tokens": 2000, "repeats": about}
    return perplexity("Roles", window, 30.0, scaling, **more)


def positions(model: str, *nats: float | None) -> dict:
    size = 8 // len(nats)
    ranges = [
        {"first": i * size + 1, "last": (i + 1) * size, "nats": each, "tokens": 4}
        for i, each in enumerate(nats)
    ]
    return perplexity(model, 8, 3.0, by_position=ranges, stride=8)


def form(model: str, attention: str, window: int, value: float | None) -> dict:
    return perplexity(model, window, 1.0, "ntk", attention=attention, perplexity=value)


FORMS = [
    form("a", "slack", 512, 20.0),
    form("b", "strict", 512, 20.5),
    form("a", "slack", 1024, 30.0),
    form("b", "strict", 1024, None),
]
PERPLEXITY = {
    "none gains from the longest window": CELLS,
    "one gains": [*CELLS, perplexity("CoCA-Slack", 64, 60.0, "attend-last")],
    "last tokens of two lengths, and twice": [
        *CELLS, perplexity("RoFormer", 32, 43.0, "attend-last"), {**CELLS[2], "seconds": 3.0}
    ],
    "no training length": [perplexity("a", 64, 40.0, training_length=None)],
    "infinite": [perplexity("a", 64, 2.0, perplexity=None, ci95=None)],
    "alike as shown": [perplexity("a", 64, 40.001), perplexity("b", 64, 40.0)],
    "paired": [paired("a", 0.0), paired("b", -0.1), paired("c", 0.0, spread=0.1)],
    "8 documents": [perplexity("a", 64, 40.0, documents=scored(*range(350, 358)))],
    "10 documents": [perplexity("a", 64, 40.0, documents=scored(*range(350, 360)))],
    "copies": [repeated(256, 20, 300), repeated(64, 30, 297, "attend-last"), repeated(64, 31, 297)],
    "positions": [positions("a", 8.0, None), positions("b", 8.0, 8.0, 8.0, 8.0)],
    "one model of each form": FORMS,
    "one form": FORMS[:1],
    "two models of a form": [*FORMS, form("c", "slack", 512, 25.0)],
}  # fmt: skip
PASSKEYS = {
    "forms": PROMPTS,
    "none beyond 4,096 tokens": [
        *PROMPTS, passkey("ALiBi", 512, 8), passkey("ALiBi", 4096, 8),
        passkey("ALiBi", 8192, 0), passkey("CoCA-Strict", 8192, 0),
    ],
    "as many": [passkey(model, 4096, hits) for model, hits in (("a", 4), ("b", 4), ("c", 0))],
    "none": [passkey("a", 512, 0)],
}  # fmt: skip
NEEDLES = {"found": [needles("A", 0.5)], "not found": [needles("A", 0.0)]}
# CoCA costs about 10 % at every size; its ratio falls with the square root of the size.
SIZES = [
    cell
    for size in (0.25, 1.0, 4.0)
    for model, cost, ratio in (("RoFormer", 0.0, 4.0), ("CoCA-Strict", 2.0, 2.0 * size**-0.5))
    for seed in (0, 1)
    for cell in study(model, seed, size, 20 + seed + cost, (20 + seed / 2 + cost) * ratio)
]
SEEDS = [cell | {"size": ""} for cell in SIZES if cell["size"] == "1M"]


def shares(*models: tuple[str, float, float]) -> list[dict]:
    about = SEEDS[0] | {"task": "passkey", "length": 512}
    return [
        about | {"model": model, "accuracy": share, "training_seed": seed}
        for seed in (0, 1)
        for model, *of_seed in models
        for share in of_seed[seed : seed + 1]
    ]


STUDIES = {
    "sizes": SIZES,
    "without a pair": [cell for cell in SIZES if cell["size"] != "4M"][2:],
    "without the control": [
        *(cell | {"perplexity": None} for cell in SIZES if cell["model"] == "RoFormer"),
        *(cell for cell in SIZES if cell["model"] != "RoFormer"),
    ],
    "large figures": [
        cell for size in (0.25, 1.0, 4.0) for model in ("RoFormer", "CoCA-Strict")
        for cell in study(model, 0, size, 20.0 + (model < "R") * size**2, 80.0 * size)
    ],
    "seeds": [
        *SEEDS,
        {**SEEDS[0], "scaling": "attend-last", "perplexity": 19.0},
        {**SEEDS[0], "scaling": "ntk", "factor": 4.0, "perplexity": 20.5},
        *shares(("RoFormer", 0.5, 0.75)),
    ],
    "as many": shares(("a", 1.0, 1.0), ("b", 0.5, 0.5), ("c", 1.0, 1.0)),
}  # fmt: skip
PLAIN = {"stages": [], "validation": [], "start": None}
RUNS = {
    "of several objectives": [
        training(), training("scratch", **PLAIN, curve=[{"step": 1, "loss": 5.0}])
    ],
    # In the first one, 101.5 at 2,000 tokens undid what came before.
    "recovered": [training(f"{last}", last=last) for last in (100.4, 100.9, 101.5, 99.0)],
    "from scratch": [{k: v for k, v in training().items() if k not in ("start", "stages")}],
    "none": [],
}  # fmt: skip


def seeds(cells: list[dict]) -> list[Section]:
    gather_seeds(cells)
    return study_sections(cells)


def written(section: Section) -> str:
    """A section in plain text: ** bold, ~ a muted row, () smaller lines."""
    table = []
    for number, row in enumerate([section.header, *section.rows] if section.rows else [], -1):
        cells = []
        for cell in row:
            small = f" ({cell.small})" if getattr(cell, "small", "") else ""
            cells.append(f"{'**' * getattr(cell, 'bold', False)}{cell}{small}")
        table.append("~" * (number in section.muted) + " | ".join(cells))
    where = "" if section.printed or not section.rows else " (on the page alone)"
    chart = section.chart.words() if section.chart else ""
    parts = [f"## {section.title}{where}", section.lead, section.text, chart, *table, section.note]
    return "\n".join(filter(None, parts))


def everything() -> str:
    parts = []
    for sections, cases in (
        (perplexity_sections, PERPLEXITY), (passkey_sections, PASSKEYS),
        (needle_sections, NEEDLES), (seeds, STUDIES), (training_sections, RUNS),
    ):  # fmt: skip
        for name, cells in cases.items():
            parts.append(f"# {sections.__name__}: {name}")
            parts += map(
                written, sections(read(*cells) if sections != training_sections else cells)
            )
    return "\n\n".join(parts) + "\n"


def test_sections_say_what_was_measured():
    expected = Path(__file__).with_name("sections.txt").read_text(encoding="utf-8")
    assert everything().split("\n") == expected.split("\n")


def test_paired_figures_by_hand():
    (found,) = (s for s in perplexity_sections(read(*PERPLEXITY["paired"])) if "paired" in s.title)
    (ratio,) = lines(found.chart)["c"].values()
    assert ratio == pytest.approx(math.exp(0.1 + 0.1 * 190 / 2000))
    low, high = found.chart.points[["low", "high"]].iloc[1]
    assert 1.1 < low < ratio < high < 1.13
    (copies,) = (s for s in perplexity_sections(read(*PERPLEXITY["copies"])) if "Copied" in s.title)
    for row, change in zip(copies.rows, (math.exp(-10 / 10), math.exp(3 / 90)), strict=True):
        assert row[2].startswith(f"{change - 1:+.1%}".replace("-", "−"))


def test_charts_have_the_intervals_of_the_results():
    passkeys, seeds_of = passkey_sections(read(*PROMPTS))[0], seeds(read(*SEEDS))[0]
    assert passkeys.chart.points[["low", "high"]].iloc[0].tolist() == [0.1, 0.9]
    intervals = seeds_of.chart.points[["low", "high"]].head(2)
    assert intervals.values.tolist() == [[20.0, 21.0], [80.0, 82.0]]
    # Step 0 would flatten the lines; it stands in the table.
    measured, start = lines(training_sections([training()])[0].chart).values()
    assert list(measured.values()) == [100.9, 101.5, 101.0, 100.4]
    assert list(start.values()) == [100.0, 100.0]


def test_distances_within_the_training_length_are_one_range():
    assert distance_edges(251, 512) == [0, 251]


def test_the_papers_figures_are_shown_where_they_compare_or_are_asked_for():
    other = [passkey("m", 512, 3, trained=256)]
    table, differences = paper_sections("passkey", PROMPTS, every=False)
    assert table.rows[4][1:3] == ["1.00", "1.00"]
    assert differences.rows[2][:3] == ["NTK (8)", "+0.0", "−0.05"]
    # Trained under position interpolation: Table 4.
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}
    (interpolated,) = paper_sections("passkey", [other[0] | rope], every=False)
    assert interpolated.rows[1][::6] == ["LLaMA-7B + CoCA + PI", "0.99"]
    assert paper_sections("passkey", other, every=False) == []
    assert paper_sections("passkey", other, every=True) == [table, differences, interpolated]
    assert [len(paper_sections("perplexity", PROMPTS, every=e)) for e in (False, True)] == [2, 3]


def test_the_terminal_has_the_tables_of_the_figures_alone():
    ((header, rows),) = printed_tables(PROMPTS)
    assert header == ["passkeys found at", "512", "4,096"] and len(rows) == 4
    # Early results counted what stands anywhere in an answer.
    cells = [needles("A", 0.5, "recall"), needles("B", 0.25)]
    assert {table[0][0]: table[1] for table in printed_tables(cells)} == {
        "single: recall at (prompts 1)": [["A", "0.50"]],
        "single: R-precision at (prompts 2)": [["B", "0.25"]],
    }


def test_one_seed_and_other_tasks_are_no_study():
    gather_seeds(one := [dict(cell) for cell in SEEDS[:2]])
    assert one == SEEDS[:2]
    gather_seeds(both := [dict(cell) for cell in (SEEDS[0] | {"task": "other"}, *SEEDS)])
    assert [cell["task"] for cell in both] == ["other", *["study"] * len(SEEDS)]


if __name__ == "__main__":
    print(everything(), end="")
