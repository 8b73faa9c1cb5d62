"""One of two processes that use a model under DeepSpeed ZeRO-3: zero3_run.py FAMILY FOLDER."""

import copy
import sys

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from coca_attention import convert
from families import collinear, vanilla

SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def compare(model, reference, equal=True):
    """All weights are sharded; gathered, they have the shapes and the values of the reference."""
    weights = dict(model.named_parameters())
    assert weights.keys() == dict(reference.named_parameters()).keys()
    for name, expected in reference.named_parameters():
        assert weights[name].numel() == 0, name
        with deepspeed.zero.GatheredParameters([weights[name]]):
            assert weights[name].shape == expected.shape, name
            assert not equal or torch.equal(weights[name], expected), name


def train(model, reference):
    """Both learn from the same two texts, one in each process, with the same losses."""
    for module in (*model.modules(), *reference.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids, rank = torch.arange(24).view(2, 12) + 3, dist.get_rank()
    optimizer = torch.optim.SGD(reference.train().parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), config=SETTINGS
    )
    for _ in range(3):
        loss = engine(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss
        engine.backward(loss)
        engine.step()
        both = torch.stack([reference(input_ids=x[None], labels=x[None]).loss for x in ids])
        both.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isclose(loss, both[rank], rtol=1e-5), (loss, both)


def main(family, folder):
    deepspeed.init_distributed("gloo")
    reference = collinear(family)
    if dist.get_rank() == 0:
        vanilla(family).save_pretrained(f"{folder}/vanilla")
        reference.save_pretrained(f"{folder}/coca")
    dist.barrier()
    plain = copy.deepcopy(reference)  # models made from here on are sharded
    settings = HfDeepSpeedConfig(SETTINGS)
    compare(AutoModelForCausalLM.from_config(reference.config), reference, equal=False)
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/coca")
    compare(loaded, reference)
    made = convert(AutoModelForCausalLM.from_pretrained(f"{folder}/vanilla"))
    compare(made, reference)
    drawn = convert(AutoModelForCausalLM.from_pretrained(f"{folder}/vanilla"), init="random")
    compare(drawn, reference, equal=False)
    train(made, plain)
    del settings


if __name__ == "__main__":
    main(*sys.argv[1:])
