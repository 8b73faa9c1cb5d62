import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_lab.arguments import option_words
from coca_lab.training import load_recipe
from coca_lab.training.model import model_config
from studies.recall import run as recall

ARMS = list(recall.read_arms())


def write(folder, arm, rate, seed, right):
    """A trial that answers the same share everywhere, at two octaves of distance."""
    octaves = {"32": [40, 40], "64": [60, round(100 * right) - 40]}
    measured = [
        {"length": length, "pairs": pairs, "octaves": octaves}
        for length in recall.LENGTHS
        for pairs in (*recall.LOADS, recall.MOST)
    ]
    facts = {"arm": arm, "rate": rate, "seed": seed, "measured": measured}
    (folder / f"{arm}-{rate:g}-{seed}.json").write_text(json.dumps(facts))


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """The folder of trials with every learning rate, the second of which is best in every arm."""
    monkeypatch.setattr(recall, "TRIALS", tmp_path)
    for arm in ARMS:
        for rate, right in zip(recall.RATES, (0.5, 1.0, 0.6), strict=True):
            write(tmp_path, arm, rate, recall.TUNING, right)
    return tmp_path


def test_every_arm_is_trained_with_every_rate_then_with_its_best(trials):
    every = list(recall.trials())
    tuned = [(arm, rate, recall.TUNING) for arm in ARMS for rate in recall.RATES]
    seeds = [(arm, recall.RATES[1], seed) for seed in recall.SEEDS for arm in ARMS]
    again = [("roles-decay", 0.0015), ("roles", 0.0015), ("roles-decay", 0.006), ("roles", 0.006)]
    again = [(*each, seed) for each in [*again, ("native", 0.006)] for seed in recall.SEEDS]
    assert every == tuned + seeds + again


def test_tables_count_what_was_learned_by_length_and_octave(trials, monkeypatch):
    page = trials / "README.md"
    page.write_text(f"Before\n{recall.BEGIN}\nold\n{recall.END}\nafter")
    monkeypatch.setattr(recall, "PAGE", page)
    for seed, right in enumerate((1.0, 0.8)):
        write(trials, "strict", 0.003, seed, right)
    write(trials, "strict", 0.006, 1, 0.7)  # another rate is in a table of its own
    for arm, right in (("native", 0.7), ("roles", 0.9)):
        write(trials, arm, 0.006, 3, right)
    facts = {"arm": "thin", "rate": 0.003, "seed": 0, "measured": [], "diverged": "step 7"}
    (trials / "thin-0.003-0.json").write_text(json.dumps(facts))
    recall.write_tables()
    text = page.read_text()
    assert text.startswith("Before") and text.endswith("after") and "old" not in text
    assert "| strict | 0.003 | 1 of 2 | 0.90 (" in text and "| rotary | 0.003 | 0 of" not in text
    assert "| strict − rotary |" not in text and "| thin | 0.003 | 0 of 1 | 0.00 |" in text
    assert "| strict | 1.00 (1.00 to 1.00) | 0.83 (" in text
    assert "| strict | 0.006 | 1, 100 | 0.70 0.60 |" in text
    assert "| native − roles, 0.006 | -0.20 |" in text and "| native − roles |" not in text


def test_arms_have_two_layers_and_about_the_same_size():
    sizes = {}
    for arm, options in recall.read_arms().items():
        recipe = load_recipe(recall.HERE / "recipe.yaml", option_words(options))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config(recipe, recipe.data.vocab_size))
        assert model.config.num_hidden_layers == 2
        sizes[arm] = model.num_parameters()
    assert max(sizes.values()) < 1.2 * min(sizes.values()), sizes
