"""The report page from result files."""

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import vl_convert

from coca_lab.report import (
    Entry,
    Line,
    LineChart,
    Section,
    build_report,
    printed_tables,
    write_report,
)
from coca_lab.report.lines import by_line
from coca_lab.report.page import page_sections, tasks_and_runs
from coca_lab.report.perplexity import (
    perplexity_findings,
    perplexity_sections,
    perplexity_tables,
    repeat_tables,
)
from coca_lab.report.results import all_cells, read_results
from coca_lab.report.tasks import by_task

RESULTS = Path(__file__).parents[3] / "results"


def passkey(model: str, length: int, hits: int) -> dict:
    samples = [{"depth": 0.5, "distance": 9, "hit": i < hits} for i in range(5)]
    return {
        "task": "passkey", "model": model, "training_length": 64, "scaling": "none",
        "factor": None, "length": length, "accuracy": hits / 5, "wilson95": [0.1, 0.9],
        "samples": samples,
    }  # fmt: skip


def cell(model: str, window: int, value: float, scaling: str = "none", **changes) -> dict:
    return {
        "task": "perplexity",
        "model": model,
        "training_length": 64,
        "scaling": scaling,
        "factor": 4.0 if scaling == "ntk" else None,
        "window": window,
        "stride": 64,
        "targets": "shared",
        "perplexity": value,
        "ci95": [value * 0.9, value * 1.1],
        "tokens": 1000,
        "documents": [{"id": "a", "nats": 1.0, "tokens": 1000}],
        **changes,
    }


CELLS = [
    cell("RoFormer", 64, 40.0),
    cell("RoFormer", 128, 90.0),
    cell("RoFormer", 64, 41.0, "attend-last", stride=8),
    cell("RoFormer", 64, 40.0, "ntk"),
    cell("RoFormer", 128, 60.0, "ntk"),
    cell("CoCA-Slack", 64, 41.5),
    cell("CoCA-Slack", 128, 54.0),
]
TRAINING = {
    "name": "RoFormer",
    "parameters": 12345,
    "steps": 10,
    "tokens": 1000,
    "epochs": 0.5,
    "seconds": 3.0,
    "recipe": {"training": {"learning_rate": 0.003}},
    "curve": [{"step": 1, "loss": 5.0}, {"step": 10, "loss": 4.0}],
}
ENVIRONMENT = {
    "versions": {"python": "3.11"},
    "processor": "A <processor>",
    "cores": 2,
    "threads": 2,
    "gpus": [],
    "system": "Linux",
    "command": "coca study quickstart",
}
CONTENT = {"results": CELLS, "training": [TRAINING], "environment": ENVIRONMENT}


class Page(HTMLParser):
    """Text, ids and references of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data"):
                self.references.append(value)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def html():
    return build_report([CONTENT], title="A & B")


def test_the_page_needs_nothing_from_outside_and_stays_below_three_megabytes(html):
    assert all(reference.startswith(("#", "data:")) for reference in Page(html).references)
    own = html.replace(vl_convert.javascript_bundle(), "")
    assert len(own) < len(html) < 3_000_000
    assert not re.search(r"url\((?!#)|@import|<script src|stylesheet", own)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", own))
    assert all("w3.org" in address or "purl.org" in address for address in addresses), addresses


def test_ids_are_unique_and_references_resolve(html):
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    internal = set(re.findall(r"url\(#([^)]+)\)", html.replace(vl_convert.javascript_bundle(), "")))
    assert internal and internal <= set(page.ids)


def test_a_chart_is_drawn_from_one_specification_with_and_without_scripts(html):
    """The static picture stands in the page, beside what the script draws."""
    specifications = [
        json.loads(found)
        for found in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    ]
    assert html.count('role="img"') == len(specifications) == html.count('class="marks"') == 2
    perplexity = specifications[0]
    assert {param["name"] for param in perplexity["params"]} == {"all", "shown", "zoom"}
    assert perplexity["usermeta"] == {"log": True, "hidden": 0}
    points = [point for data in perplexity["datasets"].values() for point in data]
    drawn = {(point["line"], point["x"]): point["y"] for point in points if "line" in point}
    assert drawn["RoFormer + NTK (4)", 128] == 60.0
    assert drawn["RoFormer, last 64 tokens only", 128] == 41.0
    # Colours are set by the page, which is light or dark.
    assert not re.search(r'"#[0-9a-f]{6}"', json.dumps(perplexity))
    defined = set(re.findall(r"(--\w+):", html))
    assert set(re.findall(r"var\((--\w+)\)", html)) <= defined
    assert "prefers-color-scheme: dark" in html


def test_figures_tables_and_settings_are_there(html):
    text = Page(html).text
    for expected in (
        "A & B", "RoFormer + NTK (4)", "RoFormer, last 64 tokens only", "54.00", "48.60 to 59.40",
        "training length", "12,345", "A <processor>", "coca study quickstart",
        "perplexity (lower is better)", "Recipe of RoFormer", "learning_rate: 0.003",
        "training loss (nats per token)",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_lowest_of_a_column_is_bold_whatever_its_row():
    """The row of the last tokens alone too: the note says the lowest of a column."""
    assert bold(build_report([CONTENT], title="t")) == ["40.00", "40.00", "41.00"]


def bold(html):
    return re.findall(r'<span class="bold">([\d.]+)</span>', html)


def test_what_is_shown_alike_is_bold_alike_and_a_row_alone_is_not():
    close = [cell("a", 64, 40.001), cell("b", 64, 40.0), cell("c", 64, 41.0)]
    assert bold(build_report([{"results": close}])) == ["40.00", "40.00"]
    assert bold(build_report([{"results": [cell("a", 64, 40.0)]}])) == []


def findings(cells):
    return perplexity_findings(all_cells([{"results": cells}]))


def test_findings_name_the_lowest_first_whatever_its_attention():
    named = [
        cell("a", 64, 40.0, attention="rope"),
        cell("b", 64, 41.5, attention="a new form"),
        cell("c", 64, 30.0, attention="alibi"),
    ]
    assert findings(named) == [
        "At 64 tokens (the training length) c has the lowest perplexity, 30.00. The others: "
        "a 40.00 (+33.3%); b 41.50 (+38.3%)."
    ]
    assert findings(named[:1]) == [
        "At 64 tokens (the training length) a has a perplexity of 40.00."
    ]
    infinite = [cell("a", 64, 1.0, perplexity=None), cell("b", 64, 1.0, perplexity=None)]
    assert findings(infinite)[0].endswith("no model has a finite perplexity.")
    many = findings([cell(f"m{i}", 64, 40.0 + i) for i in range(12)])[0]
    assert "m8 48.00 (+20.0%); 3 more up to 51.00." in many and "m9" not in many


def test_findings_follow_the_numbers_whichever_way_they_fall():
    assert findings(CELLS) == [
        "At 64 tokens (the training length) RoFormer has the lowest perplexity, 40.00. The "
        "others: CoCA-Slack 41.50 (+3.8%).",
        "At 128 tokens (2 × the training length) CoCA-Slack has the lowest perplexity, 54.00. The "
        "others: RoFormer + NTK (4) 60.00 (+11.1%).",
        "At 128 tokens no model has a lower perplexity than with its last tokens only: none of "
        "them benefits from the longest window yet.",
    ]
    better = [*CELLS, cell("CoCA-Slack", 64, 60.0, "attend-last")]
    assert findings(better)[2:] == [
        "At 128 tokens the perplexity of CoCA-Slack is lower than with the last 64 tokens only."
    ]


def test_changes_carry_an_interval_over_paired_documents():
    def with_documents(model: str, factor: float) -> dict:
        documents = [
            {"id": str(i), "nats": 100 * (3 + i % 4) + 100 * factor, "tokens": 100}
            for i in range(20)
        ]
        return cell(model, 64, 40.0 * math.exp(factor), documents=documents)

    cells = [with_documents("RoFormer", 0.0), with_documents("CoCA-Slack", -0.1)]
    assert findings(cells)[0].endswith(
        "CoCA-Slack has the lowest perplexity, 36.19. The others, with 95 % intervals of the "
        "difference: RoFormer 40.00 (+10.5%; +10.5% to +10.5%)."
    )


def test_repeats_are_compared_with_the_short_context():
    def measured(window: int, far: float, rest: float, scaling: str = "none") -> dict:
        documents = [{"id": str(i), "nats": far + rest + i, "tokens": 100} for i in range(20)]
        repeated = [{"nats": far, "tokens": 10} for _ in documents]
        about = {"n": 4, "beyond": 64, "documents": repeated}
        made = {"documents": documents, "tokens": 2000, "repeats": about}
        return cell("Roles", window, 30.0, scaling, attention="rope", **made)

    cells = [measured(256, 20, 300), measured(64, 30, 297, "attend-last"), measured(64, 31, 297)]
    header, rows = repeat_tables(cells)[0]
    assert header[0].startswith("4-gram only farther back than 64 tokens")
    # exp(-10 / 10) and exp(3 / 90); nats differ alike in all documents.
    assert rows == [
        ["Roles, these 10.0%", "+10.5% (+10.5% to +10.5%)", "−63.2% (−63.2% to −63.2%)"],
        ["Roles, all others", "+0.0% (+0.0% to +0.0%)", "+3.4% (+3.4% to +3.4%)"],
    ]
    assert any("Copied from far back" in s.title for s in perplexity_sections(cells))
    assert (header, rows) in perplexity_tables(cells)
    assert "Copied" not in " ".join(s.title for s in perplexity_sections(all_cells([CONTENT])))


def test_few_documents_are_named_below_the_intervals():
    def measured(count: int) -> list[dict]:
        documents = [{"id": str(i), "nats": 350.0 + i, "tokens": 100} for i in range(count)]
        found = [cell("RoFormer", window, 40.0, documents=documents) for window in (64, 128)]
        return all_cells([{"results": found}])

    warning = (
        "8 documents: intervals are rough below 10, where one unusual document counts for much."
    )
    assert printed_tables(measured(8))[1:] == [([warning], [])]
    note = perplexity_sections(measured(8))[0].note
    assert warning in note
    # The stride is 64.
    assert "W − 63 to W tokens before it, at 64 tokens 1 to 64." in note
    assert len(printed_tables(measured(10))) == 1
    assert "unreliable" not in perplexity_sections(measured(10))[0].note


def test_the_page_is_the_same_every_time():
    assert build_report([CONTENT], title="t") == build_report([CONTENT], title="t")


def test_results_without_training_and_training_without_results(tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps({"results": CELLS, "environment": ENVIRONMENT}))
    run = tmp_path / "run"
    run.mkdir()
    (run / "training.json").write_text(json.dumps({**TRAINING, "environment": ENVIRONMENT}))
    for paths in ([tmp_path / "eval.json"], [run], [run, tmp_path / "eval.json"]):
        written = write_report(paths, tmp_path / "out" / "report.html", title="t")
        assert "</html>" in written.read_text()


def test_a_run_is_called_by_its_folder_and_a_copy_of_its_file_by_its_name(tmp_path):
    run = tmp_path / "from-a-run"
    run.mkdir()
    content = json.dumps({k: v for k, v in TRAINING.items() if k != "name"})
    for path in (run / "training.json", tmp_path / "from-a-copy.json"):
        path.write_text(content)
    read = read_results([run, tmp_path / "from-a-copy.json"])
    assert [found["training"][0]["name"] for found in read] == ["from-a-run", "from-a-copy"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a result file, no valid JSON"),
        ("[]", "expected an object with results"),
        ('{"a": 1}', "expected an object with results"),
        ('{"results": []}', "neither results nor training curves"),
        ('{"results": [{"task": "poetry", "model": "m"}]}', "neither results nor training"),
        (
            '{"results": [{"task": "perplexity", "model": "m"}]}',
            "r.json: a result lacks .*'scaling'",
        ),
        ('{"results": [{}]}', "r.json: a result lacks the field 'task'"),
        ('{"results": [3]}', "r.json: not a result file: results must be a list of objects"),
        ('{"curve": [{"step": 1, "loss": 2.0}]}', "r.json: a result lacks the field 'tokens'"),
    ],
)
def test_unfit_result_files_are_refused(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        write_report([path], tmp_path / "report.html", title="t")
    assert not (tmp_path / "report.html").exists()


def test_a_missing_file_and_a_point_claimed_twice_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_results([tmp_path / "nowhere.json"])
    other = cell("RoFormer", 64, 41.0, documents=[{"id": "a", "nats": 2.0, "tokens": 1000}])
    with pytest.raises(ValueError, match=r"one.json: RoFormer .none. at 64 tokens twice"):
        build_report([{"results": [*CELLS, other], "file": "one.json"}])


def written(folder, name, cells, **more):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"results": cells, "environment": ENVIRONMENT, **more}))
    return path


def test_results_on_other_texts_stand_apart(tmp_path):
    text = [{"id": "b", "nats": 1.0, "tokens": 1000}]
    other = [
        cell("CoCA-Slack", 64, 20.0, documents=text),
        cell("RoFormer", 64, 30.0, documents=text),
    ]
    files = [written(tmp_path, "a.json", CELLS), written(tmp_path, "b.json", other)]
    page = build_report(read_results(files))
    text = Page(page).text
    assert "Text 2: At 64 tokens (the training length) CoCA-Slack has the lowest" in text
    assert f"Text 1: RoFormer, CoCA-Slack ({files[0]})" in text
    assert text.count("Perplexity against the length read at once (text 2)") >= 1
    assert bold(page) == ["40.00", "40.00", "41.00", "20.00"]
    headers = [header for header, rows in printed_tables([*CELLS, *other]) if rows]
    assert [header[0] for header in headers] == [
        "perplexity at (text 1)",
        "perplexity at (text 2)",
    ]
    for change in (
        {"stride": 32},
        {"targets": "all"},
        {"text": "1"},
        {"documents": [{"id": "a", "nats": 1.0, "tokens": 999}]},
    ):
        cells = [cell("a", 64, 2.0, text="0"), cell("b", 64, 3.0, **change)]
        groups = by_task(all_cells([{"results": cells}]))["perplexity"]
        assert len(groups) == 2, change
    same = [cell("a", 64, 2.0, text="0"), cell("b", 128, 3.0)]  # an old file: no text in it
    assert len(by_task(all_cells([{"results": same}]))["perplexity"]) == 1


def test_one_model_measured_twice_is_told_apart_by_its_files(tmp_path):
    other = [cell("RoFormer", 64, 41.0), cell("RoFormer", 64, 41.0, "attend-last", stride=8)]
    run = {**TRAINING, "seconds": 4.0, "curve": [{"step": 1, "loss": 6.0}]}
    files = [
        written(tmp_path, "one/results.json", CELLS, training=[TRAINING]),
        written(tmp_path, "two/results.json", other, training=[run]),
    ]
    text = Page(build_report(read_results(files))).text
    for name in ("RoFormer (one)", "RoFormer (one) + NTK (4)", "RoFormer (two)"):
        assert text.count(name) >= 2, name
    assert "CoCA-Slack (" not in text and "Recipe of RoFormer (two)" in text
    # Copies of one result are no second measurement, whatever else their files have.
    files = [written(tmp_path, "three.json", CELLS[:3]), files[0]]
    assert "RoFormer (" not in Page(build_report(read_results(files))).text
    # Neither is a name enough: these are two models.
    larger = [cell("RoFormer", 256, 50.0, training_length=128)]
    files = [files[0], written(tmp_path, "larger.json", larger)]
    assert "RoFormer (larger)" in Page(build_report(read_results(files))).text


def test_two_runs_of_one_name_are_told_apart():
    runs = [
        {"training": [{**TRAINING, "steps": steps}], "file": f"{steps}/run/training.json"}
        for steps in (10, 20)
    ]
    text = Page(build_report(runs)).text
    assert all(f"Recipe of RoFormer ({run['file']})" in text for run in runs)


def test_folders_are_read_for_what_is_in_them(tmp_path):
    written(tmp_path, "suite/results.json", CELLS)
    (tmp_path / "suite" / "config.json").write_text("{}")
    written(tmp_path, "several/b.json", CELLS[:1])
    file = written(tmp_path, "several/a.json", CELLS[1:])

    def names(*paths):
        return [content["file"].rpartition("/")[2] for content in read_results(paths)]

    assert names(tmp_path / "suite") == ["results.json"]
    assert names(tmp_path / "several", file) == ["a.json", "b.json"]
    (tmp_path / "suite" / "training.json").write_text(json.dumps(TRAINING))
    assert names(tmp_path / "suite") == ["training.json", "results.json"]
    # Kept from a shorter run and from another measurement; named alone, they are read.
    (tmp_path / "suite" / "training-2.json").write_text(json.dumps(TRAINING))
    earlier = written(tmp_path, "suite/results-1.json", CELLS)
    assert names(tmp_path / "suite") == ["training.json", "results.json"]
    assert names(earlier) == ["results-1.json"]
    (tmp_path / "suite" / "results.json").write_text("{")
    with pytest.raises(ValueError, match="no valid JSON"):
        read_results([tmp_path / "suite"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"neither results\.json nor"):
        read_results([tmp_path / "empty"])


HOSTILE = """</title></script></svg><script>alert(1)</script><img src=x onerror='alert(2)'>"""


def test_hostile_names_and_titles_of_documents_are_text():
    """Of a model, a document, a run and the page: no element of theirs is in the page."""
    documents = [{"id": HOSTILE, "nats": 350.0, "tokens": 1000}]
    cells = [cell(HOSTILE, window, 40.0, documents=documents) for window in (64, 128)]
    cells += [{**passkey(HOSTILE, 64, 3), "machine": HOSTILE}]
    recipe = {"data": {"source": HOSTILE}}
    environment = {**ENVIRONMENT, "processor": HOSTILE, "command": HOSTILE}
    run = {**TRAINING, "name": HOSTILE, "recipe": recipe}

    def elements(html):
        page = Elements()
        page.feed(html.replace(vl_convert.javascript_bundle(), ""))
        return page.found

    found = elements(
        build_report(
            [{"results": cells, "training": [run], "environment": environment, "file": HOSTILE}],
            title=HOSTILE,
        )
    )
    plain = json.loads(json.dumps([cells, run]).replace(json.dumps(HOSTILE)[1:-1], "x"))
    expected = elements(
        build_report(
            [{"results": plain[0], "training": [plain[1]], "environment": ENVIRONMENT}], title="x"
        )
    )
    assert found["script"] == expected["script"] > 2 and found["svg"] == expected["svg"] > 0
    assert found["img"] == 0 and not found["onerror"]


class Elements(HTMLParser):
    """How often a page has every element and attribute."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def handle_starttag(self, tag, attrs):
        self.found.update([tag, *(name for name, _ in attrs)])


NAMES = ['$\\frac{x}$ <b>&amp; "q" --> $', "_" + "W" * 150, "stroke: #d55e00", "模型 $x$", "a$"]


def test_names_are_shown_as_they_are():
    cells = [cell(name, 64, 40.0 + i) for i, name in enumerate(NAMES)]
    page = build_report([{"results": cells, "training": [{**TRAINING, "name": NAMES[0]}]}])
    text = Page(page).text
    for name in NAMES:
        # In the sentence, the table and the specification at least.
        assert text.count(name) + text.count(json.dumps(name)[1:-1].replace("<", "\\u003c")) >= 3


def test_a_model_has_one_colour_on_a_page():
    cells = [*CELLS, passkey("CoCA-Slack", 64, 3), passkey("RoFormer", 64, 4)]
    runs = [{**TRAINING, "name": name} for name in ("CoCA-Slack", "RoFormer")]
    html = build_report([{"results": cells, "training": runs}])
    colours = {}
    for found in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S):
        scale = json.loads(found)["layer"][0]["encoding"]["color"]["scale"]
        for name, colour in zip(scale["domain"], scale["range"], strict=True):
            colours.setdefault(name.split(" +")[0].split(",")[0], set()).add(colour)
    assert len(colours["RoFormer"]) == len(colours["CoCA-Slack"]) == 1
    assert colours["RoFormer"] != colours["CoCA-Slack"]


def test_a_long_page_is_folded_and_every_table_is_there_as_csv():
    rates = {"learning_rate": 0.1, "grad_norm": 2.0, "tokens_per_second": 9.0}
    curve = [{**point, **rates} for point in TRAINING["curve"]]
    runs = [{**TRAINING, "name": f"run {i}", "curve": curve} for i in range(60)]
    content = {**CONTENT, "results": [*CELLS, passkey("a", 64, 2)], "training": runs}
    page = build_report([content])
    first, more = page.split('<details class="more"><summary>', 1)
    assert "Passkeys found, by prompt length" in first and "Passkeys found, by depth" in page
    assert "Throughput in training" in more and "figures and tables</summary>" in more
    assert page.count('.csv" href="data:text/csv') == page.count("<table>\n") > 5


def test_csv_has_a_column_for_the_smaller_lines():
    rows = [["a, b", Entry("1.00", "0.5 to 2")], ["c", "–"]]
    section = Section("t", header=["model", Entry("64", "1 ×")], rows=rows)
    assert section.csv() == 'model,64,1 ×\n"a, b",1.00,0.5 to 2\nc,–,\n'


def test_titles_say_what_was_measured():
    bench = {"task": "bench", "case": "x", "title": "X", "text": "", "measure": "memory"}
    bench |= {"length": 8, "dtype": "float32", "device": "cpu", "batch": 1, "sizes": {}}
    bench["variants"] = {"a": {"peak_megabytes": 1.0}}
    assert "<h1>Benchmarks</h1>" in build_report([{"results": [bench]}])
    both = build_report([{"results": [cell("a", 64, 2.0), passkey("a", 64, 2)]}])
    assert "<h1>Perplexity against context length · Passkey retrieval</h1>" in both


def test_a_second_measurement_of_a_benchmark_stands_apart():
    bench = {"task": "bench", "case": "x", "title": "X", "text": "", "measure": "memory"}
    bench |= {"length": 8, "dtype": "float32", "device": "cpu", "batch": 1, "sizes": {}}

    def content(file, peak, processor="A", length=8):
        variants = {"a": {"peak_megabytes": peak}}
        return {
            "results": [{**bench, "length": length, "variants": variants}],
            "environment": {**ENVIRONMENT, "processor": processor},
            "file": file,
        }

    first = content("a.json", 1.0)
    groups = [
        len(by_task(all_cells([first, other]))["bench"])
        for other in (
            content("b.json", 1.0, length=16),
            content("b.json", 2.0),
            content("b.json", 1.0, processor="B", length=16),
        )
    ]
    assert groups == [1, 2, 2]


def test_the_attend_last_line_of_two_evaluations_is_one():
    again = {**CELLS[2], "seconds": 3.0}
    assert by_line([*CELLS, again], "window") == by_line(CELLS, "window")


def test_two_lengths_of_attend_last_are_two_lines():
    cells = [*CELLS, cell("RoFormer", 32, 43.0, "attend-last", stride=4)]
    html = build_report([{"results": cells}], title="t")
    for size in (32, 64):
        assert f"RoFormer, last {size} tokens only" in html
    (_, rows), *_ = printed_tables(cells)
    assert ["RoFormer, last 32 tokens only", "43.0", "43.0"] in rows


def test_what_was_measured_otherwise_has_a_table_of_its_own():
    def ranges(count):
        size = 8 // count
        return [{"first": i * size + 1, "last": (i + 1) * size, "nats": 8.0, "tokens": 4}
                for i in range(count)]  # fmt: skip

    cells = [
        cell("a", 8, 3.0, by_position=ranges(2)),
        cell("b", 8, 3.0, by_position=ranges(4)),
    ]
    sections = perplexity_sections(all_cells([{"results": cells}]))
    assert [len(section.header) for section in sections[1:3]] == [5, 3]


def test_a_folder_is_no_page_to_write(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(CONTENT))
    with pytest.raises(ValueError, match="is a folder; choose a file to write"):
        write_report([path], tmp_path, title="t")


def test_infinite_perplexity_is_shown_as_inf():
    cells = [cell("m", 64, 2.0), cell("m", 128, 2.0, perplexity=None, ci95=None)]
    html = build_report([{"results": cells}], title="t")
    assert ">inf<" in html


def test_positions():
    positions = [
        {"first": 1, "last": 4, "nats": 8.0, "tokens": 4},
        {"first": 5, "last": 8, "nats": None, "tokens": 4},
    ]
    cells = [cell("a", 8, 3.0, by_position=positions)]
    sections = perplexity_sections(all_cells([{"results": cells}]))
    (placed,) = sections[1:]
    assert placed.header == ["tokens read before", "1 to 4", "5 to 8"]
    assert placed.rows == [["a", "7.4", "–"]]


def specification(lines, **options):
    return LineChart(lines, "x", "y", **options).specification({})


def test_the_axis_of_one_model_is_wide_enough_that_noise_is_no_trend():
    """A line from 251.1 to 251.75 fills 2 % of the axis, not all of it."""
    flat = Line("a", [1, 2, 3], [251.1, 251.75, 251.4])
    for log_y in (True, False):
        made = specification([flat], log_y=log_y)
        low, high = made["layer"][0]["encoding"]["y"]["scale"]["domain"]
        assert low < 240 and high > 265
        other = Line("b", [1, 2, 3], [250.0, 251.0, 252.0])
        made = specification([flat, other], log_y=log_y)
        assert "domain" not in made["layer"][0]["encoding"]["y"]["scale"]  # a comparison
    wide = specification([Line("a", [1, 2], [100.0, 130.0])], log_y=True)
    assert "domain" not in wide["layer"][0]["encoding"]["y"]["scale"]


def test_a_legend_has_at_most_eight_names_and_the_others_come_on_demand():
    models = [Line(f"m{i}", [1, 2], [i, i + 0.5], colour=f"m{i}") for i in range(5)]
    scaled = [Line(f"m{i} + NTK", [1, 2], [9, 9], colour=f"m{i}", main=False) for i in range(5)]
    last = [Line(f"m{i}, last", [1, 2], [5, 5], colour=f"m{i}", named=False) for i in range(5)]

    def shown(lines):
        made = specification(lines)
        points = [point for rows in made["datasets"].values() for point in rows]
        names = made["layer"][0]["encoding"]["color"]["legend"]["values"]
        return names, {p["line"] for p in points if p["first"]}, made["usermeta"]["hidden"]

    names = [line.label for line in models]
    assert shown([*models, *scaled[:3], *last]) == (
        [*names, *(line.label for line in scaled[:3])],
        {line.label for line in [*models, *scaled[:3], *last]},
        0,
    )
    assert shown([*models, *scaled, *last]) == (
        names, {*names, *(line.label for line in last)}, 5,
    )  # fmt: skip
    many = [Line(f"m{i}", [1, 2], [i, i]) for i in range(12)]
    assert shown(many)[0] == [f"m{i}" for i in range(8)] and shown(many)[2] == 4


def test_a_line_under_another_is_wider_than_it():
    """Two models that find every passkey are both to be seen."""
    found = Line("a", [1, 2, 4], [1.0, 1.0, 1.0]), Line("b", [1, 2, 4], [1.0, 1.0, 0.999])
    apart = Line("c", [1, 2, 4], [1.0, 0.5, 0.0])
    scale = specification([*found, apart])["layer"][0]["encoding"]["strokeWidth"]["scale"]
    widths = dict(zip(scale["domain"], scale["range"], strict=True))
    assert widths["a"] > widths["b"] == widths["c"]


@pytest.mark.parametrize("folder", sorted(p for p in RESULTS.iterdir() if any(p.glob("*.json"))))
def test_a_published_study_shows_a_chart_first(folder):
    sections = page_sections(*tasks_and_runs(read_results([folder])), False)
    assert sections[0].chart and sections[0].title


def test_titles_of_charts_are_findings():
    cells = [*CELLS, passkey("a", 64, 2)]
    needle = {"task": "needles", "kind": "single", "length": 512, "scaling": "none", "samples": []}
    needle |= {"model": "a", "recall": 0.5, "metric": "R-precision", "training_length": 64}
    html = build_report([{"results": [*cells, needle], "training": [TRAINING]}])
    charts, titles = (
        html.count('<div class="chart">'),
        re.findall(r'<p class="kicker">.*</p>\s*<h2>(.*)</h2>', html),
    )
    assert len(titles) == charts == 4
    assert titles[2] == (
        "At 512 tokens (8 × the training length) a finds 50% of the facts (single)."
    )
    assert titles[3] == "Lowest training loss at the end: 4, of RoFormer."
