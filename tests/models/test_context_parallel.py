"""Context parallelism: sequences split over processes give the losses and gradients of one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache, GPTJConfig, GPTJForCausalLM

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Roles, split_sequences
from coca_attention.models.context_parallel import split_of
from conftest import tiny_model
from families import FAMILIES, SIZES, vanilla
from processes import in_processes

LENGTH = 37  # of parts that are not equally long


def scaled(model, **rope):
    """A rotary model whose base follows the length of the text."""
    model.config.rope_parameters |= rope
    return type(model)(model.config)


def with_roles(family="Llama", form="strict", **fields):
    """Local layers with a window, global ones with a temperature, a decay and turning pairs."""
    settings = {"layers": "lg", "window": 6, "turning_pairs": 1, "decay_length": 4.0, **fields}
    return convert(vanilla(family), form, roles=Roles(**settings))


LLAMA = {
    "rope": lambda: vanilla("Llama"),
    "slack": lambda: convert(vanilla("Llama"), "slack"),
    "strict": lambda: convert(vanilla("Llama"), "strict"),
    "magnitude": lambda: convert(vanilla("Llama"), "magnitude"),
    "free pairs": lambda: convert(vanilla("Llama"), "slack", free_pairs=2),
    "rope roles": lambda: with_roles(form="rope"),
    "slack roles": lambda: with_roles(form="slack"),
    "strict roles": lambda: with_roles(form="strict"),
    "limited roles": lambda: with_roles(form="magnitude", max_distance=9),
    "limited": lambda: convert(vanilla("Llama"), "rope", max_distance=11),
    "limit beyond": lambda: convert(vanilla("Llama"), "rope", max_distance=64),
    "dynamic": lambda: scaled(vanilla("Llama"), rope_type="dynamic", factor=4.0),
}
OTHERS = (
    {
        f"{form} {family}": partial(
            lambda f, x: convert(vanilla(f), x) if x else vanilla(f), family, x
        )
        for family in FAMILIES
        if family != "Llama"
        for form, x in (("rope", None), ("slack", "slack"))
    }
    | {
        "limited Mistral": lambda: convert(vanilla("Mistral"), "rope", max_distance=5),
        "limited beyond the window": lambda: convert(vanilla("Mistral"), "rope", max_distance=11),
    }
    | {f"roles {family}": partial(with_roles, family) for family in ("Qwen2", "GLM-4", "GPT-NeoX")}
)
FEW = ["slack", "strict roles", "limited", "limited Mistral", "dynamic"]


def computed(model, ids, labels, own=lambda x: x, share=1):
    """The model's loss, logits, and the gradients of the same loss in the model's precision."""
    model.zero_grad()
    out = model(input_ids=ids, labels=labels)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    total = torch.nn.functional.cross_entropy(
        out.logits.transpose(1, 2), own(targets), reduction="sum"
    )
    (total / (targets != -100).sum() * share).backward()
    return out.loss.detach(), out.logits.detach(), [p.grad.clone() for p in model.parameters()]


def compare(make, length, group, dtype=torch.float64, checkpointing=False, tolerance=1e-11):
    """Assert that a model reads in parts what it reads whole."""
    model = make().to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (2, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    loss, logits, gradients = computed(model, ids, labels)
    if checkpointing:
        model.gradient_checkpointing_enable()
    split_sequences(model, group)
    split = split_of(model, length)
    assert split is not None
    own = partial(split.own, dim=1)
    own_loss, own_logits, found = computed(model, ids, labels, own, group.size())
    for part in (own_loss, *found):
        dist.all_reduce(part, group=group)
        part /= group.size()
    # Relative to the largest number: one process, too, sums in some order. Transformers computes
    # the loss in float32.
    assert (own_loss - loss).abs() <= 1e-6 * loss
    assert (own_logits - own(logits)).abs().max() <= tolerance * logits.abs().max()
    for x, y in zip(found, gradients, strict=True):
        assert (x - y).abs().max() <= tolerance * max(float(y.abs().max()), 1e-3)


def compare_all(cases, length, group, **options):
    for name in cases:
        try:
            compare((LLAMA | OTHERS)[name], length, group, **options)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error


def test_losses_and_gradients():
    in_processes(2, partial(compare_all, FEW, LENGTH))


def test_gradient_checkpointing_and_lengths_that_divide():
    in_processes(2, partial(compare_all, FEW[:2], 32, checkpointing=True))


@pytest.mark.parametrize("length", [4, 5])
def test_parts_of_one_token(length):
    in_processes(4, partial(compare_all, FEW, length))


def test_four_heads_in_three_processes():
    # Whose norms do not compute in float32: matrices of other shapes round otherwise.
    in_processes(3, partial(compare_all, ["rope GPT-NeoX", "roles GPT-NeoX"], LENGTH))


def too_short(group):
    model = vanilla("Llama")
    split_sequences(model, group)
    with pytest.raises(UserError, match="at least as many tokens, got 1"):
        model(torch.tensor([[3]]))


def refused(group):
    model, ids = LLAMA["slack"](), torch.arange(3, 12).view(1, -1)
    split_sequences(model, group)
    split_sequences(model, group)  # once is enough
    padded = torch.ones_like(ids)
    model(ids, attention_mask=padded)
    padded[0, 0] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for options, message in (
        ({"attention_mask": padded}, "without padding"),
        ({"position_ids": packed}, "cannot be kept apart"),
        ({"past_key_values": DynamicCache()}, "no cache"),
    ):
        with pytest.raises(UserError, match=message):
            model(ids, **options)
    with pytest.raises(UserError, match="a part of a model"):
        vanilla_model = vanilla("Llama")
        split_sequences(vanilla_model, group)
        vanilla_model.model(ids)
    gptj = GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=40)
    for other in (tiny_model("alibi"), GPTJForCausalLM(gptj)):
        with pytest.raises(UserError, match=r"of the families .*; got"):
            split_sequences(other, group)


def test_what_is_not_supported_is_refused():
    in_processes(1, refused)
    in_processes(2, too_short)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_form_and_role(processes, checkpointing):
    case = partial(compare_all, LLAMA, checkpointing=checkpointing)
    in_processes(processes, partial(case, LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_family(processes):
    # The norms of some compute in float32.
    in_processes(processes, partial(compare_all, OTHERS, LENGTH, tolerance=1e-6))


@pytest.mark.slow
def test_blocks_of_queries_in_float32():
    """Chunks longer than a block of queries, whose masks are formed one after the other."""
    cases = partial(compare_all, ["slack", "strict roles", "rope"], 2200)
    in_processes(2, partial(cases, dtype=torch.float32, tolerance=2e-4))
