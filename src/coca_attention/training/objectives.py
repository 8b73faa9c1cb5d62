"""What training minimises beside the next token: learning from a teacher, in three ways.

``attention``: every attention layer of the student reads what the teacher's own layer reads, and
its output before the output projection is to be the teacher's. ``logits``: the student's
prediction is to be the teacher's. ``hidden_states``: its prediction and what leaves its layers are.

The teacher runs once a batch, without gradients, in its own dtype. It is held by the objective
alone, so nothing of it is saved with the student. The student always runs through its own forward
pass: masks, windows and positions are the family's, and wrappers for several processes see it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models.families import family_of, supported_families
from coca_attention.training.recipe import Objective

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
"""From the model, as the Trainer wraps it, and a batch to the batch's mean loss, a scalar."""

# Of the hidden states' relative distance beside the nats of the prediction.
HIDDEN_WEIGHT = 4.0


@contextmanager
def learning_from(
    teacher: PreTrainedModel, student: PreTrainedModel, objective: Objective
) -> Iterator[Loss]:
    """The loss of an objective, for as long as the context lasts.

    Args:
        teacher: A causal language model; set to evaluation mode and frozen.
        student: The model to train, as it is before any wrapper but PEFT's.
        objective: ``attention``, ``logits`` or ``hidden_states``.

    Raises:
        UserError: If the teacher's vocabulary is another or, for ``attention``, its shape is, or
            one of the two is of no known family.
    """
    inner = _without_adapters(student)
    check_teacher(teacher, inner, objective)
    teacher.requires_grad_(False).eval()
    if objective == "attention":
        with _matched_attention(teacher, inner) as loss:
            yield loss
    else:
        yield (_matched_logits if objective == "logits" else _matched_hidden_states)(teacher)


def check_teacher(teacher: PreTrainedModel, student: PreTrainedModel, objective: Objective) -> None:
    """Raise UserError unless the student can learn from the teacher by the objective."""
    if objective == "attention":
        for model in (teacher, student):
            if family_of(model) is None:
                raise UserError(
                    f"the attention layers of {type(model).__name__} are not known: the objective "
                    f"attention takes models of {supported_families(model)}"
                )
    theirs, ours = (_shape(model.config, objective) for model in (teacher, student))
    other = [
        f"{name} {theirs[name]} in place of {ours[name]}"
        for name in theirs
        if theirs[name] != ours[name]
    ]
    if other:
        raise UserError(
            f"the teacher does not fit the model for the objective {objective}: it has "
            f"{', '.join(other)}; name the model that this one was made from"
        )


def _shape(config: Any, objective: Objective) -> dict[str, int]:
    """What teacher and student must have in common."""
    config = config.get_text_config()
    if objective == "logits":
        return {"vocab_size": config.vocab_size}
    names = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**{name: getattr(config, name) for name in names}, "head_dim": width}


def relative_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over the variance of the targets: 1 is as bad as a constant.

    Args:
        outputs: Any shape.
        targets: The same shape.

    Returns:
        A scalar in float32.
    """
    targets = targets.float()
    variance = targets.var().clamp_min(torch.finfo(torch.float32).tiny)
    return F.mse_loss(outputs.float(), targets) / variance


def prediction_distance(logits: Tensor, targets: Tensor) -> Tensor:
    """KL divergence from the teacher's next-token distribution, in nats a token.

    Args:
        logits: The student's, (..., vocabulary).
        targets: The teacher's, the same shape.

    Returns:
        A scalar in float32.
    """
    ours, theirs = (x.float().log_softmax(-1).flatten(0, -2) for x in (logits, targets))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def _matched_logits(teacher: PreTrainedModel) -> Loss:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        targets = _read(teacher, batch).logits
        return prediction_distance(model(**_inputs(batch)).logits, targets)

    return loss


def _matched_hidden_states(teacher: PreTrainedModel) -> Loss:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        theirs = _read(teacher, batch, output_hidden_states=True)
        ours = model(**_inputs(batch), output_hidden_states=True)
        # The first are the embeddings.
        pairs = zip(ours.hidden_states[1:], theirs.hidden_states[1:], strict=True)
        distances = [relative_distance(x, y.to(x.device)) for x, y in pairs]
        mean = torch.stack([x.to(distances[0].device) for x in distances]).mean()
        return prediction_distance(ours.logits, theirs.logits) + HIDDEN_WEIGHT * mean

    return loss


@contextmanager
def _matched_attention(teacher: PreTrainedModel, student: PreTrainedModel) -> Iterator[Loss]:
    """Hooks on both models that carry the teacher's inputs over and both outputs out.

    They stay for the whole context: a checkpointed layer runs again in the backward pass. The
    distance is given out as the student's own loss: wrappers for several processes take gradients
    together only of what they see leave the model.
    """
    inputs: dict[int, Tensor] = {}
    targets: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def note_input(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def take_teachers(index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not module.training:  # measured, not trained: the model is to be itself
                return args, kwargs
            own = args[0] if args else kwargs["hidden_states"]
            given = inputs[index].to(own.dtype)
            if args:
                return (given, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": given}

        return hook

    def note(kept: dict[int, Tensor], index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            kept[index] = args[0]

        return hook

    def cut(module: nn.Module, args: Any, result: Any) -> Any:
        # What follows a layer does not count, so nothing of it has to be kept for gradients.
        return (result[0].detach(), *result[1:])

    def give_loss(module: nn.Module, args: Any, result: Any) -> Any:
        if result.get("loss") is not None:  # the model was asked for its own, to be measured
            return result
        distances = [relative_distance(outputs[i], targets[i]) for i in range(len(targets))]
        result["loss"] = torch.stack([x.to(distances[0].device) for x in distances]).mean()
        return result

    hooks: list[Any] = [student.register_forward_hook(give_loss)]
    for index, (attention, projection) in enumerate(_attention_layers(teacher)):
        hooks.append(attention.register_forward_pre_hook(note_input(index), with_kwargs=True))
        hooks.append(projection.register_forward_pre_hook(note(targets, index)))
    for index, (attention, projection) in enumerate(_attention_layers(student)):
        hooks.append(attention.register_forward_pre_hook(take_teachers(index), with_kwargs=True))
        hooks.append(projection.register_forward_pre_hook(note(outputs, index)))
        hooks.append(attention.register_forward_hook(cut))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        # One position's logits are enough: the head is as wide as the vocabulary.
        _read(teacher, batch, logits_to_keep=1)
        if isinstance(model, FSDPModule):
            # Nothing that leaves a layer has gradients, so nothing would gather its weights again.
            model.set_reshard_after_forward(False)
        return model(**_inputs(batch), logits_to_keep=1).loss

    try:
        yield loss
    finally:
        for hook in hooks:
            hook.remove()


def _attention_layers(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """Every layer's attention module and its output projection, first to last."""
    family = family_of(model)
    assert family is not None  # `check_teacher`
    body: Any = model.base_model
    layout = family.layout
    return [(m, m.get_submodule(layout.output_name)) for m in layout.modules(body)]


def _without_adapters(model: Any) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def _read(teacher: Any, batch: dict[str, Tensor], **kwargs: Any) -> Any:
    device = batch["input_ids"].device
    if teacher.device != device:
        teacher.to(device)
    return teacher(**_inputs(batch), **kwargs)


def _inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a model reads of a batch; without labels it computes no loss of its own."""
    read = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    return {**read, "use_cache": False}
