"""What the report says of hand-made results."""

import math

import pytest
from result_cells import CELLS, lines, passkey, perplexity, ruler, shown, study, training

from coca_lab.evaluation.retrieval import RULER_TASK, RulerSettings
from coca_lab.evaluation.task import Model, evaluate
from coca_lab.report import build_report, printed_tables
from coca_lab.report.section import times
from conftest import tiny_model

BY_LENGTH = "Perplexity against the length read at once"
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


def text(row) -> list[str]:
    return [
        f"{entry} ({entry.small})" if getattr(entry, "small", "") else f"{entry}" for entry in row
    ]


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (7.8125, "7.8"), (0.78125, "0.78"), (0.125, "0.125"), (1, "1"), (2.5, "2.5"),
        (62.5, "62.5"), (15.625, "16"), (156.25, "156"), (1000, "1,000"), (1024, "1,024"),
    ],
)  # fmt: skip
def test_multiples_are_rounded_as_one_says_them(ratio, said):
    assert times(ratio) == said


@pytest.mark.parametrize(
    ("cells", "lead"),
    [
        (CELLS, "At 128 tokens (2 × the training context) CoCA-Slack has the lowest perplexity, "
         "54.00; the others 60.00 to 90.00."),
        ([perplexity("a", 64, 40.0, training_length=None)],
         "At 64 tokens a has a perplexity of 40.00."),
        ([perplexity("a", 64, 2.0, perplexity=None, ci95=None)],
         "No model has a finite perplexity."),
        ([perplexity("a", 64, 40.001), perplexity("b", 64, 40.0)],
         "At 64 tokens (the training context) all have a perplexity of 40.00."),
        (PROMPTS, "At 4,096 tokens (8 × the training context) CoCA-Slack + NTK (4) has the highest "
         "share of passkeys found, 70%; the others 20% to 50%."),
        ([*PROMPTS, passkey("ALiBi", 4096, 8), passkey("ALiBi", 8192, 0)],
         "At 4,096 tokens (8 × the training context) ALiBi has the highest share of passkeys "
         "found, 80%; the others 20% to 70%."),
        ([passkey(model, 4096, hits) for model, hits in (("a", 4), ("b", 4), ("c", 0))],
         "At 4,096 tokens (8 × the training context) a and b have the highest share of passkeys "
         "found, 40%; the other 0%."),
        ([passkey("a", 512, 0)],
         "At 512 tokens (the training context) a has a share of passkeys found of 0%."),
        ([passkey("a", 4000, 3)],
         "At 4,000 tokens (7.8 × the training context) a has a share of passkeys found of 30%."),
        ([perplexity(model, 64, value, documents=scored(*nats)) for model, value, nats in (
            ("a", 40.0, (10, 12, 11)), ("b", 41.0, (10.3, 11.8, 11.2)), ("c", 80.0, (20, 22, 21)))],
         "At 64 tokens (the training context) a and b are level, perplexity 40.00 and 41.00; the "
         "other 80.00."),
        (SEEDS, "At 4,096 tokens (16 × the training context) CoCA-Strict has the lowest "
         "perplexity, 44.50; the other 81.00."),
    ],
)  # fmt: skip
def test_the_first_section_names_the_finding(cells, lead):
    assert next(iter(shown(*cells).values())).lead == lead


def test_far_text_helps_where_its_perplexity_is_below_that_of_the_last_tokens():
    none = shown(*CELLS)[BY_LENGTH].text
    assert none.endswith("of no model is lower than with its last tokens alone.")
    one = shown(*CELLS, perplexity("CoCA-Slack", 64, 60.0, "attend-last"))[BY_LENGTH].text
    assert one.startswith("At 128 tokens the perplexity of CoCA-Slack is lower")
    infinite = perplexity("a", 64, 2.0, perplexity=None, ci95=None)
    assert shown(infinite)[BY_LENGTH].text == ""


def test_a_table_has_figures_intervals_and_conditions_by_hand():
    keys = shown(*PROMPTS)["Passkeys found, by prompt length"]
    assert text(keys.header) == ["share of passkeys found at", "512 (1 ×)", "4,096 (8 ×)"]
    assert text(keys.rows[2]) == ["CoCA-Slack + NTK (4)", "–", "70% (10% to 90%)"]
    assert keys.rows[2][2].bold and not keys.rows[1][2].bold
    assert "10 prompts each" in keys.note
    assert keys.chart.points[["low", "high"]].iloc[0].tolist() == [0.1, 0.9]
    note = shown(*CELLS)[BY_LENGTH].note
    assert "(1, fewer than 10: intervals are rough)" in note and "stride: 64" in note
    assert (
        "rough" not in shown(perplexity("a", 64, 2.0, documents=scored(*range(10))))[BY_LENGTH].note
    )
    twice = shown(*CELLS, {**CELLS[2], "seconds": 3.0})[BY_LENGTH]
    assert twice.muted == [2] and len(twice.rows) == 4


def test_passkeys_by_distance_by_hand():
    away = shown(*PROMPTS)["Passkeys found, by distance"]
    # 257 to 512 tokens before the end: five hits of 512 tokens, and the last miss of 4,096.
    first = dict(zip(map(str, away.header), text(away.rows[0]), strict=True))
    assert first["512"].startswith("83% (") and not away.printed


def test_positions_and_copies_are_lines_of_their_own():
    place = shown(positions("a", 8.0, None), positions("b", 8.0, 8.0, 8.0, 8.0))
    drawn = lines(place["Perplexity, by position, window 8"].chart)
    assert drawn == {"a": {4: pytest.approx(math.exp(2)), 8: math.inf},
                     "b": {n: pytest.approx(math.exp(2)) for n in (2, 4, 6, 8)}}  # fmt: skip
    copies = shown(repeated(256, 20, 300), repeated(64, 30, 297, "attend-last"))
    far, rest = [section for title, section in copies.items() if "4-grams" in title]
    assert lines(far.chart)["Roles"] == {256: pytest.approx(math.exp(2))}
    last = sum(297 + i for i in range(20)) / 1800
    assert lines(rest.chart)["Roles, last 64 tokens only"] == {256: pytest.approx(math.exp(last))}


def test_rulers_tasks_by_hand():
    """Means over the tasks that all models have."""
    made = shown(*RULER["two models"])
    rows = {row[0]: text(row[1:]) for row in made["RULER"].rows}
    # 1.0, 1.0, 0.8 and 0.4: the mean is 0.8, and Wilson's interval that of four prompts.
    assert rows["a"] == ["80% (34% to 97%)", "50% (15% to 85%)", "45% (13% to 82%)",
                         "0% (0% to 49%)", "1,024"]  # fmt: skip
    assert rows["b"][0] == "–" and rows["b"][4] == "512"  # 0.3 of 0.5, whatever comes behind
    cwe = made["RULER, cwe"].rows[0]
    assert text(cwe)[:2] == ["a", "60% (13% to 94%)"]
    assert shown(*RULER["to the end"])["RULER, vt"].rows[0][-1] == "≥ 512"
    assert shown(*RULER["one prompt, none found"])["RULER, vt"].rows[0][-1] == "–"


def test_all_of_rulers_tasks_are_one_group(tokenizer, text_folder, monkeypatch, undrawn):
    """As they are evaluated: answers of 128, 30, 120 and 50 tokens, each around its own text."""
    answers = "coca_lab.evaluation.retrieval.greedy_answers"
    monkeypatch.setattr(answers, lambda module, tokenizer, ids, **_: ["0"] * len(ids))
    kinds = ["niah_single_1", "niah_multikey_1", "vt", "cwe", "fwe"]
    settings = RulerSettings(source=str(text_folder), kinds=kinds, lengths=[2500], samples=1)
    cells = evaluate(RULER_TASK, Model(tiny_model("rope"), tokenizer), settings)
    cells += [{**cell, "model": "another"} for cell in cells]
    (mean, *_, kept), *others = [header for header, _ in printed_tables(cells)]
    assert kept == "keeps 85% up to" and not any(kept in header for header in others)
    assert mean == "mean RULER score of 5 tasks at"
    assert [header[0] for header in others] == [f"RULER score at (RULER, {kind})" for kind in kinds]
    assert "groups of results" not in build_report([{"results": cells}])


def test_seeds_and_sizes_by_hand():
    one = shown(*SEEDS, {**SEEDS[0], "scaling": "attend-last", "perplexity": 19.0})["Perplexity"]
    assert text(one.rows[0])[2] == "81.00 (80.00 to 82.00)" and one.muted == [1]
    assert one.chart.points[["low", "high"]].head(2).values.tolist() == [[20, 21], [80, 82]]
    assert one.note == "Small: ranges of the 1 to 2 seeds of each mean."
    cost, far, *by_size = shown(*SIZES).values()
    assert text(cost.rows[0])[:2] == ["CoCA-Strict", "1.098 (1.095 to 1.100)"]
    # The ratio falls with the square root of the size, from 1 at 4M: 0.989 √(4 / 350).
    assert far.rows[1][4].text == "-0.500" and far.rows[1][5].text == "0.106"
    assert [section.title for section in by_size] == [f"Perplexity, {n}M" for n in (0.25, 1, 4)]
    unpaired = shown(*[cell for cell in SIZES if cell["size"] != "4M"][2:])
    assert any("by size" in title for title in unpaired)


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


def test_training_says_when_a_run_has_recovered():
    """101.5 at 2,000 tokens undid what came before."""
    title = "Validation perplexity in training"
    rows = [row[3:] for row in shown(runs=RUNS["recovered"])[title].rows]
    assert rows == [
        ["100.40", "+0.40%", "3,000", "4,000"], ["100.90", "+0.90%", "3,000", "never"],
        ["101.50", "+1.50%", "never", "never"], ["99.00", "−1.00%", "3,000", "4,000"],
    ]  # fmt: skip
    scratch = shown(runs=RUNS["from scratch"])[title]
    assert scratch.rows == [["converted", "–", "300.00", "100.40", "–", "–", "–"]]
    (drawn,) = (shown(runs=[training()])[title].chart,)
    measured, start = lines(drawn).values()
    # Step 0 would flatten the lines; it stands in the table.
    assert list(measured.values()) == [100.9, 101.5, 101.0, 100.4]
    assert list(start.values()) == [100.0, 100.0]
    kinds = ["Training", "Training: logits", "Training: attention", "Runs"]
    assert [*shown(runs=RUNS["of several objectives"])][1:] == kinds


def test_paired_figures_by_hand():
    cells = [paired("a", 0.0), paired("b", -0.1), paired("c", 0.0, spread=0.1)]
    found = shown(*cells)["Perplexity: paired differences"]
    (ratio,) = lines(found.chart)["c"].values()
    assert ratio == pytest.approx(math.exp(0.1 + 0.1 * 190 / 2000))
    low, high = found.chart.points[["low", "high"]].iloc[1]
    assert 1.1 < low < ratio < high < 1.13


def test_all_tables_of_the_paper_are_shown_beside_others_if_asked_for(undrawn):
    content = [{"results": PROMPTS}]
    assert "Paper’s" not in build_report(content)
    page = build_report(content, paper=True)
    for expected in (
        "Paper’s CoCA-Slack + dynamic NTK", "3,276.0", "Paper’s LLaMA-7B + CoCA", "9,673.1",
        # Strict is 18.25 below slack's 89.31 in Table 3, and 0.12 below 0.99.
        "Paper’s CoCA-Strict + NTK (4)", "71.06", "87%", "Paper’s LLaMA-7B + CoCA + PI",
        "7 billion parameters, converted; 100 prompts each.",
    ):  # fmt: skip
        assert expected in page, expected
    assert {f"the paper’s Table {n}" in page for n in (1, 2, 3, 4)} == {True}


def test_the_terminal_has_the_tables_of_the_figures_alone():
    ((header, rows),) = printed_tables(PROMPTS)
    assert header == ["share of passkeys found at", "512", "4,096"] and len(rows) == 4
    # Prompts around another text are not compared.
    cells = [
        ruler("A", "vt", 512, 0.5) | {"filler": "x"},
        ruler("B", "vt", 512, 1.0) | {"filler": "y"},
    ]
    assert [table[0][0] for table in printed_tables(cells)] == [
        "RULER score of vt at (group 1)", "RULER score of vt at (group 2)",
    ]  # fmt: skip
