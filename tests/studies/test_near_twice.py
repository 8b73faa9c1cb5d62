"""What results/extend says of readings near twice the training length, against their files."""

import math
import re

import pytest
from test_pages import ROOT, cells_of_row

from coca_lab.evaluation.choice import loss_of
from coca_lab.evaluation.needles import scores_of
from coca_lab.files import read_json
from coca_lab.intervals import DocumentScore, differences, mean_nats, nats_interval


@pytest.mark.parametrize(
    ("file", "heading", "names"),
    [
        (
            "twice/leaky.json",
            "### Leaky distances there",
            {"leaky distances": "leaky", "limited distances": "limited", "as it is": "none"},
        ),
        (
            "reach/results.json",
            "### Shifted distances at their reach",
            {"shifted distances": "shifted", "limited distances": "limited"},
        ),
    ],
)
def test_readings_near_twice_the_training_length_are_those_of_their_files(file, heading, names):
    """The tables, and that a digit beyond L is likelier than with limited ones, by intervals."""
    folder = ROOT / "results/extend"
    section = (folder / "README.md").read_text("utf-8").partition(heading)[2].partition("\n#")[0]
    far = {}
    texts = {}
    for cell in read_json(folder / file)["results"]:
        if cell["task"] == "needles" and cell["length"] > 8192:
            far[cell["scaling"]] = cell
        elif cell["task"] == "perplexity" and cell["window"] > 8192:
            texts[cell["scaling"]] = cell
    for name, method in names.items():
        ranges = far[method]["ranges"].values()
        digits = [f"{math.exp(-part['nats']):.1%}".replace("%", " %") for part in ranges]
        found = [str(part["found"]) for part in ranges]
        assert [part["needles"] for part in ranges] == [20, 20]
        shown = [f"{texts[method]['perplexity']:.2f}", *digits, *found]
        assert cells_of_row(section, name) == shown
    method, *_ = names.values()
    beyond = [
        scores_of(far[each]["documents"], far[each]["near"], True) for each in (method, "limited")
    ]
    pairs = differences(*beyond)
    low, high = nats_interval(pairs)
    more = f"{-mean_nats(pairs):.2f} nats per digit fewer than limited distances"
    assert f"{more} ({-high:.2f} to {-low:.2f})" in " ".join(section.split())
    _, most = nats_interval(beyond[0])
    assert high < 0 and most < math.log(10)
    assert all(score.nats < math.log(10) * score.tokens for score in beyond[0])


def test_the_other_methods_at_twice_the_training_length_are_those_of_their_files():
    """The table, and what stands below it against leaky distances."""
    folder = ROOT / "results/extend"
    page = (folder / "README.md").read_text("utf-8")
    section = page.partition("### Other methods there")[2].partition("\n#")[0]
    cells = [
        cell
        for name in ("leaky", "others")
        for cell in read_json(folder / f"twice/{name}.json")["results"]
        if 16384 in (cell.get("length"), cell.get("window"))
    ]
    far = {cell["scaling"]: cell for cell in cells if cell["task"] == "needles"}
    texts = {cell["scaling"]: cell for cell in cells if cell["task"] == "perplexity"}
    names = {
        "leaky distances": "leaky", "Self-Extend": "self_extend", "YaRN": "yarn",
        "dynamic NTK": "dynamic", "limited distances": "limited", "as it is": "none",
    }  # fmt: skip
    for name, method in names.items():
        ranges = far[method]["ranges"].values()
        digits = [f"{math.exp(-part['nats']):.1%}".replace("%", " %") for part in ranges]
        found = [str(part["found"]) for part in ranges]
        shown = [f"{texts[method]['perplexity']:.2f}", *digits, *found]
        assert cells_of_row(section, name) == shown
    said = " ".join(section.split())
    beyond = {
        method: scores_of(far[method]["documents"], far[method]["near"], True) for method in far
    }
    assert min(far, key=lambda method: far[method]["ranges"]["beyond"]["nats"]) == "leaky"
    nats = {
        name: [mean_nats(pairs), *nats_interval(pairs)]
        for name in ("self_extend", "yarn", "dynamic")
        for pairs in [differences(beyond[name], beyond["leaky"])]
    }
    mean, low, high = nats["self_extend"]
    assert f"{mean:.3f} more with Self-Extend ({low:.4f} to {high:.4f}, shown" in said
    mean, low, high = nats["yarn"]
    assert f"{mean:.2f} more with YaRN (−{-low:.2f} to +{high:.2f})" in said
    mean, low, high = nats["dynamic"]
    assert f"{mean:.2f} more with dynamic NTK (−{-low:.2f} to +{high:.2f})" in said
    for name in ("yarn", "dynamic"):
        documents = [
            [DocumentScore.of(each) for each in texts[method]["documents"]]
            for method in (name, "leaky")
        ]
        pairs = differences(*documents)
        mean, low, high = (
            f"{100 * math.expm1(nats):.1f}" for nats in (mean_nats(pairs), *nats_interval(pairs))
        )
        assert re.search(rf"{mean} % higher with [^(]*\({low} to {high}\)", said)


def test_what_shifted_distances_cost_at_their_reach_is_of_their_file():
    folder = ROOT / "results/extend"
    page = " ".join((folder / "README.md").read_text("utf-8").split())
    documents = {
        cell["scaling"]: [DocumentScore.of(each) for each in cell["documents"]]
        for cell in read_json(folder / "reach/results.json")["results"]
        if cell["task"] == "perplexity"
    }
    for other, words in {
        "attend-last": "the last 8,192 tokens alone",
        "limited": "limited",
    }.items():
        pairs = differences(documents["shifted"], documents[other])
        mean = 100 * math.expm1(mean_nats(pairs))
        low, high = (100 * math.expm1(end) for end in nats_interval(pairs))
        assert low < 0 < high
        assert re.search(
            rf"{mean:.1f} % above that of {words}[^(]*\(−{-low:.1f} to \+{high:.1f}\)", page
        )


def test_what_leaky_distances_lose_within_the_training_length_cannot_be_told():
    """By four books: the interval of perplexity has 0 and the margin, that of needles neither."""
    folder = ROOT / "results/extend"
    cells = [
        cell
        for cell in read_json(folder / "twice/leaky.json")["results"]
        if 8192 in (cell.get("length"), cell.get("window")) and cell["scaling"] != "attend-last"
    ]
    read = {(cell["task"], cell["scaling"]): cell["documents"] for cell in cells}
    documents = [
        [DocumentScore.of(each) for each in read["perplexity", method]]
        for method in ("leaky", "none")
    ]
    lost = loss_of(*documents, math.log1p(0.01))
    low, high = (100 * math.expm1(end) for end in lost.interval)
    page = " ".join((folder / "README.md").read_text("utf-8").split())
    said = f"Perplexity is {100 * math.expm1(lost.mean):.1f} % higher (−{-low:.1f} to +{high:.1f})"
    assert lost.word == "cannot tell" and said in page
    scores = [scores_of(read["needles", method]) for method in ("leaky", "none")]
    lost = loss_of(*scores, 0.05)
    low, high = lost.interval
    said = f"{-lost.mean:.2f} nats fewer than in the model as it is ({-low:.2f} fewer to {high:.2f}"
    assert lost.word == "no loss shown" and said in page
