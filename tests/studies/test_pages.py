"""The published pages have the tables that their commands write from the committed results."""

import copy
import json
import math
import operator
import re
import runpy
import shutil
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import pytest

from coca_attention.errors import UserError
from coca_lab.evaluation.check import check_of_cells
from coca_lab.evaluation.needles import figures, scores_of
from coca_lab.evaluation.task import Model
from coca_lab.files import read_json
from coca_lab.intervals import DocumentScore, differences, mean_interval, mean_nats, nats_interval
from coca_lab.report import printed_tables, read_results
from coca_lab.report.result_files import parsed
from coca_lab.settings.commands import CheckSettings
from coca_lab.settings.studies import MethodSettings
from coca_lab.studies import load_study
from studies import native, pages
from studies.pages import BEGIN, END, write_tables

ROOT = Path(__file__).parents[2]
L, TO, ALONE = 8192, 12288, "last 8,192 tokens alone"
"""Tokens that SmolLM2-135M was made for, and those that it reads in results/extend."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    "module",
    ["extension", "native", "recall.tables", "retrieval", "smollm2.table", "verdict.rule"],
)
def test_a_page_has_the_tables_of_its_results(module, tmp_path, monkeypatch):
    folder = Path("results", module.split(".")[0])
    shutil.copytree(ROOT / folder, tmp_path / folder)
    page = tmp_path / folder / "README.md"
    published = page.read_text(encoding="utf-8")
    emptied = re.sub(r"(<!-- \w+ -->\n).*?(\n<!-- end)", r"\1old\2", published, flags=re.DOTALL)
    page.write_text(emptied, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [module])
    runpy.run_module(f"studies.{module}", run_name="__main__")
    assert page.read_text(encoding="utf-8") == published != emptied


def test_what_was_not_measured_is_no_perplexity_of_1():
    path = min((ROOT / "results/native/trials").glob("decay-*.json"))
    one = json.loads(path.read_text(encoding="utf-8"))
    other, without = copy.deepcopy(one), copy.deepcopy(one)
    for cell in other["measured"][native.TRAINED]["text"]:
        cell["nats"] = [1.01 * nats for nats in cell["nats"]]
    cells = without["measured"][native.TRAINED]["text"]
    cells[:] = [cell for cell in cells if cell["window"] != native.LENGTH]
    nats = native.log_perplexity(one["measured"][native.TRAINED], 4096, native.LENGTH)
    change = f"{100 * math.expm1(nats / 100):+.1f} %"
    assert native._difference([(other, one)], native.LENGTH) == change
    assert native._difference([(other, one), (one, without)], native.LENGTH) == (
        f"{change} (1 of 2 seeds)"
    )
    assert native._difference([(one, without)], native.LENGTH) == ""
    trials = {"decay": [one, {**without, "seed": 7}]}
    header, row, *_ = native.arms_table(trials)
    assert row[header.index("perplexity 256")] == f"{math.exp(nats):.2f} (1 of 2 seeds)"


def up_to_and_beyond(documents):
    """How many needles there are up to L back and farther, nats a digit, and how many are found."""
    parts = [figures(documents, near=L, beyond=far) for far in (False, True)]
    counts, nats, found = ([part[name] for part in parts] for name in ("needles", "nats", "found"))
    return counts, nats, [*map(str, found)]


def read_at_the_end(perplexity, method):
    """Perplexity of the last tokens of 12,288, of the last 8,192 alone for `ALONE`."""
    place = ("attend-last", 8192) if method == ALONE else (method, 12288)
    return f"{math.exp(mean_nats(perplexity[place])):.2f}"


def test_the_tables_of_the_check_of_three_books_are_of_its_values():
    folder = ROOT / "results/extend/earlier"
    perplexity, needles = defaultdict(list), defaultdict(list)
    for line in (folder / "check.ndjson").read_text("utf-8").splitlines():
        entry = json.loads(line)
        (task, *_), what = entry["key"]
        if task == "perplexity":
            place = what[0]["scaled"]["scaling"], what[0]["window"][0]
            for document, nats, tokens in entry["value"]["documents"]:
                perplexity[place].append(DocumentScore(str(document), nats, tokens))
        elif what[1] == TO:
            needles[what[0]["scaling"]].append({"id": what[2], "needles": entry["value"]})
    for cell in read_json(folder / "last.json")["results"]:
        if cell["scaling"] == ALONE:
            needles[ALONE] = cell["documents"]
    names = {
        "as it is": "none", "YaRN": "yarn", "dynamic NTK": "dynamic", "NTK": "ntk",
        "limited distances": "limited", "leaky distances": "leaky",
        "STRING without its factor": "shifted", "the last 8,192 alone": ALONE,
    }  # fmt: skip
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name, method in names.items():
        counts, nats, found = up_to_and_beyond(needles[method])
        assert counts == [20, 10]
        shown = [f"{value:.2f}" for value in nats]
        read = read_at_the_end(perplexity, method)
        assert cells_of_row(page, name, after="## Three books")[1:] == [read, *shown, *found]


def test_the_tables_of_the_check_of_eight_books_are_of_its_values():
    """README's, and that of results/extend; and the record of the check is of its cells."""
    folder = ROOT / "results/extend"
    (content,) = read_results([folder])  # as coca report does
    assert content["file"] == str(folder / "results.json")
    (file,) = parsed([content])
    compared = [MethodSettings(name) for name in ("limited", "ntk", "yarn", "leaky", "shifted")]
    settings = CheckSettings(check="books.jsonl")
    found = check_of_cells(Model(None, None), compared, settings, content["results"], length=L)
    assert file.check.readings == found.readings and file.check.training_length == L
    decision = " ".join([found.choice.reason, *found.choice.warnings])
    assert file.check.decision == decision
    readings = {each.method: each for each in found.readings}
    needles = {
        cell["scaling"]: cell["documents"]
        for cell in content["results"]
        if cell["task"] == "needles" and cell["length"] == TO
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    compared_page = (ROOT / "docs/compared.md").read_text(encoding="utf-8")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"“{decision}”" in page
    assert f"# {decision.partition('. ')[0]}.\n" in readme
    names = {
        "as it is": "as it is", "the last 8,192 tokens alone": ALONE, "NTK": "ntk", "YaRN": "yarn",
        "limited distances": "limited", "leaky distances": "leaky",
        "shifted distances": "shifted",
    }  # fmt: skip
    first = {"as it is": 0, "the last 8,192 tokens alone": 1, "YaRN": 2, "shifted distances": 3}
    rows = [
        cells_of_row(readme, name)
        for name in (
            "a digit up to L back",
            "a digit of a number hidden farther back than L",
            "whole numbers found farther back",
            "perplexity of the last 1,024 tokens",
        )
    ]
    losses = cells_of_row(readme, "texts of up to L tokens")
    for name, method in names.items():
        read = readings[method]
        documents = needles["none" if method == "as it is" else method]
        counts, nats, found_in = up_to_and_beyond(documents)
        assert counts == [55, 25]
        assert [read.back.value, read.far.value] == pytest.approx([math.exp(-n) for n in nats])
        probable = [f"{share.value:.0%}".replace("%", " %") for share in (read.back, read.far)]
        perplexity = f"{read.perplexity:.2f}"
        if name in first:
            said = [row[first[name]].strip("*") for row in rows]
            assert said == [*probable, found_in[1], perplexity]
        shown = [f"{value:.2f}" for value in nats]
        assert cells_of_row(page, name)[1:] == [perplexity, *shown, *found_in]
        called = name.replace(" tokens", "")
        assert cells_of_row(compared_page, called, after="found, farther back |")[:3] == [
            shown[1],
            *found_in,
        ]
        lost = re.findall(r"[\d.]+%", read.verdict)
        said = cells_of_row(page, name)[0]
        assert said.startswith(read.word) and (not said or read.word)
        assert all(loss.replace("%", " %") in said for loss in lost)
        if name in first:
            assert all(loss.strip("%") in losses[first[name]] for loss in lost)
    digit = {name: readings[name].far.value for name in ("shifted", "yarn", ALONE)}
    said = [f"{digit[name]:.0%}".replace("%", " %") for name in ("shifted", "yarn", ALONE)]
    claim = (
        f"of {said[0]}, where YaRN gives it {said[1]} and the last 8,192 tokens alone {said[2]};"
    )
    assert claim in readme
    without_loss = [each for each in found.readings if each.word == "no loss shown"]
    assert max(without_loss, key=lambda each: each.far.value).method == "shifted"
    assert [each.method for each in found.readings if each.taken] == ["shifted"]


def test_what_pages_say_of_needles_in_eight_books_is_in_their_file():
    cells = json.loads((ROOT / "results/smollm2/needles/results.json").read_text("utf-8"))[
        "results"
    ]
    far = [cell for cell in cells if cell["length"] > cell["near"]]
    nats = {cell["scaling"]: cell["ranges"]["beyond"]["nats"] for cell in far}
    assert min(nats, key=nats.get) == "shifted"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    probable = f"{math.exp(-nats['self_extend']):.0%}".replace("%", " %")
    assert f"Self-Extend, whose digits farther back have {probable}" in readme
    compared_page = (ROOT / "docs/compared.md").read_text(encoding="utf-8")
    names = {
        "as it is": "none", "YaRN": "yarn", "dynamic NTK": "dynamic",
        "limited distances": "limited", "leaky distances": "leaky",
        "STRING without its factor": "shifted",
        "Self-Extend, window L / 2": "self_extend",
    }  # fmt: skip
    for name, method in names.items():
        (cell,) = (cell for cell in far if cell["scaling"] == method)
        found = [str(each["found"]) for each in cell["ranges"].values()]
        shown = [f"{nats[method]:.2f}", *found]
        assert cells_of_row(compared_page, name, after="found, farther back |")[:3] == shown
    assert f"{nats['self_extend']:.2f}" == f"{nats['leaky']:.2f}"
    # Within L, in texts of 8,192 tokens, where the page has differences from the model as it is.
    within = {cell["scaling"]: cell for cell in cells if cell["length"] == 8192}
    page = " ".join((ROOT / "results/smollm2/README.md").read_text(encoding="utf-8").split())
    base = scores_of(within["none"]["documents"])
    for name, called in (
        ("shifted", "STRING without its factor"),
        ("yarn", "YaRN"),
        ("leaky", "Leaky"),
    ):
        pairs = differences(scores_of(within[name]["documents"]), base)
        low, high = nats_interval(pairs)
        said = f"{called} {mean_nats(pairs):+.2f} ({low:+.2f} to {high:+.2f})"
        assert said.replace("-", "−") in page
        found = f"{within[name]['found']} of {within[name]['needles']}"
        assert f"{called} {found}" in page


def test_the_table_of_qwen_is_of_its_file():
    (content,) = read_results([ROOT / "results/qwen/needles.json"])
    page = (ROOT / "results/qwen/README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\|(?: ([\d,]+) tokens)? \| (as it is|STRING) \|(.*)\|$", page, re.M)
    shown = []
    for length, method, row in lines:
        texts = length or shown[-1][0]
        shown.append((texts, method, [cell.strip() for cell in row.split("|")]))
    assert len(shown) == len(content["results"]) == 6
    for cell in content["results"]:
        near = cell["ranges"]["near"]
        beyond = cell["ranges"]["beyond"]
        row = ["", "", "", ""]
        for place, part in enumerate((near, beyond)):
            if part["needles"]:
                row[place] = f"{100 * math.exp(-part['nats']):.1f} %"
                row[place + 2] = f"{part['found']} of {part['needles']}"
        method = "as it is" if cell["scaling"] == "none" else "STRING"
        assert (f"{cell['length']:,}", method, row) in shown


def test_the_needles_of_qwen_without_the_factor_are_of_their_file():
    page = (ROOT / "results/qwen/README.md").read_text(encoding="utf-8")
    (cell,) = read_json(ROOT / "results/qwen/without-factor/needles.json")["results"]
    cells = read_json(ROOT / "results/qwen/needles.json")["results"]
    (with_factor,) = (
        each for each in cells if each["scaling"] != "none" and each["length"] == cell["length"]
    )
    for beyond, part in ((False, cell["ranges"]["near"]), (True, cell["ranges"]["beyond"])):
        assert f"{100 * math.exp(-part['nats']):.1f} %" in page.partition("**The needles")[2]
        assert f"{part['found']} of {part['needles']}" in page.partition("**The needles")[2]
        scores = [
            scores_of(each["documents"], cell["near"], beyond) for each in (cell, with_factor)
        ]
        low, high = nats_interval(differences(*scores))
        assert f"(−{-low:.2f} to +{high:.2f})" in page


def test_the_fresh_books_of_qwen_are_those_of_their_file():
    page = (ROOT / "results/qwen/README.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = read_json(ROOT / "results/qwen/fresh/needles.json")["results"]
    for name, cell in zip(("as it is", "with STRING"), cells, strict=True):
        near = cell["ranges"]["near"]
        beyond = cell["ranges"]["beyond"]
        digits = [f"{100 * math.exp(-part['nats']):.1f} %" for part in (near, beyond)]
        found = [f"{part['found']} of {part['needles']}" for part in (near, beyond)]
        assert f"| {name} | {' | '.join([*digits, *found])} |" in page
        assert f"{math.exp(-beyond['nats']):.0%}".replace("%", " %") in readme
    as_it_is, string = cells
    assert f"{string['ranges']['beyond']['found']} of {beyond['needles']}" in readme
    for beyond in (False, True):
        scores = [scores_of(cell["documents"], cell["near"], beyond) for cell in (as_it_is, string)]
        low, high = nats_interval(differences(*scores))
        least = f"−{-low:.2f} to +" if low < 0 else f"{low:.2f} to "
        assert f"({least}{high:.2f})" in page


@pytest.mark.parametrize("file", ["texts.json", "without-factor/texts.json"])
def test_the_perplexity_of_qwen_is_of_its_file(file):
    page = (ROOT / "results/qwen/README.md").read_text(encoding="utf-8")
    cells = read_json(ROOT / "results/qwen/texts.json")["results"]
    as_it_is = {cell["window"]: cell for cell in cells if cell["scaling"] == "none"}
    cells = read_json(ROOT / "results/qwen" / file)["results"]
    string = {cell["window"]: cell for cell in cells if cell["scaling"] != "none"}
    assert [*string] == ([4096, 16384, 32768] if file == "texts.json" else [16384, 32768])
    for window, strings in string.items():
        cell = as_it_is[window]
        documents = [
            [DocumentScore.of(each) for each in documents]
            for documents in (strings["documents"], cell["documents"])
        ]
        pairs = differences(*documents)
        change = 100 * math.expm1(mean_nats(pairs))
        low, high = (100 * math.expm1(end) for end in nats_interval(pairs))
        interval = (
            f"{low:.1f} to {high:.1f}" if low > 0 else f"−{-low:.0f} to +{high:.0f}: not shown"
        )
        values = f"{cell['perplexity']:.2f} | {strings['perplexity']:.2f}"
        assert f"| {window:,} tokens | {values} | {change:.1f} % higher ({interval}) |" in page


@pytest.mark.parametrize(
    ("folder", "after", "rows", "digits"),
    [
        (
            "limits/without-decay",
            "### Without the decay",
            {"W = 64": "W = 64", "W = 128, blocks of 256": "W = 128, trained on blocks of 256"},
            2,
        ),
        (
            "conversion/again",
            "| today |",
            {"base again": "base", "slack again": "from the base, slack"},
            1,
        ),
    ],
)
def test_rows_that_were_run_again_are_those_of_their_files(folder, after, rows, digits):
    """Perplexity by length, then that of the last tokens alone and passkeys, where they are."""
    found = ROOT / "results" / folder
    cells = json.loads((found / "results.json").read_text("utf-8"))["results"]
    page = (found.parent / "README.md").read_text("utf-8")
    for row, model in rows.items():
        of_model = [cell for cell in cells if cell["model"] == model]
        shown = []
        for scaling in ("none", "attend-last"):
            for cell in of_model:
                if cell["task"] == "perplexity" and cell["scaling"] == scaling:
                    shown.append(f"{cell['perplexity']:.{digits}f}")
        shown += [f"{cell['accuracy']:.2f}" for cell in of_model if cell["task"] == "passkey"]
        assert cells_of_row(page, row, after=after) == shown


def cells_of_row(text, name, after="\n"):
    """What stands behind a name in the first table that has it, without "of 20" and such."""
    _, _, text = text.partition(after)
    pattern = rf"^\| (?:as it is, )?[\[*]*{name}\b(?!, the last)[^|]*\|(.*)\|$"
    row = re.search(pattern, text, re.M)
    return [re.sub(r" of \d+$", "", cell.strip()) for cell in row[1].split("|")]


def test_the_ratios_of_the_study_of_sizes_are_those_of_its_results():
    """Of means over seeds: mean, and range, of pairs with the same seed."""
    folder = ROOT / "results/scaling"
    page = (folder / "README.md").read_text(encoding="utf-8")
    found = {}
    for cell in json.loads((folder / "results.json").read_text("utf-8"))["results"]:
        if cell["scaling"] == "none":
            place = cell["model"], cell["size"], cell["window"], cell["training_seed"]
            found[place] = cell["perplexity"]
    sizes = list(dict.fromkeys(size for _, size, _, _ in found))
    seeds = {seed for *_, seed in found}
    assert len(sizes) == 4 and len(seeds) == 3
    near, far = re.findall(r"(?m)^\| \| 0\.2M.*\n((?:\|.*\n)+)", page)
    for table, window in ((near, 256), (far, 4096)):
        for line in table.splitlines()[1:]:
            name, *shown = [part.strip(" *") for part in line.strip("|").split("|")]
            base = "RoFormer" if table == near else name
            for size, entry in zip(sizes, shown, strict=True):
                ratios = [
                    found[name, size, window, seed] / found[base, size, 256, seed] for seed in seeds
                ]
                said = re.findall(r"[\d.]+", entry)
                expected = [sum(ratios) / 3, min(ratios), max(ratios)][: len(said)]
                for text, value in zip(said, expected, strict=True):
                    assert text == f"{value:.{len(text.partition('.')[2])}f}", line


def test_tables_go_between_marks_or_nowhere(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"Before\n{BEGIN}\nold\n{END}\nafter")
    write_tables(page, "new")
    assert page.read_text() == f"Before\n{BEGIN}\nnew\n{END}\nafter"
    page.write_text(f"Before\n{BEGIN}\n")
    with pytest.raises(UserError, match="has no place for tables"):
        write_tables(page, "new")


def test_the_report_reads_the_trials_of_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pages", str(ROOT / "results" / "retrieval")])
    pages.main()
    (content,) = read_results(["runs/trials"])
    assert content["study"]["title"] and printed_tables(content["results"])


def test_what_the_page_says_of_answers_by_dynamic_ntk_is_in_its_file():
    folder = ROOT / "results/extend"
    rows = json.loads((folder / "decoding.json").read_text("utf-8"))["rows"]
    page = (folder / "README.md").read_text(encoding="utf-8")
    changes = []
    for row in rows:
        once, alone = row["perplexity_at_once"], row["perplexity_token_by_token"]
        if row["method"] != "dynamic":
            assert f"YaRN, has {once:.2f} and {alone:.2f} in the first book" in page
            continue
        changes.append(math.log(alone / once))
        assert f"| {row['document'] + 1} | {once:.2f} | {alone:.2f} |" in page
    low, high = mean_interval(changes)
    mean = math.expm1(sum(changes) / len(changes))
    assert f"{mean:.1%}".replace("%", " %") + " more perplexity" in page
    assert f"({math.expm1(low) * 100:.1f} to {math.expm1(high) * 100:.1f} %, three books)" in page


def read_by_method(file):
    """Log perplexities and shares of passkeys of the seeds, by method and length."""
    nats = defaultdict(list)
    found = defaultdict(list)
    for cell in read_json(file)["results"]:
        if cell["task"] == "perplexity":
            nats[cell["scaling"], cell["window"]].append(math.log(cell["perplexity"]))
        else:
            found[cell["scaling"], cell["length"]].append(cell["accuracy"])
    return nats, found


def test_the_table_of_methods_of_the_roformer_is_of_its_results():
    folder = ROOT / "results/long-context"
    nats, found = read_by_method(folder / "methods" / "results.json")
    page = (folder / "README.md").read_text(encoding="utf-8")
    lengths = (256, 512, 1024, 2048, 4096)
    names = {"as it is": "none", "limited distances": "limited", "YaRN": "yarn", "NTK": "ntk"}
    for name, method in names.items():
        read = [f"{math.exp(sum(nats[method, n]) / 3):.1f}" for n in lengths]
        keys = " ".join(f"{sum(found[method, n]) / 3:.2f}" for n in lengths)
        assert cells_of_row(page, name, after="## Methods that train nothing") == [*read, keys]


def test_what_the_page_says_of_twice_the_training_length_is_of_its_results():
    folder = ROOT / "results/long-context"
    nats, found = read_by_method(folder / "twice" / "results.json")
    page = (folder / "README.md").read_text(encoding="utf-8")
    rows = {
        "as it is": "none", "limited distances": "limited", "YaRN": "yarn", "NTK": "ntk",
        "leaky distances": "leaky", "STRING without its factor, T = 1.5 L": "shifted",
    }  # fmt: skip
    for name, method in rows.items():
        read = [f"{math.exp(sum(nats[method, n]) / 3):.2f}" for n in (128, 256, 384, 512)]
        keys = " ".join(f"{sum(found[method, n]) / 3:.2f}" for n in (256, 384, 512))
        assert cells_of_row(page, name, after="### Twice the training length") == [*read, keys]

    def beside_limited(method, window):
        """The mean and 95 % interval of a difference in percent, as they are written."""
        pairs = zip(nats[method, window], nats["limited", window], strict=True)
        differences = [other - limited for other, limited in pairs]
        values = (sum(differences) / 3, *mean_interval(differences))
        return [f"{math.expm1(value) * 100:.1f}" for value in values]

    yarn = [beside_limited("yarn", window) for window in (128, 256)]
    ntk = [beside_limited("ntk", window) for window in (128, 256, 512)]
    said = " ".join(page.split())
    assert (
        f"YaRN loses {yarn[0][0]} % of perplexity at 128 tokens and {yarn[1][0]} % at 256 "
        f"({yarn[0][1]} to {yarn[0][2]}, {yarn[1][1]} to {yarn[1][2]}), NTK {ntk[0][0]} % at both "
        f"and {ntk[2][0]} % at 2 L ({ntk[2][1]} to {ntk[2][2]})"
    ) in said
    assert ntk[0][0] == ntk[1][0]
    less, lower = ([x.removeprefix("-") for x in beside_limited("leaky", n)] for n in (256, 384))
    assert (
        f"leaky distances have {less[0]} and {lower[0]} % less perplexity ({less[2]} to {less[1]}, "
        f"{lower[2]} to {lower[1]})"
    ) in said
    for method in ("yarn", "ntk", "leaky", "shifted"):  # none is lower by an interval at 2 L
        assert float(beside_limited(method, 512)[2]) > 0

    nats, found = read_by_method(folder / "twice" / "shifted.json")
    section = page.partition("### Shifted distances beyond L alone")[2]
    rows = {
        "as it is": "none", "limited distances": "limited", "YaRN": "yarn",
        "leaky distances": "leaky", "shifted distances": "shifted",
    }  # fmt: skip
    for name, method in rows.items():
        read = [f"{math.exp(sum(nats[method, n]) / 3):.2f}" for n in (128, 256, 384)]
        keys = " ".join(f"{sum(found[method, n]) / 3:.2f}" for n in (256, 384))
        assert cells_of_row(section, name) == [*read, keys]
    mean, low, high = beside_limited("shifted", 384)
    assert f"{mean} % higher ({low} to {high})" in section
    fewer = [a - b for a, b in zip(found["shifted", 384], found["limited", 384], strict=True)]
    low, high = mean_interval(fewer)
    assert low < 0 < high  # so the rule makes it the default
    interval = f"{sum(fewer) / 3:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")
    assert f"shifted less limited distances {interval}" in section


def test_what_the_page_of_smollm2_says_of_perplexity_is_in_its_table():
    page = (ROOT / "results/smollm2/README.md").read_text(encoding="utf-8")
    said = " ".join(page.split())
    table = page.partition("<!-- texts -->")[2].partition("<!-- end of texts -->")[0]
    for method, window, sentence in (
        ("yarn", 0, "YaRN loses {0} % against the model as it is ({1} to {2})"),
        ("STRING without its factor", 0, "STRING without its factor {0} % ({1} to {2})"),
        ("leaky", 0, "Leaky ReRoPE and Self-Extend are {0} % lower ({2} to {1})"),
        ("limited", 1, "limited distances are {0} % higher ({1} to {2})"),
    ):
        (row,) = re.findall(rf"^\| {method} \|(.*)\|$", table, re.M)
        ratios = re.findall(r"\d\.\d{3}", row.split("|")[window])
        assert sentence.format(*(f"{abs(float(x) - 1) * 100:.1f}" for x in ratios)) in said


def test_smollm2s_conversion_is_as_its_files_say():
    folder = ROOT / "results" / "conversion"
    page = (folder / "README.md").read_text()
    figures = {}
    for name in ("start", "strict"):
        cells = json.loads((folder / "smollm2" / f"{name}.json").read_text())["results"]
        figures[name] = {cell["window"]: cell["perplexity"] for cell in cells}
    start = figures["start"]
    strict = figures["strict"]
    assert f" (4-bit weights) | {start[512]:.1f} | {start[2048]:.1f} |" in page
    assert f"| strict, after both recipes | {strict[512]:.1f} | {strict[2048]:.1f} |" in page
    assert f"has {strict[2048] / start[2048]:.1f} times the perplexity of its start" in page


def test_the_table_of_fresh_books_is_of_its_results():
    folder = ROOT / "results/extend"
    page = (folder / "README.md").read_text(encoding="utf-8")
    cells = {cell["scaling"]: cell for cell in read_json(folder / "fresh/needles.json")["results"]}
    far = {name: scores_of(cell["documents"], L, True) for name, cell in cells.items()}
    names = {"shifted distances": "shifted", "leaky distances": "leaky", "YaRN": "yarn"}
    for name, method in names.items():
        shown = []
        for scores in (scores_of(cells[method]["documents"], L, False), far[method]):
            low, high = (math.exp(-nats) for nats in reversed(nats_interval(scores)))
            mean = math.exp(-mean_nats(scores))
            shown.append(f"{100 * mean:.0f} % ({100 * low:.0f} to {100 * high:.0f})")
        ranges = cells[method]["ranges"]
        found = [str(ranges[x]["found"]) for x in ("near", "beyond")]
        fewer = ""
        if method != "shifted":
            pairs = differences(far[method], far["shifted"])
            low, high = nats_interval(pairs)
            fewer = f"{mean_nats(pairs):.2f} fewer ({low:.2f} to {high:.2f})"
        assert cells_of_row(page, name, after="**It holds.**") == [*shown, fewer, *found]
    texts = {cell["scaling"]: cell for cell in read_json(folder / "fresh/texts.json")["results"]}
    documents = {
        name: [DocumentScore.of(each) for each in cell["documents"]] for name, cell in texts.items()
    }
    pairs = differences(documents["shifted"], documents["attend-last"])
    mean, low, high = (
        f"{100 * math.expm1(nats):.1f}" for nats in (mean_nats(pairs), *nats_interval(pairs))
    )
    shown = {name: f"{cell['perplexity']:.2f}" for name, cell in texts.items()}
    said = " ".join(page.split())
    assert f"is {shown['shifted']} with shifted distances, {mean} % above" in said
    assert f"alone, {shown['attend-last']} ({low} to {high};" in said


@pytest.mark.parametrize(
    ("study", "file"),
    [
        ("extend-fresh", "extend/fresh/needles.json"),
        ("extend-fresh-texts", "extend/fresh/texts.json"),
        ("extend-twice", "extend/twice/needles.json"),
        ("extend-twice", "extend/twice/texts.json"),
        ("extend-twice-leaky", "extend/twice/leaky.json"),
        ("extend-twice-others", "extend/twice/others.json"),
        ("extend-reach", "extend/reach/results.json"),
        ("extend-reach-others", "extend/reach/others.json"),
        ("qwen", "qwen/needles.json"),
        ("qwen", "qwen/texts.json"),
        ("qwen-without-factor", "qwen/without-factor/texts.json"),
        ("qwen-without-factor", "qwen/without-factor/needles.json"),
        ("qwen-fresh", "qwen/fresh/needles.json"),
    ],
)
def test_the_studies_of_results_have_the_settings_of_their_files(study, file):
    """But for the name of the file of books, which was not the same for all."""
    settings = asdict(load_study(ROOT / "studies" / f"{study}.yaml"))
    recorded = read_json(ROOT / "results" / file)["study"]
    assert settings["models"] == recorded["models"]
    by_name = operator.itemgetter("method")
    assert sorted(settings["methods"], key=by_name) == sorted(recorded["methods"], key=by_name)
    for task in recorded["tasks"]:
        read = settings["tasks"][task] | {"source": ""}
        assert json.loads(json.dumps(read)) == recorded["tasks"][task] | {"source": ""}


def test_the_studies_of_shifted_distances_have_the_settings_of_their_cells():
    """Which stand in results.json of the check, without the settings of a study."""
    read = defaultdict(set)
    for name in ("extend-shifted", "extend-shifted-short"):
        study = load_study(ROOT / "studies" / f"{name}.yaml")
        (method,) = study.methods
        assert (method.method, method.factor) == ("shifted", 1.5)
        for task, settings in study.tasks.items():
            if task == "needles":
                places = [(length, settings.near, settings.count) for length in settings.lengths]
            else:
                places = [(window, settings.stride or window) for window in settings.windows]
            read[task].update(places)
    cells = defaultdict(set)
    for cell in read_json(ROOT / "results/extend/results.json")["results"]:
        if cell["scaling"] == "shifted":
            assert cell["factor"] == 1.5
            if cell["task"] == "needles":
                cells["needles"].add((cell["length"], cell["near"], cell["count"]))
            else:
                cells["perplexity"].add((cell["window"], cell["stride"]))
    assert read == cells


def test_the_table_of_ruler_by_four_prompts_is_of_its_results():
    folder = ROOT / "results/smollm2"
    page = (folder / "README.md").read_text(encoding="utf-8")
    section = page.partition("**RULER at 12,288 tokens, four prompts a task**")[2]
    scores = defaultdict(list)
    for cell in read_json(folder / "ruler/results.json")["results"]:
        scores[cell["scaling"]].append([sample["score"] for sample in cell["samples"]])
    draws = {}
    names = {"shifted": "shifted distances", "self_extend": "Self-Extend", "yarn": "YaRN"}
    for method, tasks in scores.items():
        draws[method] = [100 * sum(draw) / 7 for draw in zip(*tasks, strict=True)]
        low, high = mean_interval(draws[method])
        mean = f"{sum(draws[method]) / 4:.0f} ({low:.0f} to {high:.0f})"
        each = [f"{100 * sum(task) / 4:.0f}" for task in tasks]
        assert cells_of_row(section, names[method]) == [*each, mean]
    said = " ".join(section.split())
    for method in ("self_extend", "yarn"):
        more = [a - b for a, b in zip(draws["shifted"], draws[method], strict=True)]
        low, high = mean_interval(more)
        interval = f"({low:+.0f} to {high:+.0f})".replace("-", "−")
        assert re.search(
            rf"{sum(more) / 4:.0f} (points )?above {names[method]} {re.escape(interval)}", said
        )


def test_the_doubled_passkeys_are_those_of_their_file():
    """The length, its multiple of L, and how many prompts are answered."""
    folder = ROOT / "results" / "retrieval"
    (cell,) = read_json(folder / "farther" / "doubled.json")["results"]
    page = " ".join((folder / "README.md").read_text("utf-8").split())
    (said,) = re.findall(r"\*\*Doubled\*\*: (.*?) \(`farther/doubled.json`", page)
    seed, factor, hits, prompts, length = re.findall(r"\d+(?:,\d{3})*", said)
    assert cell["model"] == f"seed {seed}"
    assert cell["factor"] == float(factor.replace(",", ""))
    assert cell["length"] == int(length.replace(",", ""))
    assert cell["length"] == cell["factor"] * cell["training_length"]
    assert len(cell["samples"]) == int(prompts)
    assert sum(str(each["key"]) in each["output"] for each in cell["samples"]) == int(hits)
    assert sum(each["hit"] for each in cell["samples"]) == int(hits)
