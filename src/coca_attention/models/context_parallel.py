"""Context parallelism: every process of a group computes its own part of each sequence.

All layers but attention work on single tokens. Around attention the processes exchange tokens for
heads (Ulysses, arXiv 2309.14509): each attends with some of the heads over the whole sequence, so
that windows, biases and limits of distances are what they are in one process. CoCA exchanges its
coefficients before rotation, which are half as wide as keys, and forms the keys at their positions.

Legend: B batch, S tokens of a sequence, T those of this process, N processes, H query heads, G
key/value heads, D head width.
"""

import inspect
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.errors import UserError
from coca_attention.models.families import family_of, supported_families
from coca_attention.ops import attend

ATTENTION = "context_parallel"
"""Name of the attention function in Transformers."""


@dataclass(frozen=True)
class Split:
    """One sequence over the processes of a group, in parts of equal length or one token more."""

    group: "dist.ProcessGroup"
    length: int  # S

    def lengths(self) -> list[int]:
        """T of every process."""
        size, longer = divmod(self.length, self.group.size())
        return [size + (rank < longer) for rank in range(self.group.size())]

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Positions of the tokens of this process, (T,), int64."""
        return self.own(torch.arange(self.length, device=device), dim=0)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process, with T instead of S in a dimension."""
        return x.split(self.lengths(), dim)[self.group.rank()].contiguous()

    def to_heads(self, query: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        """Exchange the tokens of this process for some of the heads.

        Key/value heads are repeated until every process has as many, and all heads filled up with
        zeros if N does not divide H: query (B, H, T, width) and keys (B, G, T, width) each, in one
        exchange, to (B, heads, S, width) each.
        """
        processes, heads, kv_heads = self.group.size(), query.shape[1], keys[0].shape[1]
        together = heads if heads % processes else math.lcm(kv_heads, processes)
        joined = torch.cat(keys, dim=-1).repeat_interleave(together // kv_heads, dim=1)
        own, lengths = query.shape[2], self.lengths()

        def exchanged(x: Tensor) -> Tensor:
            x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % processes))
            sent = x.unflatten(1, (processes, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
            found: Any = _Exchange.apply(sent, [own] * processes, lengths, self.group)
            return found.permute(1, 2, 0, 3)

        widths = [x.shape[-1] for x in keys]
        return exchanged(query), *exchanged(joined).split(widths, dim=-1)

    def to_tokens(self, output: Tensor, heads: int) -> Tensor:
        """The inverse for an output: (B, heads of this process, S, width) to (B, T, H, width)."""
        processes, lengths = self.group.size(), self.lengths()
        own = lengths[self.group.rank()]
        sent = output.permute(2, 0, 1, 3)
        found: Any = _Exchange.apply(sent, lengths, [own] * processes, self.group)
        found = found.unflatten(0, (processes, own)).permute(2, 1, 0, 3, 4).flatten(2, 3)
        return found[:, :, :heads].contiguous()


class _Exchange(torch.autograd.Function):
    """All-to-all along the first dimension; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:  # pyright: ignore
        ctx.way = received, sent, group
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        back: Any = _Exchange.apply(grad, *ctx.way)
        return back, None, None, None


def split_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    split: Split | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a layer, (B, T, H, D), as registered with Transformers."""
    extra = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if split is None or extra:
        why = f"attention with {', '.join(extra)}" if extra else "a part of a model"
        raise UserError(f"context parallelism does not support {why}")
    heads = query.shape[1]
    query, key, value = split.to_heads(query, key, value)
    output = attend(query, key, value, window=sliding_window, scale=scaling, dropout=dropout)
    return split.to_tokens(output, heads), None


def split_sequences(model: PreTrainedModel, group: "dist.ProcessGroup") -> None:
    """Let a causal language model read every sequence in parts, one for each process of a group.

    All processes call the model with the same whole sequences, without padding. Each gets the
    ``logits`` of its own tokens (`split_of` says which) and its part of the ``loss``: the mean of
    that over the group is the mean over all targets. Gradients have to be averaged over the group,
    as DDP and FSDP do.

    Args:
        model: CoCA or rotary; changed in place.
        group: The processes.

    Raises:
        UserError: If the model is not causal, or of no known family. When it is called: if there is
            padding, a cache or a packed batch, or there are fewer tokens than processes.
    """
    known = getattr(model, "context_group", None)
    if known is not None:
        if known is not group:
            raise UserError("the model's sequences are already split over another group")
        return
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise UserError(f"context parallelism is for causal models, got {type(model).__name__}")
    # Attention of other classes may ignore the attention function, or count positions itself.
    adapted: Any = model
    inner = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    if family_of(inner) is None:
        raise UserError(
            f"context parallelism is for CoCA and rotary models of {supported_families(inner)}; "
            f"got {type(inner).__name__}"
        )
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, split_attention)
    model.set_attn_implementation(ATTENTION)
    state: Any = model
    state.context_group, state.context_length = group, 0
    names = [*inspect.signature(model.forward).parameters]
    model.register_forward_pre_hook(partial(_split_inputs, names), with_kwargs=True)


def split_of(model: nn.Module, length: int) -> Split | None:
    """How a model splits sequences of a length; None if it does not."""
    group = getattr(model, "context_group", None)
    return None if group is None else Split(group, length)


def _split_inputs(names: list[str], model: Any, args: Any, kwargs: Any) -> tuple[tuple[()], Any]:
    """From a call with whole sequences to one with the parts of this process."""
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens: Any = given.get("input_ids")
    if tokens is None:
        tokens = given["inputs_embeds"]
    length, device = tokens.shape[1], tokens.device
    group = model.context_group
    if length < group.size():
        raise UserError(
            f"context parallelism over {group.size()} processes needs at least as many tokens, got "
            f"{length}"
        )
    if given.get("past_key_values") is not None:
        raise UserError("context parallelism reads whole sequences and has no cache")
    mask = given.pop("attention_mask", None)
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.all()):
        raise UserError(
            "context parallelism needs sequences without padding: pass no attention_mask, and "
            "sequences of one length"
        )
    steps = torch.arange(length, device=device)
    positions = given.get("position_ids")
    if positions is not None and not (positions == steps).all():
        raise UserError(
            "context parallelism needs positions 0, 1, 2, …: documents in a sequence cannot be "
            "kept apart"
        )
    for name, module in model.named_modules():
        # Not once, because a rotary scaling replaces the module.
        if name.rpartition(".")[2].startswith("rotary_emb") and not hasattr(module, "reads_last"):
            module.reads_last = True
            module.register_forward_pre_hook(partial(_with_last, model), with_kwargs=True)
            module.register_forward_hook(_without_last)
    split = Split(group, length)
    # Read by `_with_last`; layers take `split`, also when they are computed again.
    model.context_length = length
    given |= {"position_ids": split.positions(device)[None], "use_cache": False, "split": split}
    for name in ("input_ids", "inputs_embeds"):
        if given.get(name) is not None:
            given[name] = split.own(given[name], dim=1)
    kept = given.get("logits_to_keep")
    if isinstance(kept, int) and kept:
        given["logits_to_keep"] = (split.positions(device) >= length - kept).nonzero().flatten()
    labels = given.get("labels")
    if labels is not None:
        targets = given.get("shift_labels")
        if targets is None:
            targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        given["labels"] = split.own(labels, dim=1)
        given["shift_labels"] = split.own(targets, dim=1)
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (targets != -100).sum() / group.size()
    return (), given


def _with_last(model: Any, rotary: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Add the last position of the sequence, as the base of some rules depends on it."""
    name = "position_ids"
    positions = kwargs[name] if name in kwargs else args[1]
    last = positions.new_full((len(positions), 1), model.context_length - 1)
    positions = torch.cat((positions, last), dim=1)
    if name in kwargs:
        return args, {**kwargs, name: positions}
    return (args[0], positions, *args[2:]), kwargs


def _without_last(rotary: nn.Module, args: Any, tables: Any) -> tuple[Any, ...]:
    """The tables without that position."""
    return tuple(x[:, :-1] if isinstance(x, Tensor) else x for x in tables)
