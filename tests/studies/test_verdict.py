import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import studies.verdict  # noqa: F401 (registers baseline_llama)
from coca_attention.models.configuration import attention_of
from coca_lab.studies import load_study
from coca_lab.training.model import model_config
from studies.pages import BEGIN, END
from studies.verdict import rule
from studies.verdict.rule import REPEATS, SEEDS, read_runs, wins

ARMS = ["a", "b", "b1", "b2", "c", "d", "e", "f", "g", "g1", "h"]


def test_arms_have_equal_caches_and_parameters(tmp_path):
    trials = [x for x in load_study("verdict").trials(tmp_path) if x.seed == 0]
    assert [trial.name.split()[0] for trial in trials] == ARMS
    sizes = []
    for arm, recipe in zip(ARMS, (trial.recipe for trial in trials), strict=True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config(recipe, recipe.data.vocab_size))
        sizes.append(sum(p.numel() for p in model.parameters()))
        assert attention_of(model.config) is None  # cells do not claim that it is rotary
        layers = [layer.self_attn for layer in model.model.layers]
        assert [layer.cache_numbers for layer in layers] == [96, 96, 96], arm
        assert len(layers) == 3 and all(layer.value_width == 16 for layer in layers)
        windows = [32, 32, None] if arm[0] in "efg" else [None] * 3
        assert [layer.window for layer in layers] == windows
    assert max(sizes) < 1.001 * min(sizes)


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
    write(folder, arm, seed, status="finished", seconds=1.0, text=text)


def write(folder, arm, seed, **facts):
    facts = {"arm": arm, "learning_rate": 0.003, "seed": seed, **facts}
    (folder / f"{arm}-{seed}.json").write_text(json.dumps(facts))


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
    write(tmp_path, "g", 4, status="diverged")
    runs = read_runs(tmp_path)[1]
    assert wins(runs, "g", "f", SEEDS) == []
    assert rule.compare(runs, "g", "f", "near", SEEDS) == {"diverged": True}
