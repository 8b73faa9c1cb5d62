"""What results/extend says of readings near twice the training length, against their files."""

import math
import re

import pytest
from test_pages import ROOT, cells_of_row

from coca_lab.cells import ATTEND_LAST as ALONE
from coca_lab.evaluation.choice import loss_of
from coca_lab.evaluation.needles import scores_of
from coca_lab.files import read_json
from coca_lab.intervals import DocumentScore, differences, mean_nats, nats_interval

FOLDER = ROOT / "results/extend"
NAMES = {
    "shifted distances": "shifted",
    "leaky distances": "leaky",
    "Self-Extend": "self_extend",
    "YaRN": "yarn",
    "dynamic NTK": "dynamic",
    "limited distances": "limited",
    "as it is": "none",
}


def read_beyond(*names):
    """Of files, the cells of texts longer than L, by task and method."""
    cells = [cell for name in names for cell in read_json(FOLDER / f"{name}.json")["results"]]
    needles = {
        cell["scaling"]: cell
        for cell in cells
        if cell["task"] == "needles" and cell["length"] > 8192
    }
    texts = {
        cell["scaling"]: cell
        for cell in cells
        if cell["task"] == "perplexity" and (cell["window"] > 8192 or cell["scaling"] == ALONE)
    }
    return needles, texts


def section_of(heading):
    page = (FOLDER / "README.md").read_text("utf-8")
    return page.partition(f"### {heading}")[2].partition("\n#")[0]


@pytest.mark.parametrize(
    ("heading", "files"),
    [
        ("Leaky distances there", ["twice/leaky"]),
        ("Other methods there", ["twice/leaky", "twice/others"]),
        ("Shifted distances at their reach", ["reach/results", "reach/others"]),
    ],
)
def test_tables_near_twice_the_training_length_are_of_their_files(heading, files):
    needles, texts = read_beyond(*files)
    section = section_of(heading)
    names = {name: method for name, method in NAMES.items() if method in needles}
    assert len(names) == len(needles)
    for name, method in names.items():
        ranges = needles[method]["ranges"].values()
        digits = [f"{math.exp(-part['nats']):.1%}".replace("%", " %") for part in ranges]
        found = [str(part["found"]) for part in ranges]
        assert [part["needles"] for part in ranges] == [20, 20]
        shown = [f"{texts[method]['perplexity']:.2f}", *digits, *found]
        assert cells_of_row(section, name) == shown


@pytest.mark.parametrize(
    ("heading", "file", "method"),
    [
        ("Leaky distances there", "twice/leaky", "leaky"),
        ("Shifted distances at their reach", "reach/results", "shifted"),
    ],
)
def test_far_digits_are_likelier_than_with_limited_distances(heading, file, method):
    """And than a guess, in every book."""
    far, _ = read_beyond(file)
    beyond = [
        scores_of(far[each]["documents"], far[each]["near"], True) for each in (method, "limited")
    ]
    pairs = differences(*beyond)
    low, high = nats_interval(pairs)
    more = f"{-mean_nats(pairs):.2f} nats per digit fewer than limited distances"
    assert f"{more} ({-high:.2f} to {-low:.2f})" in " ".join(section_of(heading).split())
    _, most = nats_interval(beyond[0])
    assert high < 0 and most < math.log(10)
    assert all(score.nats < math.log(10) * score.tokens for score in beyond[0])


def test_the_other_methods_at_twice_the_training_length_are_level_with_leaky_distances():
    needles, texts = read_beyond("twice/leaky", "twice/others")
    said = " ".join(section_of("Other methods there").split())
    beyond = {
        name: scores_of(cell["documents"], cell["near"], True) for name, cell in needles.items()
    }
    assert min(needles, key=lambda name: needles[name]["ranges"]["beyond"]["nats"]) == "leaky"
    nats = {}
    for name in ("self_extend", "yarn", "dynamic"):
        pairs = differences(beyond[name], beyond["leaky"])
        nats[name] = [mean_nats(pairs), *nats_interval(pairs)]
    mean, low, high = nats["self_extend"]
    assert f"{mean:.3f} more with Self-Extend ({low:.4f} to {high:.4f}, shown" in said
    mean, low, high = nats["yarn"]
    assert f"{mean:.2f} more with YaRN (−{-low:.2f} to +{high:.2f})" in said
    mean, low, high = nats["dynamic"]
    assert f"{mean:.2f} more with dynamic NTK (−{-low:.2f} to +{high:.2f})" in said
    for name in ("yarn", "dynamic"):
        mean, low, high = (f"{end:.1f}" for end in percent(texts[name], texts["leaky"]))
        assert re.search(rf"{mean} % higher with [^(]*\({low} to {high}\)", said)


def test_shifted_distances_at_their_reach_find_more_than_yarn_and_leaky_distances():
    needles, _ = read_beyond("reach/results", "reach/others")
    said = " ".join(section_of("Shifted distances at their reach").split())
    nats = {}
    for name in ("yarn", "leaky"):
        for beyond in (True, False):
            scores = [
                scores_of(needles[each]["documents"], needles[each]["near"], beyond)
                for each in ("shifted", name)
            ]
            pairs = differences(*scores)
            nats[name, beyond] = [mean_nats(pairs), *nats_interval(pairs)]
    mean, low, high = nats["yarn", True]
    assert f"{-mean:.2f} nats fewer than YaRN ({-high:.2f} to {-low:.2f})" in said
    mean, low, high = nats["leaky", True]
    assert f"{-mean:.2f} fewer than leaky distances ({-high:.2f} to {-low:.2f})" in said
    mean, low, high = nats["yarn", False]
    assert f"{mean:.2f} more than YaRN (−{-low:.2f} to +{high:.2f})" in said
    mean, low, high = nats["leaky", False]
    assert f"{mean:.2f} more than leaky distances (−{-low:.2f} to +{high:.2f})" in said


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ALONE, "above that of the last 8,192 tokens alone"),
        ("limited", "above that of limited"),
        ("leaky", "above that of leaky"),
        ("yarn", "below that of YaRN"),
    ],
)
def test_what_shifted_distances_cost_at_their_reach_is_of_their_files(other, words):
    _, texts = read_beyond("reach/results", "reach/others")
    said = " ".join(section_of("Shifted distances at their reach").split())
    mean, low, high = percent(texts["shifted"], texts[other])
    assert low < 0 < high
    assert re.search(rf"{abs(mean):.1f} % {words}[^(]*\(−{-low:.1f} to \+{high:.1f}\)", said)


def test_what_readme_says_of_their_reach_is_of_the_files():
    needles, _ = read_beyond("reach/results", "reach/others")
    far = {name: cell["ranges"]["beyond"] for name, cell in needles.items()}
    readme = (ROOT / "README.md").read_text("utf-8")
    as_it_is, yarn, shifted = (str(far[name]["found"]) for name in ("none", "yarn", "shifted"))
    row = [cell.strip("*") for cell in cells_of_row(readme, "whole numbers in 16,256 tokens")]
    assert row == [as_it_is, "not read", yarn, f"{shifted} of 20"]
    assert f"in {shifted} of 20 numbers where YaRN has {yarn} (four other books;" in readme
    digits = [f"{math.exp(-far[name]['nats']):.0%}" for name in ("shifted", "yarn")]
    assert f"a digit has {' and '.join(digits)}).".replace("%", " %") in readme


def percent(mine, theirs):
    """How much higher a perplexity is than another in the same documents, with its interval."""
    documents = [[DocumentScore.of(each) for each in cell["documents"]] for cell in (mine, theirs)]
    pairs = differences(*documents)
    return [100 * math.expm1(nats) for nats in (mean_nats(pairs), *nats_interval(pairs))]


def test_what_leaky_distances_lose_within_the_training_length_cannot_be_told():
    """By four books: the interval of perplexity has 0 and the margin, that of needles neither."""
    cells = [
        cell
        for cell in read_json(FOLDER / "twice/leaky.json")["results"]
        if 8192 in (cell.get("length"), cell.get("window")) and cell["scaling"] != "attend-last"
    ]
    read = {(cell["task"], cell["scaling"]): cell["documents"] for cell in cells}
    documents = [
        [DocumentScore.of(each) for each in read["perplexity", method]]
        for method in ("leaky", "none")
    ]
    lost = loss_of(*documents, math.log1p(0.01))
    low, high = (100 * math.expm1(end) for end in lost.interval)
    page = " ".join((FOLDER / "README.md").read_text("utf-8").split())
    said = f"Perplexity is {100 * math.expm1(lost.mean):.1f} % higher (−{-low:.1f} to +{high:.1f})"
    assert lost.word == "cannot tell" and said in page
    scores = [scores_of(read["needles", method]) for method in ("leaky", "none")]
    lost = loss_of(*scores, 0.05)
    low, high = lost.interval
    said = f"{-lost.mean:.2f} nats fewer than in the model as it is ({-low:.2f} fewer to {high:.2f}"
    assert lost.word == "no loss shown" and said in page
