"""Learning from a teacher: the losses, which parameters they reach, what is rejected."""

from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from coca_attention.errors import UserError
from coca_attention.testing import difference
from coca_lab.recipe_sections import Objective
from coca_lab.training import load_recipe, train
from coca_lab.training.objectives import (
    HIDDEN_WEIGHT,
    teacher_loss,
)
from covering import mostly_slow
from families import FAMILIES, VARIED, collinear, vanilla
from runs import weights, write_recipe

LEARNING = mostly_slow(FAMILIES, VARIED)  # every kind of projection


def batch(model, length=12):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def learned(teacher, student, objective) -> tuple[float, dict]:
    student.train().zero_grad()  # while it is evaluated, the objective leaves it alone
    with teacher_loss(teacher, student, objective) as loss:
        value = loss(student, batch(student))
        value.backward()
    return value.item(), gradients(student)


@pytest.mark.parametrize("objective", ["attention", "logits", "hidden_states"])
def test_packed_documents_are_told_apart_by_both(objective):
    """The first document must not matter to what is learned from the second."""
    teacher, student = vanilla("Llama").double(), collinear("Llama").double().train()
    ids = batch(student)["input_ids"][:1]
    places = torch.tensor([[*range(6), *range(6)]])
    with teacher_loss(teacher, student, objective) as loss:
        packed = loss(student, {"input_ids": ids, "position_ids": places})
        parts = [loss(student, {"input_ids": part}) for part in ids.split(6, dim=1)]
    if objective == "logits":  # a mean over tokens
        assert packed.item() == pytest.approx(sum(parts).item() / 2, rel=1e-6)
    with teacher_loss(teacher, student, objective) as loss:
        running = loss(student, {"input_ids": ids})
    assert running.item() != pytest.approx(packed.item(), rel=1e-6)


@pytest.mark.parametrize("family", LEARNING)
def test_every_layer_learns_from_the_teachers_own_input(family):
    """So a layer's gradient does not depend on the layers before it, nor reach them."""
    teacher, student = vanilla(family), collinear(family, "strict")
    value, found = learned(teacher, student, "attention")
    assert 0.01 < value < 100
    parts = {name.rpartition(".")[0].rpartition(".")[2] for name in found}
    assert {"q_proj", "t_proj", "v_proj"} <= parts
    assert parts <= {"q_proj", "t_proj", "v_proj", "q_norm", "t_norm"}
    with torch.no_grad():
        for name, weight in student.named_parameters():
            if ".layers.0." in f".{name}":
                weight.add_(0.3 * torch.randn_like(weight))
    _, again = learned(teacher, student, "attention")
    for name in found:
        assert torch.equal(found[name], again[name]) == (".layers.1." in name), name


@pytest.mark.parametrize("family", LEARNING)
def test_attention_is_matched_before_the_output_projection(family):
    """The loss from the definition: each layer called by hand with the teacher's input."""
    teacher, student = vanilla(family), collinear(family)
    layout = student.base_model.attention_class.layout
    inputs, before = [], {teacher: [], student: []}

    def watch(module, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def replace(module, args, kwargs):
        return (), {**kwargs, "hidden_states": inputs.pop(0)}

    value, _ = learned(teacher, student, "attention")
    student.eval()
    for model, hook in ((teacher, watch), (student, replace)):
        for layer in model.base_model.layers:
            attention = getattr(layer, layout.module_name)
            attention.register_forward_pre_hook(hook, with_kwargs=True)
            getattr(attention, layout.output_name).register_forward_pre_hook(
                lambda module, args, seen=before[model]: seen.append(args[0])
            )
        with torch.no_grad():
            model(batch(student)["input_ids"])
    pairs = zip(before[student], before[teacher], strict=True)
    pairs = [text for both in pairs for text in zip(*both, strict=True)]
    expected = [((ours - theirs) ** 2).mean() / theirs.var() for ours, theirs in pairs]
    assert len(expected) == 2 * 2
    assert value == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["attention", "logits"])
def test_recomputed_activations_give_the_same_gradients(objective):
    teacher, student = vanilla("Llama"), collinear("Llama")
    plain = learned(teacher, student, objective)
    student.gradient_checkpointing_enable()
    saving = learned(teacher, student, objective)
    assert saving[0] == plain[0] and saving[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert torch.allclose(gradient, saving[1][name], atol=1e-7), name


def test_hooks_are_gone_the_teacher_is_left_alone_and_nothing_behind_a_layer_is_kept():
    teacher, student = vanilla("Llama"), collinear("Llama").requires_grad_(False)
    for layer in student.base_model.layers:
        layer.self_attn.t_proj.requires_grad_(True)
    ids = batch(student)["input_ids"]
    before = [model(ids).logits for model in (student, teacher)]
    with teacher_loss(teacher.train(), student.train(), "attention") as loss:
        loss(student, batch(student)).backward()
        assert not teacher.training
        assert not student(ids).logits.requires_grad
    after = [model(ids).logits for model in (student, teacher)]
    assert all(map(torch.equal, after, before))
    assert gradients(student) and not gradients(teacher)
    assert not any(module is teacher for module in student.modules())


@pytest.mark.parametrize("objective", mostly_slow(get_args(Objective), ["logits"]))
def test_the_size_of_micro_batches_changes_no_result(objective, base, text_folder, tmp_path):
    stage = {"name": "only", "train": "qt", "objective": objective}
    path = write_recipe(base, text_folder, tmp_path / "r.yaml", [stage])
    words = ["--training.steps=2", "--training.save_every=2", "--validation.every=null"]
    found = []
    for size in (1, 4):
        recipe = load_recipe(path, [*words, f"--training.micro_batch_size={size}"])
        found.append(weights(train(recipe, tmp_path / str(size))))
    assert all(difference(ours, found[0][name]) < 1e-5 for name, ours in found[1].items())


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"vocab_size": 98}, "logits", "vocab_size 98 instead of 97"),
        ({"num_hidden_layers": 3}, "attention", "num_hidden_layers 3 instead of 2"),
        ({"num_hidden_layers": 3}, "hidden_states", "num_hidden_layers 3 instead of 2"),
        ({"hidden_size": 64}, "hidden_states", "hidden_size 64 instead of 32"),
        ({"num_attention_heads": 2}, "attention", "num_attention_heads 2 instead of 4"),
        ({"head_dim": 16}, "attention", "head_dim 16 instead of 8"),
        (None, "attention", "objective attention: GPT2LMHeadModel is not supported"),
    ],
)
def test_a_teacher_of_another_shape_or_family_is_rejected(changes, objective, message):
    if changes is None:
        config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
        teacher = AutoModelForCausalLM.from_config(config)
    else:
        teacher = vanilla("Llama", **changes)
    with pytest.raises(UserError, match=message):
        learned(teacher, collinear("Llama"), objective)


@pytest.mark.parametrize(
    ("objective", "sizes"),
    [("hidden_states", {}), ("logits", {"hidden_size": 64, "num_hidden_layers": 3})],
)
def test_outputs_are_matched(objective, sizes):
    """Predictions, also those of a larger teacher, and the outputs of all layers."""
    teacher, student = vanilla("Llama", **sizes), collinear("Llama", "strict")
    value, _ = learned(teacher, student, objective)
    ids = batch(student)["input_ids"]
    ours, theirs = (model(ids, output_hidden_states=True) for model in (student, teacher))
    p, q = (model.logits.double().softmax(-1) for model in (theirs, ours))
    expected = (p * (p / q).log()).sum(-1).mean().item()
    for layer in (1, 2) if objective == "hidden_states" else ():
        a, b = (model.hidden_states[layer].flatten(1) for model in (ours, theirs))
        expected += HIDDEN_WEIGHT * ((a - b).square().mean(1) / b.var(1)).mean().item() / 2
    assert value == pytest.approx(expected, rel=1e-5)
