"""Tokens a second, floating-point operations, the loss by chunks, torch.compile."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from coca_attention.errors import UserError
from coca_lab.training import load_recipe, read_summary, train
from coca_lab.training.chunks import chunk_loss
from coca_lab.training.model import model_config
from coca_lab.training.throughput import (
    DEVICES,
    mean_keys,
    peak_flops,
    training_flops,
)
from families import FAMILIES, vanilla

LENGTH = 24


def step(model, **inputs):
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def blocks(vocab_size: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    targets[0, :5] = -100
    return {"input_ids": inputs, "labels": inputs, "shift_labels": targets}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}, {"attention": "rope"}])
def test_counted_operations_are_those_of_a_step(options, frozen):
    words = [f"--model.{name}={value}" for name, value in options.items()]
    sizes = ["--model.hidden_size=32", "--model.num_layers=3", "--model.num_heads=2"]
    config = model_config(load_recipe(None, sizes + words), 50)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if frozen:
        for layer in model.gpt_neox.layers:
            layer.mlp.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        step(model, **blocks(50))
    # Eager attention computes the scores of later keys, too.
    hidden = 12 * 3 * 32 * (LENGTH - mean_keys(LENGTH))
    assert counter.get_total_flops() == 2 * LENGTH * (training_flops(model, LENGTH) + hidden)


def test_a_window_is_counted_as_what_it_sees():
    assert mean_keys(10) == 5.5
    assert mean_keys(10, 4) == (1 + 2 + 3 + 7 * 4) / 10
    config = model_config(load_recipe(None, ["--model.attention=rope", "--model.layers=llg"]), 50)
    whole = model_config(load_recipe(None, ["--model.attention=rope"]), 50)
    assert config.layer_types[:3] == ["sliding_attention"] * 2 + ["full_attention"]
    with torch.device("meta"):
        local, full = (
            training_flops(AutoModelForCausalLM.from_config(c), 512) for c in (config, whole)
        )
    assert full - local == 12 * 1024 * 16 * (mean_keys(512) - mean_keys(512, 64))


def test_peaks_are_for_half_precision_on_known_devices():
    assert peak_flops("NVIDIA H200", "bfloat16") == peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
    assert peak_flops("NVIDIA L40", "bfloat16") == 181e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert all(peak_flops(f"NVIDIA {name}", "float16") == DEVICES[name][0] for name in DEVICES)
    for other in ("A100-SXM4-40GB MIG 1g.5gb", "GeForce RTX 4090 Laptop GPU", "RTX 4090 D", "L400"):
        assert peak_flops(f"NVIDIA {other}", "bfloat16") is None


def test_operations_that_are_not_known_are_not_reported():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        experts = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads))
    assert training_flops(experts, 16) is None
    split = vanilla("Llama")
    assert training_flops(split, 16) is not None
    split.lm_head.weight = torch.nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves it
    assert training_flops(split, 16) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_by_chunks_has_the_same_gradients(family):
    model = vanilla(family).train()
    inputs = blocks(model.config.vocab_size)
    count = {"num_items_in_batch": torch.tensor(30)}
    for more in ({}, count):
        chunked = copy.deepcopy(model)
        expected, gradients = step(model, **inputs, **more)
        chunk_loss(chunked, 7)
        loss, found = step(chunked, **inputs, **more)
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, gradient in gradients.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * scale + 1e-9)
    model.eval()
    chunked.eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, chunked(**inputs).logits)
        assert model(**inputs).loss == chunked(**inputs).loss


def test_bounded_logits_have_no_loss_by_chunks():
    model = vanilla("Gemma 3")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="leave it out"):
        chunk_loss(model, 4)


def run(text_folder, output, **changes):
    options = {
        "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2,
        "data.source": text_folder, "data.vocab_size": 300, "data.block_length": 16,
        "data.held_out": 0.2, "validation.every": 3, "validation.batches": 1,
        "training.steps": 6, "training.global_batch_size": 4, "training.micro_batch_size": 2,
        "training.precision": "float32", "training.learning_rate": 1e-2, "training.log_every": 2,
    }  # fmt: skip
    words = [f"--{n.replace('__', '.')}={v}" for n, v in (options | changes).items()]
    return read_summary(train(load_recipe(None, words), output))


def test_a_run_says_how_fast_it_is(text_folder, tmp_path):
    summary = run(text_folder, tmp_path / "run")
    found = summary["throughput"]
    assert found.keys() == {"tokens_per_second", "flops_per_second"}  # no peak of a CPU is known
    assert found["tokens_per_second"] == pytest.approx(6 * 4 * 16 / summary["seconds"])
    chunked = run(text_folder, tmp_path / "chunked", training__loss_chunk=5)
    for name in ("curve", "validation"):
        for entry, other in zip(summary[name], chunked[name], strict=True):
            assert entry == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(text_folder, tmp_path):
    summary = run(text_folder, tmp_path / "run")
    compiled = run(text_folder, tmp_path / "compiled", training__compile=True)
    for name in ("curve", "validation"):
        for entry, other in zip(summary[name], compiled[name], strict=True):
            assert entry == pytest.approx(other, rel=1e-4)
