"""TRL's trainers, which look the class of a model up by its name in `transformers`."""

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

TEXT = {"text": "alpha1 beta2 gamma3 delta4"}
PAIR = {"prompt": "alpha1", "chosen": " beta2 gamma3", "rejected": " theta4"}
ANSWERS = {"chosen": "alpha1 beta2 gamma3", "rejected": "alpha1 theta4"}


@pytest.mark.parametrize(
    ("method", "row", "auto", "settings"),
    [
        ("SFT", TEXT, AutoModelForCausalLM, {"packing": True, "max_length": 16}),
        ("DPO", PAIR, AutoModelForCausalLM, {}),  # with the default reference model
        ("Reward", ANSWERS, AutoModelForSequenceClassification, {}),
    ],
)
def test_a_trainer_takes_a_path(method, row, auto, settings, model_folder, tmp_path):
    arguments = getattr(trl, f"{method}Config")(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", **settings,
    )  # fmt: skip
    rows = Dataset.from_list([row] * 8)
    trainer = getattr(trl, f"{method}Trainer")(
        model=str(model_folder), args=arguments, train_dataset=rows
    )
    task = auto.__name__.removeprefix("AutoModelFor")
    assert type(trainer.model).__name__ == f"CoCAGPTNeoXFor{task}"
    assert trainer.train().training_loss > 0
    trainer.save_model(str(tmp_path / "saved"))
    again, ours = auto.from_pretrained(tmp_path / "saved"), trainer.model.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in again.state_dict().items())
