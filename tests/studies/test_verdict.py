import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from coca_attention.errors import UserError
from studies.pages import BEGIN, END
from studies.verdict import rule
from studies.verdict import run as verdict
from studies.verdict.rule import LONGER, REPEATS, TIMES, read_runs, to_repeat, wins
from studies.verdict.run import RATES, SEEDS, TUNING_SEED, Trial, make_arm, next_trial

ARMS = ["a", "b", "b1", "b2", "c", "d", "e", "f", "g", "g1", "h"]


def test_arms_have_equal_caches_and_parameters():
    assert list(verdict.read_study()[1]) == ARMS
    models = {arm: make_arm(arm) for arm in ARMS}
    sizes = {arm: sum(p.numel() for p in model.parameters()) for arm, model in models.items()}
    assert max(sizes.values()) < 1.001 * min(sizes.values())
    for arm, model in models.items():
        layers = [layer.self_attn for layer in model.model.layers]
        assert [layer.cache_numbers for layer in layers] == [96, 96, 96], arm
        assert len(layers) == 3 and all(layer.value_width == 16 for layer in layers)
        windows = [32, 32, None] if arm[0] in "efg" else [None] * 3
        assert [layer.window for layer in layers] == windows


def test_trials_are_recipes_of_their_arm_rate_and_seed():
    recipe = Trial("c", 0.0015, 3).recipe()
    assert (recipe.training.learning_rate, recipe.training.seed) == (0.0015, 3)
    assert recipe.model.options["scores"]["g"]["rotation"] == {"width": 8}
    with pytest.raises(UserError, match="no arm x; known: a, b"):
        Trial("x", 0.001, 0).recipe()


def test_rates_are_tuned_first_then_all_arms_run_seed_by_seed(tmp_path):
    # The loss of a trial, by its arm and rate: y's is lowest beyond the rates all try.
    loss = {"x": lambda rate: abs(rate - 0.0031), "y": lambda rate: abs(rate - 0.02), "z": abs}
    order = []
    while trial := next_trial(tmp_path, loss):
        order.append(trial)
        assert len(order) < 50
        nats = [100 * loss[trial.arm](trial.learning_rate)]
        result = {"status": "finished", "text": [{"nats": nats, "tokens": [50]}]}
        if trial.arm == "z" or trial.learning_rate > 0.02:
            result = {"status": "diverged"}
        facts = {"arm": trial.arm, "learning_rate": trial.learning_rate, "seed": trial.seed}
        (tmp_path / f"{trial.name}.json").write_text(json.dumps(facts | result))
    tuned = [Trial("x", rate, TUNING_SEED) for rate in RATES]
    tuned += [Trial("y", rate, TUNING_SEED) for rate in (*RATES, 0.012, 0.024)]
    tuned += [Trial("z", rate, TUNING_SEED) for rate in (*RATES, RATES[0] / 2, RATES[0] / 4)]
    best = {"x": 0.003, "y": 0.012, "z": RATES[0] / 4}
    assert order == tuned + [Trial(arm, best[arm], seed) for seed in SEEDS for arm in best]


def test_every_trial_is_a_process_with_its_words(tmp_path, monkeypatch):
    asked = []

    def start(command, check):
        assert command[1:3] == ["-m", "studies.verdict.run"] and check
        verdict.main(command[3:])

    def run_trial(trial, trials, runs):
        assert runs == "models"
        asked.append(trial)
        cell = {"longest": 0, "window": 0, "nats": [len(asked)], "tokens": [1]}
        facts = asdict(trial) | {"status": "finished", "text": [cell]}
        (Path(trials) / f"{trial.name}.json").write_text(json.dumps(facts))

    monkeypatch.setattr(verdict.subprocess, "run", start)
    monkeypatch.setattr(verdict, "run_trial", run_trial)
    verdict.main([f"--trials={tmp_path}", "--runs=models"])
    # Losses grow, so the first rate is the best of every arm, and one below it is tried.
    assert len(asked) == len(ARMS) * (len(RATES) + 1 + len(SEEDS)) + len(LONGER)
    assert asked[-1] == Trial("d", RATES[0], 0, TIMES)
    assert asked[-1].recipe().training.steps == 4 * asked[0].recipe().training.steps


TOKENS = [300, 500, 400]


def final(folder, arm, seed, *, near, far, limited=None, noise=0.001):
    """A final run with about these log perplexities, at documents of different difficulty."""
    draw = np.random.default_rng([seed, *arm.encode()])
    text = []
    for window, limit, value in ((256, None, near), (1024, None, far), (1024, 256, limited)):
        if value is not None:
            means = value + np.array([-0.2, 0.1, 0.025]) + noise * draw.normal(size=3)
            cell = {"longest": 1024, "window": window, "tokens": TOKENS}
            cell |= {"max_distance": limit} if limit else {}
            text.append(cell | {"nats": (means * TOKENS).tolist()})
    trial = Trial(arm, 0.003, seed)
    facts = asdict(trial) | {"status": "finished", "seconds": 1.0, "text": text}
    (folder / f"{trial.name}.json").write_text(json.dumps(facts))


def test_the_rule_counts_wins_that_are_repeated(tmp_path):
    folder = tmp_path / "trials"
    folder.mkdir()
    for seed in (*SEEDS, *REPEATS):
        again = seed in REPEATS
        final(folder, "a", seed, near=3.0, far=4.0, limited=3.1)
        final(folder, "c", seed, near=3.0, far=3.5)
        final(folder, "b", seed, near=2.9 if not again else 3.0, far=3.5)  # not repeated
        final(folder, "b1", seed, near=2.9, far=3.6)  # better near, worse far
        final(folder, "b2", seed, near=3.0, far=3.4)
        final(folder, "d", seed, near=3.0, far=3.5, limited=3.1)  # far alone: limits do as well
        final(folder, "h", seed, near=3.0, far=3.5, limited=3.0)
    trials, runs = read_runs(folder)
    assert len(trials) == 70
    assert wins(runs, "b", "c", SEEDS) == ["near"] and not wins(runs, "b", "c", REPEATS)
    assert to_repeat(runs) == ["a", "b", "b2", "c", "h"]
    found = {(x["arm"], x["other"]): x for x in rule.verdict(runs)}
    assert found["b", "c"]["repeated"] == [] and found["b1", "c"]["wins"] == []
    assert found["b2", "c"]["repeated"] == ["far"] == found["h", "a"]["repeated"]
    assert found["d", "a"]["wins"] == [] and found["g", "f"]["near"] is None
    assert found["b2", "c"]["near"]["equivalent"] and not found["b2", "c"]["far"]["equivalent"]
    far = found["b2", "c"]["far"]
    assert far["difference"] == pytest.approx(-0.1, abs=0.003)
    assert far["interval"][0] < far["difference"] < far["interval"][1] < -0.09
    assert far["bootstrap"][0] < far["difference"] < far["bootstrap"][1] < -0.09
    (tmp_path / "README.md").write_text(f"Before\n{BEGIN}\nold\n{END}\nafter")
    rule.main(str(folder))
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("Before") and page.endswith("after") and "old" not in page
    assert "| b2 against c | far | -9.5 |" in page and "yes, not repeated" in page
    row = next(line for line in page.splitlines() if line.startswith("| b, near, against c, near"))
    again, every = (float(cell.split()[0]) for cell in row.split("|")[2:4])
    assert again == pytest.approx(0, abs=0.3) and every == pytest.approx(-4.9, abs=0.3)
    assert "against c, limited" not in page  # not measured here


def test_an_arm_that_diverged_once_cannot_win(tmp_path):
    for seed in SEEDS:
        final(tmp_path, "f", seed, near=3.0, far=3.5)
        final(tmp_path, "g", seed, near=2.0, far=2.5)
    assert wins(read_runs(tmp_path)[1], "g", "f", SEEDS) == ["near", "far"]
    facts = asdict(Trial("g", 0.003, 4)) | {"status": "diverged"}
    (tmp_path / "g-0.003-4.json").write_text(json.dumps(facts))
    runs = read_runs(tmp_path)[1]
    assert wins(runs, "g", "f", SEEDS) == []
    assert rule.compare(runs, "g", "f", "near", SEEDS) == {"diverged": True}
