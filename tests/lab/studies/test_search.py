"""Searches: the best trials go on, and nothing that is finished is done again."""

import json
import os
import subprocess
import sys
import time
from errno import ENOSPC
from pathlib import Path

import pytest
import yaml

from coca_attention.errors import TemporaryError, UserError
from coca_lab.cli import main
from coca_lab.report import build_report, printed_tables, read_results
from coca_lab.report.search import search_sections
from coca_lab.studies import search as searches
from coca_lab.studies.search import Rung, load_search, mean_ranks, search

SEARCHES = (Path(__file__).parents[3] / "searches").glob("*.yaml")
OWN = sorted(p for p in SEARCHES if p.name != "verdict.yaml")  # a study of its own reads that one


@pytest.fixture
def small(tmp_path, text_folder, tokenizer):
    """A search among three learning rates; without training (1e-9) nothing is learned."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "recipe.yaml").write_text(
        f"""
model: {{attention: strict, hidden_size: 16, num_layers: 1, num_heads: 2}}
data: {{source: {text_folder}, tokenizer: {tmp_path / "tokenizer"}, block_length: 16}}
training:
  global_batch_size: 4
  micro_batch_size: 4
  precision: float32
  log_every: 2
  save_every: 2
  report_to: []
"""
    )
    path = tmp_path / "search.yaml"
    path.write_text(
        f"""
recipe: {tmp_path / "recipe.yaml"}
trials:
  none: {{training.learning_rate: 1.0e-9}}
grid:
  training.learning_rate: [1.0e-3, 3.0e-2]
rungs:
  - {{steps: 4, keep: 2}}
  - {{steps: 6, seeds: [0, 1]}}
rank: {{perplexity: [16, 32]}}
perplexity: {{source: {text_folder}, windows: [16, 32]}}
passkey: {{lengths: [260], samples: 2, max_new_tokens: 4}}
"""
    )
    return path


@pytest.fixture
def here(monkeypatch):
    """Lists the trials that are run."""
    called, measure = [], searches.Trial._measure

    def recorded(self):
        called.append(self.name)
        return measure(self)

    monkeypatch.setattr(searches.Trial, "_measure", recorded)
    return called


def cells(results):
    return json.loads(results.read_text())["results"]


def kept(results, rung):
    return {cell["model"] for cell in cells(results) if cell["rung"] == rung and cell["kept"]}


def test_the_best_go_on_and_finished_trials_are_not_repeated(small, tmp_path, here):
    seen = []
    results = search(load_search(small), tmp_path / "out", progress=lambda *a: seen.append(a))
    found = cells(results)
    assert len(found) == 3 + 2 * 2 and len(here) == len(found)
    assert kept(results, 1) == {"learning_rate=0.001", "learning_rate=0.03"}
    assert kept(results, 2) == {"learning_rate=0.03"}
    assert seen[-1][0].startswith("4 of 4 trials of rung 2, ") and seen[-1][1:] == (4, 4)
    best = [cell for cell in found if cell["model"] == "learning_rate=0.03"]
    assert [(c["rung"], c["steps"], c["seed"]) for c in best] == [(1, 4, 0), (2, 6, 0), (2, 6, 1)]
    assert best[1]["training"]["loss"] != best[2]["training"]["loss"]
    assert [cell["seed"] for cell in found if cell["rung"] == 2] == [0, 0, 1, 1]
    for cell in found:
        assert cell["status"] == "finished" and cell["training"]["seconds_per_step"] > 0
        assert [c["task"] for c in cell["cells"]] == ["perplexity", "perplexity", "passkey"]
    del here[:]
    assert cells(search(load_search(small), tmp_path / "out")) == found and here == []


def test_what_has_changed_is_done_again_or_refused(small, tmp_path, here):
    words = ["--rungs=[{steps: 4}]", "--grid={}"]
    results = search(load_search(small, words), tmp_path / "out")
    before = cells(results)[0]
    del here[:]
    search(load_search(small, [*words, "--passkey.samples=1"]), tmp_path / "out")
    after = cells(results)[0]
    assert len(after["cells"][-1]["samples"]) == 1
    assert after["training"] == before["training"]  # the finished run is found
    assert after["cells"][0] == before["cells"][0]  # and so is what its journal has
    # Another ranking: nothing is done again, and the record says what it was ranked by.
    del here[:]
    search(
        load_search(small, [*words, "--passkey.samples=1", "--rank={passkey: [260]}"]),
        results.parent,
    )
    assert here == [] and cells(results) == [after | {"rank": {"passkey": [260]}}]
    other = load_search(small, words)
    other.trials["none"] = {"training.learning_rate": 1e-8}
    with pytest.raises(UserError, match=r"another recipe .*learning_rate.*another --output"):
        search(other, tmp_path / "out")
    assert here == [] and len(cells(results)) == 1


def test_every_size_is_a_search_of_its_own(small, tmp_path, here):
    sizes = "{small: {}, large: {model.hidden_size: 32}}"
    wanted = load_search(small, ["--rungs=[{steps: 4}]", "--grid={}", f"--sizes={sizes}"])
    found = cells(search(wanted, tmp_path / "out"))
    assert [(c["search"], c["model"], c["kept"]) for c in found] == [
        ("small", "none", True),
        ("large", "none", True),
    ]
    assert found[1]["overrides"]["model.hidden_size"] == 32
    assert found[0]["training"]["parameters"] < found[1]["training"]["parameters"]
    assert cells(tmp_path / "out" / "large" / "results.json") == found[1:]
    with pytest.raises(UserError, match=r"sizes are named by letters, .* got 'a/b'"):
        load_search(small, ["--sizes={a/b: {}}"])
    with pytest.raises(UserError, match=r"size s: trial none: .*hidden"):
        load_search(small, ["--sizes={s: {model.hidden: 1}}"])


def test_a_size_can_have_seeds_of_its_own(small, tmp_path):
    sizes = "{small: {}, large: {model.hidden_size: 32, seeds: [0]}}"
    wanted = load_search(small, [f"--sizes={sizes}"])
    assert [rung.seeds for rung in wanted.of_size("small").rungs] == [[0], [0, 1]]
    assert [rung.seeds for rung in wanted.of_size("large").rungs] == [[0], [0]]
    assert "seeds" not in wanted.of_size("large").trials["none"]
    for seeds in ("2", "[]", "[a]", "[-1]", "[1, 1]"):
        with pytest.raises(UserError, match=r"size s: rung 2: seeds must be different numbers"):
            load_search(small, [f"--sizes={{s: {{seeds: {seeds}}}}}"])
    with pytest.raises(UserError, match="size s: a search needs rungs"):
        load_search(small, ["--sizes={s: {seeds: [0]}}", "--rungs=[]"])


def test_a_search_cut_short_leaves_what_was_measured(small, tmp_path, monkeypatch):
    measure = searches.Trial._measure

    def interrupted(self):
        if self.name == "learning_rate=0.03":
            raise KeyboardInterrupt
        return measure(self)

    wanted = load_search(small, ["--rungs=[{steps: 4}]", "--sizes={small: {}}"])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(searches.Trial, "_measure", interrupted)
        search(wanted, tmp_path / "out")
    left = cells(tmp_path / "out" / "results.json")
    assert [c["model"] for c in left] == ["none", "learning_rate=0.001"]
    assert left == cells(tmp_path / "out" / "small" / "results.json")
    found = cells(search(wanted, tmp_path / "out"))
    assert [{**c, "mean_rank": 0, "kept": 0} for c in found[:2]] == [
        {**c, "mean_rank": 0, "kept": 0} for c in left
    ]


def test_a_trial_that_fails_is_kept_as_failed_and_the_others_go_on(small, tmp_path, here):
    asked = load_search(small, ["--rungs=[{steps: 4}]", "--grid={training.learning_rate: [0.03]}"])
    asked.trials["broken"] = {"data.source": str(tmp_path / "nowhere")}
    results = search(asked, tmp_path / "out")
    (broken,) = [cell for cell in cells(results) if cell["model"] == "broken"]
    assert broken["status"] == "failed" and broken["mean_rank"] is None and not broken["kept"]
    assert "nowhere: no such file" in broken["error"] and "coca" not in broken["error"]
    assert kept(results, 1) == {"learning_rate=0.03"}
    del here[:]
    search(asked, tmp_path / "out")
    assert here == []  # still failed

    asked.trials, asked.grid = {"broken": asked.trials["broken"]}, {}
    with pytest.raises(UserError, match=r"no trial of rung 1 .*nowhere"):
        search(asked, tmp_path / "all")
    assert cells(tmp_path / "all" / "results.json")[0]["status"] == "failed"


@pytest.mark.parametrize(
    "place", ["coca_lab.training.run.write_json", "transformers.Trainer._save_checkpoint"]
)
def test_a_trial_that_a_full_disk_ended_is_tried_again(small, tmp_path, here, monkeypatch, place):
    def full(*_, **__):
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    asked = load_search(small, ["--rungs=[{steps: 4}]", "--grid={training.learning_rate: [0.03]}"])
    asked.trials = {}
    with monkeypatch.context() as patched:
        patched.setattr(place, full)
        with pytest.raises(UserError, match=r"no trial of rung 1 .*No space left on device: free"):
            search(asked, tmp_path / "out")
    (trial,) = cells(search(asked, tmp_path / "out"))
    assert trial["status"] == "finished"


def test_a_trial_whose_folder_is_in_use_is_tried_again(small, tmp_path, here, monkeypatch):
    def in_use(*_):
        raise TemporaryError("in use by another process")

    asked = load_search(small, ["--rungs=[{steps: 4}]", "--grid={training.learning_rate: [0.03]}"])
    asked.trials = {}
    with monkeypatch.context() as patched:
        patched.setattr("coca_lab.training.run.hold", in_use)
        with pytest.raises(UserError, match="in use by another process"):
            search(asked, tmp_path / "out")
    (trial,) = cells(search(asked, tmp_path / "out"))
    assert trial["status"] == "finished"


def test_killed_it_resumes_from_checkpoints(small, tmp_path):
    content = yaml.safe_load(small.read_text())
    del content["passkey"]
    small.write_text(yaml.safe_dump(content | {"grid": {}, "rungs": [{"steps": 200}]}))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "coca_lab.cli", "search", str(small), f"--output={out}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not list(out.glob("rung-1/*/*/model/checkpoints/*/trainer_state.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert cells(out / "results.json") == []
    search(load_search(small), out)
    (trial,) = cells(out / "results.json")
    assert trial["status"] == "finished"
    assert trial["training"]["seconds_per_step"] is None  # it was interrupted
    assert (out / "rung-1" / "none" / "seed-0" / "log.txt").is_file()


def test_a_search_on_ray_is_the_same(small, tmp_path, ray):
    wanted = load_search(small, ["--rungs=[{steps: 4}]"])

    def figures(results):
        return [
            (c["model"], c["mean_rank"], c["training"]["loss"], c["cells"][0]["nats"])
            for c in cells(results)
        ]

    alone = figures(search(wanted, tmp_path / "alone"))
    assert figures(search(wanted, tmp_path / "shared", ray="")) == alone


def record(trial, values, seed=0, status="finished"):
    figures = [
        {"task": "perplexity", "window": 16, "perplexity": values[0], "scaling": "none"},
        {"task": "perplexity", "window": 16, "perplexity": 0.0, "scaling": "attend-last"},
        {"task": "passkey", "length": 64, "accuracy": values[1], "scaling": "none"},
    ]
    return {"model": trial, "seed": seed, "status": status, "cells": figures}


def test_ranks_are_means_over_figures_and_figures_over_seeds():
    rank = {"perplexity": [16], "passkey": [64]}
    records = [
        record("a", (20.0, 0.5)), record("a", (40.0, 0.5), seed=1),
        record("b", (25.0, 0.4)), record("b", (25.0, 0.8), seed=1),
        record("c", (None, 0.5)), record("c", (10.0, 0.5), seed=1),
        record("d", (1.0, 1.0)), record("d", (1.0, 1.0), seed=1, status="failed"),
    ]  # fmt: skip
    # Perplexity: b, a, c (infinite). Passkeys: b alone, a and c share ranks 2 and 3.
    assert mean_ranks(records, rank) == {"a": 2.25, "b": 1.0, "c": 2.75}
    assert mean_ranks(records, {"passkey": [128]}) == {"a": 2.0, "b": 2.0, "c": 2.0}


@pytest.mark.parametrize(
    ("keep", "remaining"), [(None, 3), (0.5, 3), (0.01, 1), (2.0, 2), (9.0, 5)]
)
def test_a_rung_keeps_a_share_or_a_number(keep, remaining):
    assert Rung(1, keep).remaining(5) == remaining


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recipe": None}, "recipe: Input should be a valid string"),
        ({"recipe": "nowhere.yaml"}, r"nowhere\.yaml: no such recipe"),
        ({"rungs": []}, "needs rungs"),
        ({"rank": {}}, "needs rank"),
        ({"trials": {}, "grid": {}}, "needs trials or a grid"),
        ({"rank": {"loss": [1]}}, "ranked by perplexity, passkey, needles; got loss"),
        ({"rank": {"needles": [64]}}, "no section needles"),
        ({"rank": {"perplexity": [64]}}, r"perplexity is evaluated at \[16, 32\]; got \[64\]"),
        ({"rungs": [{"steps": 0}]}, "rung 1: steps must be at least 1"),
        ({"rungs": [{"steps": 1, "keep": 1.5}, {"steps": 2}]}, "rung 1: keep must be a share"),
        ({"rungs": [{"steps": 1, "keep": 1}]}, "rung 1: the last rung keeps nothing"),
        ({"rungs": [{"steps": 1, "seeds": [1, 1]}]}, "rung 1: seeds must be different"),
        ({"trials": {64: {}}}, "trials.64: Input should be a valid string"),
        ({"sizes": {True: {}}}, "sizes.1: Input should be a valid string"),
        (
            {"perplexity": {"windows": [16, 32], "targets": "one-pass"}},
            r"perplexity is evaluated at \[32\]",
        ),
        ({"num_cpus": 0}, "num_cpus must be at least 1"),
        ({"trials": {"a": {"model.atention": "rope"}}}, "trial a: .*model.atention"),
        (
            {"trials": {"a": {"model.num_layers": 0}}},
            r"trial a: .*num_layers: Input should be .* equal to 1",
        ),
        ({"trials": {"a": {"training.steps": 5}}}, "trial a: training.steps: set .* in the rungs"),
        ({"trials": {"a b": {}, "a/b": {}}}, "trials and values must differ .* a b, a/b"),
        ({"grid": {"model.window": [1, 1]}}, "trials and values must differ .* window=1"),
        ({"passkey": {"samples": 0}}, "samples must be at least 1"),
        ({"runs": []}, "runs: there is no such field; did you mean rungs"),
    ],
)
def test_unfit_searches_are_refused(small, changed, message):
    small.write_text(yaml.safe_dump(yaml.safe_load(small.read_text()) | changed))
    with pytest.raises(UserError, match=message) as caught:
        load_search(small)
    assert "\n" not in str(caught.value)


def test_a_search_cannot_change_the_steps_of_stages(small, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text() + "stages: [{name: one, steps: 7}]\n")
    with pytest.raises(UserError, match="has 7 steps and the rung 4"):
        load_search(small)


def trial(name, rung, rank, kept, perplexity, hits, seed=0, **other):
    samples = [{"distance": d, "hit": h} for d, h in zip((10, 200, 900), hits, strict=True)]
    common = {"training_length": 256, "scaling": "none"}
    return {
        "task": "search", "search": "tries", "model": name, "rung": rung, "rungs": 2,
        "steps": 1000 * rung, "seed": seed, "rank": {"perplexity": [256], "passkey": [1024]},
        "status": "finished", "error": None, "training": {"seconds_per_step": 0.25},
        "mean_rank": rank, "kept": kept,
        "cells": [
            {"task": "perplexity", "window": 256, "perplexity": perplexity, **common},
            {"task": "passkey", "length": 1024, "accuracy": sum(hits) / 3, "samples": samples,
             **common},
        ],
        **other,
    }  # fmt: skip


FAILED = {"status": "failed", "error": "the loss is not finite", "training": None, "cells": []}
TRIALS = [
    trial("worse", 1, 2.0, False, 30.0, (1, 0, 0)),
    trial("better", 1, 1.0, True, 20.0, (1, 1, 1)),
    trial("diverged", 1, None, False, None, (0, 0, 0), **FAILED),
    trial("better", 2, 1.0, True, 18.0, (1, 1, 0)),
    trial("better", 2, 1.0, True, 19.0, (1, 0, 1), seed=1),
]


def test_the_leaderboard_names_the_winner_and_every_failure():
    last, first, failed = search_sections(TRIALS)
    assert last.title == "tries: rung 2 of 2, 2,000 steps"
    assert [str(entry) for entry in last.header] == [
        "trial",
        "mean rank",
        "256",
        "1,024",
        "seconds a step",
    ]
    ((name, rank, perplexity, passkeys, seconds),) = last.rows
    assert (name.text, name.small, name.bold) == ("better", "2 seeds", True)
    assert (perplexity.text, perplexity.small) == ("18.50", "18.00 to 19.00")
    assert (passkeys.text, passkeys.small) == ("0.67", "0.75 / 0.50")
    assert (rank, seconds) == ("1", "0.250")
    assert [[str(entry) for entry in row] for row in first.rows] == [
        ["better", "1", "20.00", "1.00", "0.250"],
        ["worse", "2", "30.00", "0.33", "0.250"],
        ["diverged", "failed", "–", "–", "–"],
    ]
    assert first.muted == [1, 2] and not first.rows[0][0].bold
    assert failed.rows == [["diverged", "1", "0", "the loss is not finite"]]
    page = build_report([{"results": TRIALS}])
    assert "better is the best of 3 trials after 2,000 steps" in page and "not finite" in page
    header, _ = printed_tables(TRIALS)[0]
    assert header == [
        "rung 2 of 2, 2,000 steps",
        "mean rank",
        "perplexity 256",
        "passkey 1,024",
        "seconds a step",
    ]
    # A rung that has not ended has no ranks, and the search no winner.
    begun = [{k: v for k, v in t.items() if k not in ("kept", "mean_rank")} for t in TRIALS]
    assert "is the best of" not in build_report([{"results": begun}])
    assert [row[1] for row in search_sections(begun)[1].rows] == ["–", "–", "failed"]


def test_from_the_command_line_to_a_report(small, tmp_path, here, capsys):
    out = tmp_path / "out"
    assert main(["search", str(small), "--output", str(out), "--rungs=[{steps: 4}]"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "learning_rate" in printed and str(out / "results.json") in printed
    assert main(["report", str(out / "results.json"), "--output", str(tmp_path / "r.html")]) == 0
    assert "out: rung 1 of 1, 4 steps" in (tmp_path / "r.html").read_text()
    assert len(read_results([out / "results.json"])[0]["results"]) == 3


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_projects_own_searches_load(path, monkeypatch):
    monkeypatch.chdir(path.parents[1])
    assert load_search(path).rungs
    head = path.read_text()
    assert head.startswith("#") and "Command" in head and "Needs" in head
