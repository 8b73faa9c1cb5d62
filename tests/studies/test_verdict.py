import json
from pathlib import Path

import pytest

from coca_attention.errors import UserError
from studies.verdict import run as verdict
from studies.verdict.run import (
    RATES,
    SEEDS,
    TUNING_SEED,
    Trial,
    make_arm,
    next_trial,
)

ARMS = ["a", "b", "b1", "b2", "c", "d", "e", "f", "g", "g1", "h"]


@pytest.fixture(autouse=True)
def here(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


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
    # The loss of a trial, by its arm and rate: that of y is lowest beyond the rates all try.
    loss = {"x": lambda rate: abs(rate - 0.0031), "y": lambda rate: abs(rate - 0.02)}
    order = []
    while trial := next_trial(tmp_path, loss):
        order.append(trial)
        assert len(order) < 50
        nats = [100 * loss[trial.arm](trial.learning_rate)]
        result = {"status": "finished", "text": [{"nats": nats, "tokens": [50]}]}
        if trial.learning_rate > 0.03:
            result = {"status": "diverged"}
        facts = {"arm": trial.arm, "learning_rate": trial.learning_rate, "seed": trial.seed}
        (tmp_path / f"{trial.name}.json").write_text(json.dumps(facts | result))
    tuned = [Trial("x", rate, TUNING_SEED) for rate in RATES]
    tuned += [Trial("y", rate, TUNING_SEED) for rate in (*RATES, 0.012, 0.024)]
    assert order[:8] == tuned
    assert order[8:] == [
        Trial(a, r, seed) for seed in SEEDS for a, r in (("x", 0.003), ("y", 0.024))
    ]


def test_every_trial_is_a_process_with_its_words(tmp_path, monkeypatch):
    asked = []

    def start(command, check):
        assert command[1:3] == ["-m", "studies.verdict.run"] and check
        verdict.main(command[3:])

    def trial(arm, learning_rate, seed, trials, runs):
        assert runs == "models"
        asked.append(Trial(arm, learning_rate, seed))
        facts = {"arm": arm, "learning_rate": learning_rate, "seed": seed}
        scores = {"status": "finished", "text": [{"nats": [len(asked)], "tokens": [1]}]}
        (Path(trials) / f"{asked[-1].name}.json").write_text(json.dumps(facts | scores))

    monkeypatch.setattr(verdict.subprocess, "run", start)
    monkeypatch.setattr(verdict, "trial", trial)
    verdict.main([f"--trials={tmp_path}", "--runs=models"])
    # Losses grow, so the first rate is the best of every arm, and one below it is tried.
    assert len(asked) == len(ARMS) * (len(RATES) + 1 + len(SEEDS))


def test_trials_with_a_file_are_not_run_again(tmp_path):
    for rate in RATES:
        facts = {"arm": "x", "learning_rate": rate, "seed": TUNING_SEED, "status": "diverged"}
        (tmp_path / f"{rate}.json").write_text(json.dumps(facts))
    assert next_trial(tmp_path, ["x"]) == Trial("x", RATES[0] / 2, TUNING_SEED)
