import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import studies.verdict  # noqa: F401 (registers baseline_llama)
from coca_attention.errors import UserError
from coca_lab.studies import load_study
from coca_lab.training.model import model_config
from studies.recall import tables as recall


def test_tables_need_all_trials(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"failures": {"thin, seed 3": "no space left"}}))
    with pytest.raises(UserError, match="these failed: thin, seed 3"):
        recall.read_answers(path)


def test_arms_have_two_layers_and_about_the_same_size(tmp_path):
    sizes = {}
    for trial in load_study("recall").trials(tmp_path):
        with torch.device("meta"):
            config = model_config(trial.recipe, trial.recipe.data.vocab_size)
            model = AutoModelForCausalLM.from_config(config)
        assert model.config.num_hidden_layers == 2
        sizes[trial.name] = model.num_parameters()
    assert max(sizes.values()) < 1.2 * min(sizes.values()), sizes
