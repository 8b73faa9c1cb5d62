"""The report page from result files."""

import json
import random
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
from result_cells import (
    CELLS,
    CONTENT,
    ENVIRONMENT,
    TRAINING,
    Page,
    passkey,
    perplexity,
    ruler,
    study,
    training,
)

from coca_attention.errors import UserError
from coca_lab.report import build_report, printed_tables, write_report
from coca_lab.report.result_files import paper_figures, parsed, read_results
from coca_lab.report.task_sections import by_task
from coca_lab.studies import load_study, run_study
from commands import run
from covering import mostly_slow
from runs import OPTIONS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def html():
    return build_report([CONTENT], title="A & B")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_the_page_needs_nothing_from_outside_and_is_small(html, page):
    assert page.references
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert len(html) < 300_000
    assert not re.search(r"url\((?!#)|@import|<script|stylesheet", html)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert all("w3.org" in address or "purl.org" in address for address in addresses), addresses
    assert len(page.ids) == len(set(page.ids))
    internal = set(re.findall(r"url\(#([^)]+)\)", html))
    assert internal and internal <= set(page.ids)
    assert html == build_report([CONTENT], title="A & B")  # the same every time


def test_a_chart_is_there_for_wide_and_narrow_pages_in_the_colours_of_the_page(html, page):
    assert html.count('role="img"') == 1
    assert html.count('class="wide"') == html.count('class="narrow"') == 1
    assert html.count('class="marks"') == 2
    assert "<title>RoFormer + NTK to 4 L: 60 at 128 (54 to 66)</title>" in html
    assert "RoFormer, the last 64 tokens alone: 41 at 64 to 41 at 128" in html
    # Colours are set by the page, which is light or dark.
    assert not re.search(r'(stroke|fill)="#[0-9a-f]{6}"', html)
    defined = set(re.findall(r"(--\w+):", html))
    assert set(re.findall(r"var\((--\w+)\)", html)) <= defined
    assert "prefers-color-scheme: dark" in html


WIDER = """<script>onload = () => {
  const tables = [...frames[0].document.querySelectorAll(".scroll")];
  document.title = tables.map((table) => table.scrollWidth > table.clientWidth);
}</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_tables_fit_their_page_by_wrapping(tmp_path, undrawn):
    """The last column, which compares, was cut: in pages with empty margins, and on phones."""
    lengths = [2**i for i in range(6, 14)]
    names = ["A model with a name of 34 letters.", "b"]
    scores = [perplexity(name, n, 40.0 + i) for i, name in enumerate(names) for n in lengths]
    eight = [{"results": scores, "training": [TRAINING]}]
    quickstart, extend = (
        read_results([ROOT / "results" / name]) for name in ("quickstart", "extend")
    )
    for contents, width, wider in (
        (eight, 1200, ["false", "false"]),
        (eight, 400, ["true", "true"]),
        (quickstart, 1000, ["false", "false"]),
        (extend, 400, ["false"] * 6),
    ):
        # In a frame, since Chromium's own windows have at least 500 pixels.
        page = escape(build_report(contents))
        frame = f'<iframe srcdoc="{page}" style="width: {width}px; border: 0"></iframe>'
        (tmp_path / "page.html").write_text(WIDER + frame)
        options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path}/profile"]
        options += ["--window-size=1300,900", "--dump-dom"]
        command = ["chromium", *options, (tmp_path / "page.html").as_uri()]
        page = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        assert re.findall("<title>(.*?)</title>", page)[0].split(",") == wider, width


def test_a_table_that_is_wider_than_its_page_says_so_at_any_width(html):
    """Its scrolling shows hint and edge; a query of the width is for browsers that cannot do so."""
    style = html.partition("<style>")[2].partition("</style>")[0]
    known, _, old = style.partition("@supports not (animation-timeline: scroll())")
    assert "scroll-timeline: --sideways inline" in known and "timeline-scope: --sideways" in known
    assert ".scroll, .hint { animation-timeline: --sideways; }" in known
    assert "visibility: visible" in known.partition("@keyframes hint")[2]
    assert "dashed" in known.partition("@keyframes edge")[2]
    assert "@media" in old and ".hint { visibility: visible" in old


def test_figures_tables_and_settings_are_there(page):
    for expected in (
        "A & B", "RoFormer + NTK to 4 L", "RoFormer, the last 64 tokens alone", "54.00",
        "48.60 to 59.40", "training context", "12,345", "A <processor>", "coca study quickstart",
        "perplexity (lower is better)", "Recipe of RoFormer", "learning_rate: 0.003",
    ):  # fmt: skip
        assert expected in page.text, expected


def test_the_command_says_what_a_check_decided_and_that_it_replaces_a_page(
    tmp_path, undrawn, capsys
):
    output = tmp_path / "r.html"
    words = ["report", ROOT / "results" / "extend", "--output", output]
    for replaced in ("", ", in place of the page that was there"):
        code, said, err = run(capsys, *words)
        assert (code, err) == (0, "")
        decision, report = said.splitlines()
        assert decision.startswith("shifted is taken: it gives a digit beyond L a probability of")
        assert report == f"Report: {output}{replaced}"
    output.write_text("mine")
    code, _, err = run(capsys, *words)
    assert code == 2 and "is there and no page of coca report" in err
    assert output.read_text() == "mine"


def test_headings_name_what_was_measured(undrawn):
    page = build_report([{"results": [*CELLS, passkey("a", 64, 2)], "training": [TRAINING]}])
    title = "Perplexity against context length · Passkey retrieval"
    assert f"<h1>{title}</h1>" in page and f"<title>{title}</title>" in page
    share = {"value": 0.3, "ci95": [0.2, 0.4]}
    reading = {"method": "leaky", "verdict": "loses 2 %", "perplexity": None, "runs_in": "vLLM"}
    check = {"decision": "leaky is taken: beyond L < 1.26", "training_length": 1024}
    check["left_out"] = ["Not measured: shifted (too far)"]
    for far in (None, share):
        check["readings"] = [reading | {"back": share, "far": far, "taken": True}]
        page = build_report([{"results": CELLS, "check": check}])
        assert re.search(r"</h1>\s*<p>leaky is taken: beyond L &lt; 1.26</p>", page)
        assert "<h1>Which method reads farther</h1>" in page
        assert re.findall(r"<h2>(.*)</h2>", page)[0] == "Methods compared, L = 1,024 tokens"
        assert ("Dots, a row a method" in page) == (far is not None)
        assert "found whole. Not measured: shifted (too far)." in page
    assert "loses 2 %" in page and "<small>20% to 40%</small>" in page
    check["readings"] = [reading | {"back": {"value": 0.3}, "far": share}]
    page = build_report([{"results": CELLS, "check": check}])
    assert "<small>too few documents</small>" in page
    study = [{"results": CELLS, "study": {"title": "Four sizes"}}, {"results": CELLS}]
    assert "<h1>Four sizes</h1>" in build_report([study[0], *paper_figures()])
    assert "<h1>Perplexity against context length</h1>" in build_report(study[1:])
    every = [passkey("a", 64, 2), ruler("a", "vt", 512, 0.0, 1.0)]
    page = build_report([{"results": every, "training": [TRAINING]}])
    headings = ["Passkeys found, by prompt length", "RULER, vt", "Training"]
    assert re.findall(r"<h2>(.*)</h2>", page) == headings
    with pytest.raises(UserError, match=r"neither results that .*; they are of x"):
        build_report([{"results": [{"task": "x"}]}])


def test_a_run_is_called_by_its_folder_and_a_copy_of_its_file_by_its_name(tmp_path, undrawn):
    (tmp_path / "from-a-run").mkdir()
    files = [tmp_path / "from-a-run" / "training.json", tmp_path / "from-a-copy.json"]
    for path in files:
        path.write_text(json.dumps({k: v for k, v in TRAINING.items() if k != "name"}))
    found = read_results([files[0].parent, files[1]])
    assert [content["training"][0]["name"] for content in found] == ["from-a-run", "from-a-copy"]
    page = write_report(found[:1], tmp_path / "out" / "report.html").read_text()
    assert "<h1>Training</h1>" in page and "<div>from-a-run</div>" in page


def test_a_point_claimed_twice_and_a_folder_for_the_page_are_refused(tmp_path, undrawn):
    documents = [{"id": "a", "nats": 2.0, "tokens": 1000}]
    other = perplexity("RoFormer", 64, 41.0, documents=documents)
    with pytest.raises(ValueError, match=r"one.json: two .* figures of RoFormer .none. at 64"):
        build_report([{"results": [*CELLS, other], "file": "one.json"}])
    keys = passkey("RoFormer", 512, 9)
    build_report([{"results": [keys, keys]}])  # the same figure is no contradiction
    with pytest.raises(ValueError, match=r"two .* figures of RoFormer .none. at 512"):
        build_report([{"results": [keys, {**keys, "accuracy": 0.1}]}])
    with pytest.raises(ValueError, match="is a folder; choose a file to write"):
        write_report([{"results": CELLS}], tmp_path)


def test_a_study_says_which_of_its_models_failed_and_why(
    tmp_path, model_folder, text_folder, undrawn
):
    options = {**OPTIONS, "data.source": str(text_folder), "data.block_length": 99_999}
    asked = {"models": {"good": str(model_folder), "broken": {"model.attention": "rope"}}}
    asked |= {"options": options, "passkey": {"lengths": [300], "samples": 1}}
    (tmp_path / "study.yaml").write_text(json.dumps(asked))
    with pytest.raises(UserError, match="1 of 2 trials failed, first broken") as failed:
        run_study(load_study(tmp_path / "study.yaml"), tmp_path / "out", workers=0)
    said = Page((tmp_path / "out" / "report.html").read_text()).text
    assert "1 model failed and is in no figure of this page" in said
    (why,) = json.loads((tmp_path / "out" / "results.json").read_text())["failures"].values()
    assert why in str(failed.value) and f"broken: {why}" in said
    merged = build_report([CONTENT, {"failures": {HOSTILE: "x", "b": "y"}}])
    assert "2 models failed and are in" in merged and HOSTILE not in merged
    assert "failed" not in build_report([CONTENT])


def written(folder, name, cells, **more):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"results": cells, "environment": ENVIRONMENT, **more}))
    return path


def test_results_on_other_texts_stand_apart(tmp_path, undrawn):
    text = [{"id": "b", "nats": 1.0, "tokens": 1000}]
    other = [perplexity(name, 64, value, documents=text) for name, value in (("C", 20), ("D", 30))]
    files = [written(tmp_path, "a.json", CELLS), written(tmp_path, "b.json", other)]
    text = Page(build_report(read_results(files))).text
    title = "Perplexity against context length"
    assert f"{title}, texts 1 of 2: RoFormer, CoCA-Slack ({files[0]})" in text
    assert f"{title}, texts 2 of 2: C, D ({files[1]})" in text
    assert "Perplexity against the length read at once (texts 2 of 2)" in text
    titles = [title for title, _, _ in printed_tables([*CELLS, *other])]
    assert titles == [
        "Perplexity against the length read at once (texts 1 of 2)",
        "Perplexity against the length read at once (texts 2 of 2)",
    ]


TEXT, OTHER = perplexity("a", 64, 2.0, text="0"), perplexity("b", 64, 3.0)
KEYS, MORE = passkey("a", 512, 9), passkey("b", 512, 2)
MOVED = [{**sample, "distance": sample["distance"] + 1} for sample in MORE["samples"]]


@pytest.mark.parametrize(
    ("one", "other", "processor", "groups"),
    [
        (TEXT, OTHER | {"stride": 32}, "A", 2),
        (TEXT, OTHER | {"targets": "all"}, "A", 2),
        (TEXT, OTHER | {"text": "1"}, "A", 2),
        (TEXT, OTHER | {"documents": [{"id": "a", "nats": 1.0, "tokens": 999}]}, "A", 2),
        (TEXT, OTHER | {"window": 128}, "B", 1),  # an old file: no text in it
        (KEYS, MORE, "B", 1),
        (KEYS, passkey("b", 1024, 2), "A", 1),
        (KEYS, MORE | {"samples": MOVED}, "A", 2),  # of another seed or tokenizer
        (KEYS, MORE | {"samples": MORE["samples"][:5]}, "A", 2),
    ],
)
def test_results_are_compared_on_one_text_with_the_same_prompts(one, other, processor, groups):
    contents = [
        {"results": [cell], "environment": {**ENVIRONMENT, "processor": name}, "file": file}
        for cell, name, file in ((one, "A", "1"), (other, processor, "2"))
    ]
    (found,) = by_task(parsed(contents)).values()
    assert len(found) == groups


def test_one_model_measured_twice_is_told_apart_by_its_files(tmp_path, undrawn):
    other = [perplexity("RoFormer", 64, 41.0), perplexity("RoFormer", 64, 41.0, "attend-last")]
    run = {**TRAINING, "seconds": 4.0, "curve": [{"step": 1, "loss": 6.0}]}
    files = [
        written(tmp_path, "one/results.json", CELLS, training=[TRAINING]),
        written(tmp_path, "two/results.json", other, training=[run]),
    ]
    text = Page(build_report(read_results(files))).text
    for name in ("RoFormer (one)", "RoFormer (one) + NTK to 4 L", "RoFormer (two)"):
        assert name in text, name
    assert "CoCA-Slack (" not in text and "Recipe of RoFormer (two)" in text
    # Copies of one result are no second measurement, whatever else their files have.
    files = [written(tmp_path, "three.json", CELLS[:3]), files[0]]
    assert "RoFormer (" not in Page(build_report(read_results(files))).text
    # Neither is a name enough: these are two models.
    larger = [perplexity("RoFormer", 256, 50.0, training_length=128)]
    files = [files[0], written(tmp_path, "larger.json", larger)]
    assert "RoFormer (larger)" in Page(build_report(read_results(files))).text
    # Nor of runs.
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
    # Numbered files are of a shorter run or another measurement; named alone, they are read.
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

    def found(name):
        documents = [{"id": name, "nats": 350.0, "tokens": 1000}]
        cells = [perplexity(name, window, 40.0, documents=documents) for window in (64, 128)]
        run = {**TRAINING, "name": name, "recipe": {"data": {"source": name}}}
        environment = {**ENVIRONMENT, "processor": name, "command": name}
        content = {"results": [*cells, passkey(name, 64, 3)], "training": [run], "file": name}
        return Page(build_report([content | {"environment": environment}], title=name)).found

    hostile, plain = found(HOSTILE), found("x")
    assert hostile["script"] == plain["script"] == 0 and hostile["svg"] == plain["svg"] > 0
    assert hostile["img"] == 0 and not hostile["onerror"]


def test_charts_are_files_for_papers(tmp_path):
    """With literal colours on white, as wide as a column, with labels of 7 to 8.3 points there."""
    file = written(tmp_path, "r.json", [*CELLS, passkey("a", 64, 2), passkey("a", 128, 1)])
    write_report(read_results([file]), tmp_path / "page.html", figures=tmp_path / "figures")
    names = ["1-perplexity-against-the-length-read-at-once", "2-passkeys-found-by-prompt-length"]
    expected = {f"{name}.{ending}" for name in names for ending in ("svg", "pdf", "png")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == expected
    svg = (tmp_path / "figures" / f"{names[0]}.svg").read_text()
    assert "var(" not in svg and ">RoFormer</text>" in svg and "#c9480d" in svg
    for name in names:
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert re.match(r'<svg[^>]* width="3.3000in" height="[\d.]+in"', svg)
        assert 'fill="#ffffff"' in svg
        scale = 3.3 * 72 / float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])  # points of a pixel
        sizes = {float(size) * scale for size in re.findall(r'font-size="([\d.]+)px"', svg)}
        assert sizes and min(sizes) >= 7 and max(sizes) < 8.5
        pdf = (tmp_path / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"MediaBox [0 0 237.6 " in pdf
        png = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") == 1320


def places(value, path=()):
    """Where the values of nested lists and objects are."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield (*path, name)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, name))


def mutated(content, draw):
    """A copy in which one or two values are others, are missing, or stand twice."""
    content = json.loads(json.dumps(content))
    for _ in range(draw.choice((1, 1, 2))):
        *path, last = draw.choice([*places(content)])
        inner = content
        for name in path:
            inner = inner[name]
        what = draw.random()
        if what < 0.3:
            del inner[last]
        elif what < 0.4 and isinstance(inner, list):
            inner.append(inner[last])
        else:
            inner[last] = draw.choice([None, -1, 0, 1.5, "x", "", [], {}, True, 1e308, 10**400])
    return content


@pytest.mark.parametrize("seed", mostly_slow(range(48), range(12)))  # each content twice
def test_a_damaged_result_is_named_or_drawn(tmp_path, undrawn, seed):
    """Nothing but UserErrors, whatever the content of a file: checked as it is read."""
    run = training()
    seeds = [cell for n in (0, 1) for name in "ab" for cell in study(name, n, 5, 40.0, 100.0)]
    harness = {"lm_eval_version": "0.4", "model_name": "a/b", "results": {"x": {"acc,none": 0.5}}}
    bad = [CONTENT, {"results": seeds}, {"results": [passkey("a", 64, 2)]}, harness, run]
    path = tmp_path / "results.json"
    content = bad[seed % len(bad)]
    path.write_text(json.dumps(content))
    assert "<table" in build_report(read_results([path]))
    path.write_text(json.dumps(mutated(content, random.Random(seed))))
    try:
        page = build_report(read_results([path]))
    except UserError as error:
        said = str(error)
        assert str(path) in said or "neither results that the report shows" in said
    else:
        assert "</html>" in page


def test_a_number_that_no_float_holds_is_named():
    cell = {"task": "harness", "model": "m", "name": "x", "harness": "1", "limit": None}
    with pytest.raises(UserError, match=r"results: not a result file: results\.0\.metrics\.acc"):
        build_report([{"results": [cell | {"metrics": {"acc,none": 10**400}}]}])


def test_a_long_run_with_a_byte_order_mark_makes_a_small_page(tmp_path, undrawn):
    run = TRAINING | {"curve": [{"step": step, "loss": 3.5} for step in range(1, 20_001)]}
    path = tmp_path / "training.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(run).encode())  # as Windows' editors save it
    assert len(build_report(read_results([path]))) < 300_000
