"""What the report says of hand-made results."""

import math
from dataclasses import replace

import pytest
from result_cells import CELLS, lines, passkey, perplexity, ruler, shown, study, training

from coca_lab.evaluation.prompts import RULER_TASK, RulerSettings
from coca_lab.evaluation.task import Model, evaluate
from coca_lab.intervals import DocumentScore
from coca_lab.report import build_report, page, printed_tables
from coca_lab.report.lengths import paired_difference
from coca_lab.report.result_files import paper_figures
from coca_lab.report.section import Section
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


def test_a_table_has_figures_intervals_and_conditions_by_hand():
    keys = shown(*PROMPTS)["Passkeys found, by prompt length"]
    assert text(keys.header) == ["share of passkeys found at", "512 (1 L)", "4,096 (8 L)"]
    assert text(keys.rows[2]) == ["CoCA-Slack + NTK to 4 L", "–", "70% (10% to 90%)"]
    assert keys.rows[2][2].bold and not keys.rows[1][2].bold
    none = shown(*({**each, "accuracy": 0.0} for each in PROMPTS))
    entries = [cell for row in none["Passkeys found, by prompt length"].rows for cell in row]
    assert not any(getattr(cell, "bold", False) for cell in entries)
    note = "Small: Wilson’s 95% intervals. Prompts: 10 each. Depths: random. "
    assert keys.note == f"{note}L: the training context, 512 tokens."
    assert keys.chart.points[["low", "high"]].iloc[0].tolist() == [0.1, 0.9]
    assert shown(*CELLS)[BY_LENGTH].note == (
        "Documents: 1, too few for intervals. Tokens scored at a "
        "length: 1,000. Stride: 64. Targets: shared. L: the training context, 64 tokens."
    )
    many = perplexity("a", 64, 2.0, documents=scored(*range(10)))
    assert "(10)" in shown(many)[BY_LENGTH].note
    twice = shown(*CELLS, {**CELLS[2], "seconds": 3.0})[BY_LENGTH]
    assert len(twice.rows) == 4
    infinite = shown(perplexity("a", 64, 2.0, perplexity=None, ci95=None))[BY_LENGTH]
    assert text(infinite.rows[0]) == ["a", "inf"]


def test_passkeys_at_depths_in_turn_and_at_random_ones_are_never_shown_together(tmp_path):
    """Also at other lengths, where no prompt says so; and in one file."""
    cells = [passkey("a", 512, 9), passkey("a", 1024, 9) | {"depths": 5}]
    for one, other in (cells, [cells[0], cells[1] | {"model": "b"}]):
        first, second = shown(one, other).values()
        assert [str(name) for name in first.header[1:]] == ["512"]
        assert [str(name) for name in second.header[1:]] == ["1,024"]
        assert "Depths: random." in first.note and "Depths: 5 in turn." in second.note
    old = cells[0].copy()
    del old["depths"]  # an old file does not say it
    assert len(shown(old, cells[1] | {"model": "b"})) == 1


def test_positions_and_copies_are_lines_of_their_own():
    place = shown(positions("a", 8.0, None), positions("b", 8.0, 8.0, 8.0, 8.0))
    drawn = lines(place["Perplexity, by position, window 8"].chart)
    assert drawn == {"a": {4: pytest.approx(math.exp(2)), 8: math.inf},
                     "b": {n: pytest.approx(math.exp(2)) for n in (2, 4, 6, 8)}}  # fmt: skip
    cells = [repeated(64, 20, 300), repeated(256, 20, 300), repeated(64, 30, 297, "attend-last")]
    copies = shown(*cells)
    far, rest = [section for title, section in copies.items() if "4-grams" in title]
    assert lines(far.chart)["Roles"] == dict.fromkeys((64, 256), pytest.approx(math.exp(2)))
    last = sum(297 + i for i in range(20)) / 1800
    alone = lines(rest.chart)["Roles, the last 64 tokens alone"]
    assert alone == dict.fromkeys((64, 256), pytest.approx(math.exp(last)))


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
    answers = "coca_lab.evaluation.prompts.greedy_answers"
    monkeypatch.setattr(answers, lambda module, tokenizer, ids, **_: ["0"] * len(ids))
    kinds = ["niah_single_1", "niah_multikey_1", "vt", "cwe", "fwe"]
    settings = RulerSettings(source=str(text_folder), kinds=kinds, lengths=[2500], samples=1)
    cells = evaluate(RULER_TASK, Model(tiny_model("rope"), tokenizer), settings)
    cells += [{**cell, "model": "another"} for cell in cells]
    (title, (mean, *_, kept), _), *others = printed_tables(cells)
    assert kept == "keeps 85% up to" and not any(kept in header for _, header, _ in others)
    assert (title, mean) == ("RULER", "mean RULER score of 5 tasks at")
    assert [title for title, _, _ in others] == [f"RULER, {kind}" for kind in kinds]
    assert " groups, each of other texts" not in build_report([{"results": cells}])


def test_seeds_and_sizes_by_hand():
    one = shown(*SEEDS, {**SEEDS[0], "scaling": "attend-last", "perplexity": 19.0})[BY_LENGTH]
    assert text(one.rows[0])[2] == "80.99 (80.00 to 82.00)"
    assert one.chart.points[["low", "high"]].head(2).values.tolist() == [[20, 21], [80, 82]]
    assert one.note.startswith("Geometric means of 2 training seeds where there are several;")
    assert [*shown(*SIZES)] == [f"{BY_LENGTH}, {n}M" for n in (0.25, 1, 4)]


def test_runs_are_rows_of_a_table():
    runs = [training(), training("scratch", start=None, validation=[], seconds=1234.5)]
    (section,) = shown(runs=runs).values()
    assert section.chart is None
    names = ["run", "parameters", "steps", "tokens", "last loss", "perplexity", "seconds"]
    assert section.header == names
    assert [text(row) for row in section.rows] == [
        ["converted", "12,345", "40", "4,000", "0.1", "100.4 (100.0, base)", "–"],
        ["scratch", "12,345", "40", "4,000", "0.1", "–", "1,234"],
    ]


def test_paired_figures_by_hand():
    """c is harder by a constant and by what differs between documents; d differs by noise alone."""
    cells = [paired("a", 0.0), paired("b", -0.1), paired("c", 0.0, spread=0.1)]
    alike = [100 * (3 + i % 4 - 0.1) + (-1) ** i for i in range(20)]
    cells.append(perplexity("d", 64, 36.5, documents=scored(*alike)))
    rounded = [100 * (3 + i % 4 - 0.1) + (-1) ** i * 1e-4 for i in range(20)]
    cells.append(perplexity("e", 64, 36.6, documents=scored(*rounded)))
    section = shown(*cells)[BY_LENGTH]
    assert section.header[-1] == "against b at 64" and section.chart is None
    shorter = perplexity("a", 32, 50.0, documents=cells[0]["documents"])
    assert not shown(*cells, shorter)[BY_LENGTH].chart.bars
    last = {row[0]: row[-1] for row in section.rows}
    assert last["b"] == "" and text([last["a"]]) == ["1.105 × (1.105 to 1.105)"]
    ratio, interval = str(last["c"]), last["c"].small
    assert ratio == f"{math.exp(0.1 + 0.1 * 190 / 2000):.3f} ×"
    low, high = map(float, interval.split(" to "))
    assert 1.1 < low < float(ratio[:-2]) < high < 1.13
    assert str(last["d"]) == "1.000 ×, no difference shown"
    assert "those that have 1 show no difference." in section.note
    assert text([last["e"]]) == ["the same (1.000 to 1.000)"]
    # What is read of other documents, or by several seeds, is not paired.
    assert len(shown(*cells[:1])[BY_LENGTH].header) == 2
    assert len(shown(*SEEDS)[BY_LENGTH].header) == 3


def test_needles_are_compared_by_differences_of_nats_by_hand():
    def cell(model, nats):
        documents = [
            {"id": i, "needles": [{"distance": 9, "nats": 7 * (each + i), "found": each < 1}]}
            for i, each in enumerate(nats)
        ]
        mean = sum(each + i for i, each in enumerate(nats)) / len(nats)
        about = {"task": "needles", "model": model, "length": 64, "digits": 7, "text": "x"}
        counts = {"found": sum(each < 1 for each in nats), "needles": len(nats)}
        return about | counts | {"nats": mean, "documents": documents}

    near, found = shown(cell("a", [1.0, 1.0, 1.0]), cell("b", [0.5, 0.6, 0.4])).values()
    (a, b) = near.rows
    assert near.note.startswith("Small: 95% intervals over documents (3, fewer than 10: rough).")
    assert near.header[0] == "nats a digit (probability) at"
    # exp(-2.00) and exp(-1.50)
    assert [str(a[1]), str(b[1])] == ["2.00 (14%)", "1.50 (22%)"]
    assert str(a[2]) == "0.500 more" and b[2] == ""
    assert found.rows == [["a", "", "14%, 0 of 3"], ["b", "", "22%, 3 of 3"]]
    assert [near.is_printed, found.is_printed] == [False, True]
    # Against the best of b, rounding below and above 0 is the same.
    same = cell("c", [0.5 + 1e-5, 0.6 - 1e-5, 0.4])
    alone = cell("a", [1.0, 1.0, 1.0]) | {"scaling": "last 8,192 tokens alone"}
    (near, _) = shown(cell("b", [0.5, 0.6, 0.4]), same, alone).values()
    (b, c, a) = near.rows
    assert (b[2], text(c[2:])) == ("", ["the same (0.000 to 0.000 more)"])
    assert a[0] == "a, the last 8,192 tokens alone"


@pytest.mark.parametrize(
    ("nats", "said"),
    [
        ([-0.6, -0.7, -0.5], "0.600 fewer (0.904 to 0.296 fewer)"),
        ([0.6, 0.7, 0.5], "0.600 more (0.296 to 0.904 more)"),
        ([0.0, 0.1, -0.4], "0.100 fewer, no difference shown (0.905 fewer to 0.705 more)"),
    ],
)
def test_differences_of_nats_are_more_or_fewer(nats, said):
    mine = [DocumentScore(str(i), each, 1) for i, each in enumerate(nats)]
    theirs = [DocumentScore(str(i), 0.0, 1) for i in range(len(nats))]
    assert text([paired_difference(mine, theirs, ratios=False)]) == [said]


def test_two_documents_have_no_interval():
    """Theirs went from 0.24 to 2,966.5."""
    cells = [
        perplexity(model, 64, 40.0, documents=scored(nats, nats + 80))
        for model, nats in (("a", 300), ("b", 330))
    ]
    section = shown(*cells)[BY_LENGTH]
    assert [text(row) for row in section.rows] == [
        ["a", "40.00 (too few documents)", ""],
        ["b", "40.00 (too few documents)", "1.350 × (too few documents)"],
    ]
    assert section.note.startswith("Documents: 2, too few for intervals.")


def test_labels_round_multiples_and_name_a_length_once():
    about = {"factor": 16376 / 8192, "training_length": 8192}
    cells = [
        perplexity("a", 64, 40.0, **about | {"scaling": scaling})
        for scaling in ("yarn (length=8192)", "limited (length=8192, near=64)", "ntk (length=4096)")
    ]
    assert [row[0] for row in shown(*cells)[BY_LENGTH].rows] == [
        "a + YaRN to 2 L",
        "a + limited (near=64) to 2 L",
        "a + NTK (length=4096) to 2 L",
    ]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([1, 1], "Documents: 1, too few for intervals."),
        ([1, 2], "Documents: 1 to 2, too few for intervals."),
        ([12, 12], "Small: 95% intervals over documents (12)."),
        ([3, 12], "Small: 95% intervals over documents (3 to 12, fewer than 10: rough)."),
        ([1, 12], "Small: 95% intervals over documents (12); figures of fewer than 3 have none."),
    ],
)
def test_the_note_says_which_figures_have_intervals(counts, said):
    """A page of eight documents said "One document" since one of its lines had but one."""
    needle = {"distance": 9, "nats": 0.7, "found": True}
    about = {"task": "needles", "model": "a", "digits": 7, "text": "x", "nats": 0.1}
    cells = [
        about
        | {"length": length, "found": count, "needles": count}
        | {"documents": [{"id": i, "needles": [needle]} for i in range(count)]}
        for length, count in zip((64, 128), counts, strict=True)
    ]
    nats, _ = shown(*cells).values()
    assert nats.note.startswith(said)


def test_needles_have_no_nats_below_zero():
    """Student's interval of few documents reaches there."""
    needles = {"distance": 9, "nats": 0.7, "found": True}
    about = {"task": "needles", "model": "a", "length": 64, "digits": 7, "text": "x"}
    cell = {"nats": 0.1, "ci95": [-0.5, 0.7], "found": 3, "needles": 3}
    documents = [{"id": i, "needles": [needles]} for i in range(3)]
    nats, _ = shown(about | cell | {"documents": documents}).values()
    assert text(nats.rows[0]) == ["a", "0.10 (90%) (0.00 to 0.70)"]


def test_only_columns_of_words_begin_on_the_left(undrawn):
    """A column of figures did that began with "the same" or NaN, and one of words that began empty
    had its head on the right."""
    words = Section("T", header=["a", "b"], rows=[["x", "yes"], ["y", ""]], has_words=True)
    for section, classes in ((words, 3), (replace(words, has_words=False), 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page, "page_sections", lambda *_, one=section: [one])
            assert build_report([{"results": PROMPTS}]).count(" class=words") == classes


def test_all_tables_of_the_paper_are_shown_beside_others_if_asked_for(undrawn):
    content = [{"results": PROMPTS}]
    assert "Paper’s" not in build_report(content)
    page = build_report([*content, *paper_figures()])
    for expected in (
        "Paper’s CoCA-Slack + dynamic NTK", "3,276.0", "Paper’s LLaMA-7B + CoCA", "9,673.1",
        # Strict is 18.25 below slack's 89.31 in Table 3, and 0.12 below 0.99.
        "Paper’s CoCA-Strict + NTK to 4 L", "71.06", "87%", "Paper’s LLaMA-7B + CoCA + PI",
        "7 billion parameters, converted; 100 prompts each.",
    ):  # fmt: skip
        assert expected in page, expected
    assert {f"the paper’s Table {n}" in page for n in (1, 2, 3, 4)} == {True}


def test_the_terminal_has_the_tables_of_the_figures_alone():
    ((title, header, rows),) = printed_tables(PROMPTS)
    assert title == "Passkeys found, by prompt length"
    assert header == ["share of passkeys found at", "512", "4,096"] and len(rows) == 4
    # Prompts around another text are not compared.
    cells = [
        ruler("A", "vt", 512, 0.5) | {"filler": "x"},
        ruler("B", "vt", 512, 1.0) | {"filler": "y"},
    ]
    assert [(title, header[0]) for title, header, _ in printed_tables(cells)] == [
        ("RULER, vt (texts 1 of 2)", "RULER score of vt at"),
        ("RULER, vt (texts 2 of 2)", "RULER score of vt at"),
    ]


@pytest.mark.parametrize(
    ("length", "multiple"), [(128, "0.016 L"), (12_288, "1.5 L"), (8192 * 2048, "2,048 L")]
)
def test_lengths_are_multiples_of_the_training_length(length, multiple):
    cells = [passkey("a", length, 2, trained=8192)]
    section = shown(*cells)["Passkeys found, by prompt length"]
    assert text(section.header)[1] == f"{length:,} ({multiple})"
    assert section.note.endswith("L: the training context, 8,192 tokens.")
