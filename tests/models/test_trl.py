"""TRL's trainers, which look the class of a model up by its name in `transformers`."""

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from coca_attention.models import CoCALlamaForCausalLM
from conftest import tiny_model


@pytest.fixture
def path(tmp_path, tokenizer):
    tiny_model("llama-strict").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def arguments(cls, tmp_path, **settings):
    return cls(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        **settings,
    )


def test_supervised_fine_tuning_by_path(path, tmp_path):
    data = Dataset.from_list([{"text": "alpha1 beta2 gamma3 delta4"}] * 8)
    settings = arguments(trl.SFTConfig, tmp_path, packing=True, max_length=16)
    trainer = trl.SFTTrainer(model=path, args=settings, train_dataset=data)
    assert type(trainer.model) is CoCALlamaForCausalLM
    assert trainer.train().training_loss > 0


def test_preferences_with_the_default_reference_model(path, tmp_path):
    pair = {"prompt": "alpha1", "chosen": " beta2 gamma3", "rejected": " theta4"}
    settings = arguments(trl.DPOConfig, tmp_path)
    trainer = trl.DPOTrainer(model=path, args=settings, train_dataset=Dataset.from_list([pair] * 8))
    assert type(trainer.model) is CoCALlamaForCausalLM
    assert trainer.train().training_loss > 0


def test_reward_trainer_takes_a_path(path, tmp_path):
    pair = {"chosen": "alpha1 beta2 gamma3", "rejected": "alpha1 theta4"}
    settings = arguments(trl.RewardConfig, tmp_path)
    rows = Dataset.from_list([pair] * 8)
    trainer = trl.RewardTrainer(model=path, args=settings, train_dataset=rows)
    trainer.train()
    assert type(trainer.model).__name__ == "CoCALlamaForSequenceClassification"
    trainer.save_model(str(tmp_path / "reward"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert torch.equal(again.score.weight, trainer.model.score.weight)
