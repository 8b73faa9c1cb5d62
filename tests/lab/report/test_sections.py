"""What the report says of hand-made results."""

import math

import pytest
from result_cells import CELLS, lines, passkey, perplexity, read, ruler, study, training

from coca_lab.report import Section, printed_tables
from coca_lab.report.perplexity import perplexity_sections
from coca_lab.report.prompts import distance_edges, passkey_sections, ruler_sections
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
RULER = {
    # a keeps 0.45 of 0.5 at 1,024 tokens; b, 0.3 of 0.5. Only a was asked for words beyond.
    "two models": [
        *(ruler("a", kind, length, *scores) for length, kinds in {
            256: {"vt": (1.0, 1.0), "cwe": (0.8, 0.4)},
            512: {"vt": (0.5, 0.5), "cwe": (0.8, 0.2)},
            1024: {"vt": (0.5, 0.4), "cwe": (0.6, 0.3)},
            2048: {"vt": (0.0, 0.0), "cwe": (0.0, 0.0)},
        }.items() for kind, scores in kinds.items()),
        ruler("a", "fwe", 256, 1.0, 1.0),
        *(ruler("b", kind, n, *scores) for n, scores in {
            512: (0.5, 0.5), 1024: (0.4, 0.2), 2048: (0.9, 0.9)
        }.items() for kind in ("vt", "cwe")),
    ],
    "to the end": [ruler("a", "vt", n, 0.9, 1.0, trained=128) for n in (256, 512)],
    "one prompt, none found": [ruler("a", "vt", 512, 0.0)],
}  # fmt: skip
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


MAKERS = (
    (perplexity_sections, PERPLEXITY), (passkey_sections, PASSKEYS),
    (ruler_sections, RULER), (seeds, STUDIES), (training_sections, RUNS),
)  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Section]]:
    """The sections of every case, by their titles."""
    return {
        f"{make.__name__}: {name}": {
            section.title: section
            for section in make(cells if make is training_sections else read(*cells))
        }
        for make, cases in MAKERS
        for name, cells in cases.items()
    }


def text(row) -> list[str]:
    return [
        f"{entry} ({entry.small})" if getattr(entry, "small", "") else f"{entry}" for entry in row
    ]


LEADS = {  # of the first section, by hand
    "perplexity_sections: none gains from the longest window": "At 128 tokens (2 × the training "
    "context) CoCA-Slack has the lowest perplexity, 54.00.",
    "perplexity_sections: no training length": "At 64 tokens a has a perplexity of 40.00.",
    "perplexity_sections: infinite": "At 64 tokens (the training context) no model has a finite "
    "perplexity.",
    "perplexity_sections: alike as shown": "At 64 tokens (the training context) a has the lowest "
    "perplexity, 40.00.",
    "passkey_sections: forms": "At 4,096 tokens (8 × the training context) CoCA-Slack + NTK (4) "
    "finds 70% of the passkeys, the most.",
    "passkey_sections: none beyond 4,096 tokens": "At 4,096 tokens (8 × the training context) "
    "ALiBi finds 80% of the passkeys, the most.",
    "passkey_sections: as many": "At 4,096 tokens (8 × the training context) a and b find 40% of "
    "the passkeys, the most.",
    "passkey_sections: none": "No passkey was found at any length.",
    "ruler_sections: two models": "At 2,048 tokens (4 × the training context) b finds 90% of what "
    "RULER’s tasks ask for, the most.",
    "ruler_sections: one prompt, none found": "Nothing that RULER’s tasks ask for was found at any "
    "length.",
    "seeds: seeds": "Perplexity: at 4,096 tokens CoCA-Strict has 44.5, the others 81.0.",
    "seeds: as many": "Share of passkeys found: at 512 tokens a and c have 1.00, the others 0.50.",
    "training_sections: recovered": "Lowest validation perplexity at the end: 99, of 99.0.",
}  # fmt: skip


@pytest.mark.parametrize("case", LEADS)
def test_the_first_section_names_the_finding(made, case):
    assert next(iter(made[case].values())).lead == LEADS[case]


def test_far_text_helps_where_its_perplexity_is_below_that_of_the_last_tokens(made):
    title = "Perplexity against the length read at once"
    none, one = (made[f"perplexity_sections: {name}"][title].text for name in list(PERPLEXITY)[:2])
    assert none.endswith("of no model is lower than with its last tokens alone.")
    assert one.startswith("At 128 tokens the perplexity of CoCA-Slack is lower")
    assert made["perplexity_sections: infinite"][title].text == ""


def test_tables_by_hand(made):
    """A row of every kind of table."""
    keys = made["passkey_sections: forms"]
    found = keys["Passkeys found, by prompt length"]
    assert text(found.header) == ["passkeys found at", "512 (1 ×)", "4,096 (8 ×)"]
    assert text(found.rows[2]) == ["CoCA-Slack + NTK (4)", "–", "0.70 (7 of 10; 0.10–0.90)"]
    away = keys["Passkeys found, by distance"]
    assert text(away.header)[1:3] == ["1 to 512", "513 to 1,024"]
    assert text(away.rows[0])[1] == "0.82 (9/11; 0.52–0.95)"
    forms = keys["Strict minus slack: passkeys found"]
    assert text(forms.rows[1]) == ["CoCA-Strict, no scaling", "–", "−0.30"]
    ((ranges,),) = [
        [table]
        for name, table in made["perplexity_sections: positions"].items()
        if "window" in name
    ][-1:]
    assert ranges.header[0] == "tokens read before" and not ranges.printed
    sizes = made["seeds: sizes"]
    cost, far, *_ = sizes.values()
    assert text(cost.rows[0])[:2] == ["CoCA-Strict", "1.098 (1.095 to 1.100)"]
    # The ratio falls with the square root of the size, from 1 at 4M: 0.989 √(4 / 350).
    assert far.rows[1][4].text == "-0.500" and far.rows[1][5].text == "0.106"
    assert text(made["seeds: seeds"]["Perplexity"].rows[0])[2] == "81.0 (80.0 to 82.0)"
    assert made["seeds: seeds"]["Perplexity"].muted == [2]
    assert "RoFormer" not in str(made["seeds: without the control"]["Perplexity, 1M"].rows)


def test_rulers_tasks_by_hand(made):
    """Means over the tasks that all models have, and the length that keeps 85 % of the score."""
    table = made["ruler_sections: two models"]["RULER"]
    assert text(table.header) == [
        "mean of 2 tasks at", "256 (0.5 ×)", "512 (1 ×)", "1,024 (2 ×)", "2,048 (4 ×)",
        "keeps 85% up to",
    ]  # fmt: skip
    rows = {row[0]: text(row[1:]) for row in table.rows}
    assert [*rows] == ["a", "b", "a: vt", "b: vt", "a: cwe", "b: cwe"]
    # 1.0, 1.0, 0.8 and 0.4: the mean is 0.8, and Wilson's interval that of four prompts.
    assert rows["a"][0] == "0.80 (0.34–0.97)" and [x[:4] for x in rows["a"][1:4]] == [
        "0.50", "0.45", "0.00"
    ]  # fmt: skip
    assert rows["a"][4] == "1,024"  # 0.45 of 0.5 is 90 %, 0.0 is not
    assert rows["b"][0] == "–" and rows["b"][4] == "512"  # 0.3, whatever comes behind
    assert rows["a: cwe"] == ["0.60 (0.13–0.94)", "0.50 (0.09–0.91)", "0.45 (0.08–0.89)",
                              "0.00 (0.00–0.66)", ""]  # fmt: skip
    assert made["ruler_sections: to the end"]["RULER"].rows[0][-1] == "≥ 512"
    assert made["ruler_sections: one prompt, none found"]["RULER"].rows[0][-1] == "–"


def test_training_says_when_a_run_has_recovered(made):
    """101.5 at 2,000 tokens undid what came before."""
    title = "Validation perplexity in training"
    rows = [row[3:] for row in made["training_sections: recovered"][title].rows]
    assert rows == [
        ["100.40", "+0.40%", "3,000", "4,000"], ["100.90", "+0.90%", "3,000", "never"],
        ["101.50", "+1.50%", "never", "never"], ["99.00", "−1.00%", "3,000", "4,000"],
    ]  # fmt: skip
    scratch = made["training_sections: from scratch"][title]
    assert scratch.rows == [["converted", "–", "300.00", "100.40", "–", "–", "–"]]
    assert made["training_sections: none"] == {}
    kinds = ["Training", "Training: logits", "Training: attention", "Runs"]
    assert [*made["training_sections: of several objectives"]][1:] == kinds


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
    # Prompts around another text are not compared.
    cells = [
        ruler("A", "vt", 512, 0.5) | {"filler": "x"},
        ruler("B", "vt", 512, 1.0) | {"filler": "y"},
    ]
    assert [table[0][0] for table in printed_tables(cells)] == [
        "mean of 1 task at (prompts 1)", "mean of 1 task at (prompts 2)",
    ]  # fmt: skip


def test_one_seed_and_other_tasks_are_no_study():
    gather_seeds(one := [dict(cell) for cell in SEEDS[:2]])
    assert one == SEEDS[:2]
    gather_seeds(both := [dict(cell) for cell in (SEEDS[0] | {"task": "other"}, *SEEDS)])
    assert [cell["task"] for cell in both] == ["other", *["study"] * len(SEEDS)]
