import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import studies.verdict  # noqa: F401 (registers baseline_llama)
from coca_attention.errors import UserError
from coca_lab.studies import load_study
from coca_lab.training.model import model_config
from studies.recall import tables as recall


def write(path, trials, failures=()):
    """Results of trials that answer the same share everywhere, at two octaves of distance."""
    content = {"results": [], "tuning": {"results": []}, "failures": dict.fromkeys(failures, "")}
    for name, rate, seed, right in trials:
        cells = content["tuning"]["results"] if seed == 100 else content["results"]
        octaves = {"32": [40, 40], "256": [60, round(100 * right) - 40]}
        cells += [
            {"model": name, "learning_rate": rate, "training_seed": seed, "length": length,
             "pairs": pairs, "octaves": octaves}
            for length in recall.LENGTHS
            for pairs in (*recall.LOADS, recall.MOST)
        ]  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def test_tables_count_what_was_learned_by_length_and_octave(tmp_path):
    trials = [("strict", 0.003, 0, 1.0), ("strict", 0.003, 1, 0.8), ("strict", 0.006, 100, 0.6)]
    trials += [("rotary", 0.003, 1, 0.9), ("rotary", 0.006, 100, 0.6)]
    trials += [("native at 0.006", 0.006, 3, 0.7), ("roles at 0.006", 0.006, 3, 0.9)]
    text = recall.tables(recall.read_answers(write(tmp_path / "results.json", trials)))
    assert "| strict | 0.003 | 1 of 2 | 0.90 (" in text and "| rotary | 0.003 | 0 of 1" in text
    assert "| strict − rotary | -0.10 | -0.17 |" in text  # of seed 1, which both have
    assert "| strict | 1.00 (1.00 to 1.00) | " in text and "| roles − rotary |" not in text
    assert "| strict | 0.006 | 100 | 0.60 | 0.33 |" in text
    assert "| native − roles, 0.006 | -0.20 | -0.33 |" in text and "| native − roles |" not in text
    write(tmp_path / "results.json", trials, ["thin, seed 3"])
    with pytest.raises(UserError, match="these failed: thin, seed 3"):
        recall.read_answers(tmp_path / "results.json")


def test_arms_have_two_layers_and_about_the_same_size(tmp_path):
    sizes = {}
    for trial in load_study("recall").trials(tmp_path):
        with torch.device("meta"):
            config = model_config(trial.recipe, trial.recipe.data.vocab_size)
            model = AutoModelForCausalLM.from_config(config)
        assert model.config.num_hidden_layers == 2
        sizes[trial.name] = model.num_parameters()
    assert max(sizes.values()) < 1.2 * min(sizes.values()), sizes
