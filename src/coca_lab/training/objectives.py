"""Training objectives that learn from a teacher.

``attention``: every attention layer of the student gets the input of the teacher's layer, and its
output before the output projection is matched to the teacher's. ``logits``: the student's
prediction is matched to the teacher's. ``hidden_states``: the prediction and the outputs of all
layers are matched. The first is LoLCATs' attention transfer (arXiv 2410.10254), and the order from
attention to predictions MOHAWK's (arXiv 2408.10189).

The teacher runs once per batch, without gradients, in its own dtype. Only the objective refers to
it, so it is never saved with the student. The student runs through its own forward pass, so masks,
windows and positions are those of its family, and wrappers for several processes work as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from coca_attention.errors import UserError, error_prefix
from coca_attention.models.configuration import head_width
from coca_attention.models.families import family_of
from coca_lab.recipe_sections import Objective

Args = tuple[Tensor, ...]
Kwargs = dict[str, Tensor]
"""Of a module, as hooks get them."""
Loss = Callable[[nn.Module, Kwargs], Tensor]
"""Maps the model, as the Trainer wraps it, and a batch to the mean loss of the batch, a scalar."""

# Weight of the hidden states' relative distance, next to the divergence of the prediction in nats.
HIDDEN_WEIGHT = 4.0


@contextmanager
def teacher_loss(
    teacher: PreTrainedModel, student: PreTrainedModel, objective: Objective
) -> Iterator[Loss]:
    """The loss of an objective, while hooks are in place; UserError if the teacher does not fit."""
    check_teacher(teacher, student, objective)
    teacher.requires_grad_(False).eval()
    if objective == "attention":
        with _matched_attention(teacher, student) as matched:
            yield matched
        return
    with_layers = objective == "hidden_states"

    def loss(model: nn.Module, batch: Kwargs) -> Tensor:
        with torch.no_grad():
            theirs = teacher(**_inputs(batch), output_hidden_states=with_layers)
        ours = model(**_inputs(batch), output_hidden_states=with_layers)
        divergence = prediction_distance(ours.logits, theirs.logits)
        if not with_layers:
            return divergence
        # The first are the embeddings.
        pairs = zip(ours.hidden_states[1:], theirs.hidden_states[1:], strict=True)
        distances = [relative_distance(x, y.to(x.device)) for x, y in pairs]
        return divergence + HIDDEN_WEIGHT * _mean(distances)

    yield loss


def check_teacher(teacher: PreTrainedModel, student: PreTrainedModel, objective: Objective) -> None:
    """Raise UserError unless the student can learn from the teacher by the objective."""
    if objective == "attention":
        with error_prefix("objective attention: "):
            for model in (teacher, student):
                family_of(model)
    names = ["vocab_size"]
    if objective != "logits":
        names += ["num_hidden_layers", "hidden_size", "num_attention_heads"]
    theirs = teacher.config.get_text_config()
    ours = student.config.get_text_config()
    sizes = {name: (getattr(theirs, name), getattr(ours, name)) for name in names}
    if objective != "logits":
        sizes["head_dim"] = (head_width(theirs), head_width(ours))
    other = [f"{name} {its} instead of {own}" for name, (its, own) in sizes.items() if its != own]
    if other:
        raise UserError(
            f"the teacher does not fit the model for objective {objective}: it has "
            f"{', '.join(other)}; use the model that this one was converted from"
        )


def relative_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of texts (B, T, …) by each one's variance, on average; 1 is a constant's."""
    # By the variance of a micro-batch, its size would change what is learned.
    outputs = outputs.float().flatten(1)
    targets = targets.float().flatten(1)
    variance = targets.var(1).clamp_min(torch.finfo(torch.float32).tiny)
    return (F.mse_loss(outputs, targets, reduction="none").mean(1) / variance).mean()


def prediction_distance(logits: Tensor, targets: Tensor) -> Tensor:
    """KL divergence of logits (..., vocabulary) from the teacher's, in nats per token."""
    ours, theirs = (x.float().log_softmax(-1).flatten(0, -2) for x in (logits, targets))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def _mean(distances: list[Tensor]) -> Tensor:
    return torch.stack([x.to(distances[0].device) for x in distances]).mean()


@contextmanager
def _matched_attention(teacher: PreTrainedModel, student: PreTrainedModel) -> Iterator[Loss]:
    """Hooks that pass the teacher's inputs to the student and record the outputs of both."""
    # They stay for the whole context, as a checkpointed layer runs again in the backward pass. The
    # student returns the distance as its loss, since wrappers for several processes reduce the
    # gradients of nothing but what the model returns.
    inputs = dict[int, Tensor]()
    targets = dict[int, Tensor]()
    outputs = dict[int, Tensor]()

    def record(inputs: dict[int, Tensor], index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def replace_input(index: int) -> Callable[..., tuple[Args, Kwargs]]:
        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            if not module.training:  # validation measures the model as it is
                return args, kwargs
            hidden = args[0] if args else kwargs["hidden_states"]
            taught = inputs[index].to(hidden.dtype)
            if args:
                return (taught, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": taught}

        return hook

    def add_loss(
        module: nn.Module, args: Args, result: CausalLMOutputWithPast
    ) -> CausalLMOutputWithPast:
        if not module.training:  # validation asks for the model's own loss, and for answers
            return result
        result["loss"] = _mean([relative_distance(outputs[i], targets[i]) for i in targets])
        return result

    hooks = [student.register_forward_hook(add_loss)]

    def before(module: nn.Module, hook: Callable[..., object]) -> None:
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for index, (attention, projection) in enumerate(_attention_layers(teacher)):
        before(attention, record(inputs, index))
        before(projection, record(targets, index))
    for index, (attention, projection) in enumerate(_attention_layers(student)):
        before(attention, replace_input(index))
        before(projection, record(outputs, index))
        # Nothing after the layer contributes to the loss, so it needs no graph.
        hooks.append(
            attention.register_forward_hook(
                lambda module, args, result: (result[0].detach(), *result[1:])
            )
        )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        # The logits are not used; one position costs least.
        with torch.no_grad():
            teacher(**_inputs(batch), logits_to_keep=1)
        if isinstance(model, FSDPModule):
            # Outputs of layers have no gradients, which would trigger gathering the weights again.
            model.set_reshard_after_forward(False)
        return model(**_inputs(batch), logits_to_keep=1).loss

    try:
        yield loss
    finally:
        for hook in hooks:
            hook.remove()


def _attention_layers(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """Every layer's attention module and its output projection, first to last."""
    layout = family_of(model).layout
    modules = layout.modules(model.base_model)
    return [(module, module.get_submodule(layout.output_name)) for module in modules]


def _inputs(batch: Kwargs) -> dict[str, Tensor | bool]:
    """A batch as a model's inputs; without labels the model computes no loss of its own."""
    # Positions tell packed documents apart.
    names = ("input_ids", "attention_mask", "position_ids")
    return {**{name: batch[name] for name in names if name in batch}, "use_cache": False}
