"""The report page from result files."""

import json
import re
from html.parser import HTMLParser

import pytest

from coca_attention.report import build_report, write_report
from coca_attention.report.lines import by_line
from coca_attention.report.perplexity import (
    perplexity_findings,
    perplexity_sections,
)
from coca_attention.report.results import all_cells, read_results


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
        "seed": 0,
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
    "command": "coca quickstart",
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


def test_the_page_needs_nothing_from_outside(html):
    page = Page(html)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"url\((?!#)|@import|<script|<link", html)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert all("w3.org" in address or "purl.org" in address for address in addresses), addresses


def test_ids_are_unique_and_references_resolve(html):
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    internal = set(re.findall(r"url\(#([^)]+)\)", html))
    internal |= {reference[1:] for reference in page.references}
    assert internal and internal <= set(page.ids)


def test_figures_tables_and_settings_are_there(html):
    text = Page(html).text
    for expected in (
        "A & B", "RoFormer + NTK (4)", "RoFormer, last 64 tokens only", "54.00", "48.60 to 59.40",
        "training length", "12,345", "A <processor>", "coca quickstart", "3276.00", "101.13",
        "perplexity (lower is better)", "Recipe of RoFormer", "learning_rate: 0.003",
        "training loss (nats per token)",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_best_of_a_column_is_marked_and_attend_last_is_not_in_the_race():
    html = build_report([CONTENT], title="t")
    assert re.findall(r'<span class="bold">([\d.]+)</span>', html) == ["40.00", "40.00", "54.00"]


def findings(cells):
    return perplexity_findings(all_cells([{"results": cells}]))


def test_findings_depend_on_the_attention_of_a_model_and_not_on_its_name():
    named = [
        cell("a", 64, 40.0, attention="rope"),
        cell("b", 64, 41.5, attention="a new form"),
        cell("c", 64, 30.0, attention="alibi"),
        cell("CoCA-Slack", 64, 30.0, attention=None),
    ]
    assert findings(named) == [
        "b against a: perplexity 41.5 against 40.0 (3.8% higher) at 64 tokens, perplexity 41.5 "
        "against 40.0 (3.8% higher) at 64 (1 × the training length)."
    ]
    old = [cell["attention"] for cell in all_cells([CONTENT])]
    assert old == ["rope"] * 5 + ["slack"] * 2


def test_findings_follow_the_numbers_whichever_way_they_fall():
    sentences = findings(CELLS)
    assert sentences[0] == (
        "CoCA-Slack against RoFormer: perplexity 41.5 against 40.0 (3.8% higher) at 64 tokens, "
        "perplexity 54.0 against 90.0 (40.0% lower) at 128 (2 × the training length)."
    )
    assert sentences[1] == (
        "At 128 tokens no model has a lower perplexity than with its last tokens only: none of "
        "them benefits from the longest window yet."
    )
    better = [*CELLS, cell("CoCA-Slack", 64, 60.0, "attend-last")]
    assert findings(better)[1:] == [
        "At 128 tokens the perplexity of CoCA-Slack is lower than with the last 64 tokens only."
    ]


def test_changes_carry_an_interval_over_paired_documents():
    def with_documents(model: str, factor: float) -> dict:
        documents = [
            {"id": str(i), "nats": 100 * (3 + i % 4) + 100 * factor, "tokens": 100}
            for i in range(20)
        ]
        return cell(model, 64, 40.0, documents=documents)

    cells = [with_documents("RoFormer", 0.0), with_documents("CoCA-Slack", -0.1)]
    sentence = findings(cells)[0]
    assert "95 % interval −9.5% to −9.5%" in sentence


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
        ('{"results": [{"task": "perplexity", "model": "m"}]}', "lacks the field 'scaling'"),
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
    with pytest.raises(ValueError, match=r"RoFormer .none. at 64 tokens twice"):
        build_report([{"results": [*CELLS, other]}])


def test_the_attend_last_line_of_two_evaluations_is_one():
    again = {**CELLS[2], "seconds": 3.0}
    assert by_line([*CELLS, again], "window") == by_line(CELLS, "window")


def test_a_folder_is_no_page_to_write(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(CONTENT))
    with pytest.raises(ValueError, match="is a folder; choose a file to write"):
        write_report([path], tmp_path, title="t")


def test_infinite_perplexity_is_shown_as_inf():
    cells = [cell("m", 64, 2.0), cell("m", 128, 2.0, perplexity=None, ci95=None)]
    html = build_report([{"results": cells}], title="t")
    assert ">inf<" in html


def test_positions_and_key_tokens():
    positions = [
        {"first": 1, "last": 4, "nats": 8.0, "tokens": 4},
        {"first": 5, "last": 8, "nats": None, "tokens": 4},
    ]
    cells = [cell("a", 8, 3.0, key_tokens=4, key_perplexity=7.389, by_position=positions)]
    sections = perplexity_sections(all_cells([{"results": cells}]))
    placed, keyed = sections[3:]
    assert placed.header == ["tokens read before", "1 to 4", "5 to 8"]
    assert placed.rows == [["a", "7.4", "–"]]
    assert keyed.rows == [["a", "7.4"]] and keyed.note == "4 tokens."
