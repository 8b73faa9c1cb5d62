"""Context parallelism: every process of a group computes its own part of each sequence.

All layers but attention work on single tokens. Attention gathers the keys and values of all
processes; CoCA gathers its coefficients before rotation, which are half as wide as keys, and forms
the keys at their true positions. In the backward pass, the gradients of keys and values are summed
over the processes and each receives those of its own tokens.

PyTorch's ``context_parallel`` (2.13) gathers keys and values by default, too, but has no windows,
biases or limits of distances, and no CPU kernels.

Legend: B batch, S tokens of a sequence, T those of this process, N processes, H query heads, G
key/value heads, D head width.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.errors import UserError
from coca_attention.models.families import family_of, supported_families
from coca_attention.ops import attend

ATTENTION = "context_parallel"
"""Name of the attention function in Transformers."""


@dataclass(frozen=True)
class Split:
    """One sequence over the processes of a group, in 2 N chunks: process i has i and 2 N - 1 - i.

    In causal attention all processes then have the same work, early chunks being cheap and late
    ones expensive.

    Attributes:
        group: The processes.
        length: S.
        recompute: Whether to gather again in the backward pass rather than keep what was gathered.
    """

    group: "dist.ProcessGroup"
    length: int
    recompute: bool = False

    def chunks(self, rank: int | None = None) -> tuple[slice, slice]:
        """The two chunks of a process, by default of this one."""
        rank = self.group.rank() if rank is None else rank
        count = 2 * self.group.size()
        size, longer = divmod(self.length, count)
        borders = [index * size + min(index, longer) for index in range(count + 1)]
        last = count - 1 - rank
        return slice(*borders[rank : rank + 2]), slice(*borders[last : last + 2])

    def lengths(self) -> list[int]:
        """T of every process."""
        return [
            sum(chunk.stop - chunk.start for chunk in self.chunks(rank))
            for rank in range(self.group.size())
        ]

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Positions of the tokens of this process, (T,), int64."""
        return self.own(torch.arange(self.length, device=device), dim=0)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process, with T instead of S in a dimension."""
        return torch.cat([x.narrow(dim, c.start, c.stop - c.start) for c in self.chunks()], dim)

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """What all processes have, in the order of the sequence, in one exchange.

        Args:
            parts: (..., T, width) each; they differ in their width alone.

        Returns:
            (..., S, width) each.
        """
        whole: Any = _Gather.apply(torch.cat(parts, dim=-1), self)
        return whole.split([part.shape[-1] for part in parts], dim=-1)

    def by_chunk(self, attended: Callable[..., Tensor], *queries: Tensor) -> Tensor:
        """Attention of the queries of this process, one chunk after the other.

        Args:
            attended: From a chunk and its part of the queries to (..., t, width).
            queries: (..., T, D) each.

        Returns:
            (..., T, width).
        """
        sizes = [chunk.stop - chunk.start for chunk in self.chunks()]
        rows = [query.split(sizes, dim=-2) for query in queries]
        return torch.cat([*map(attended, self.chunks(), *rows)], dim=-2)

    def run(self, attended: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``attended(*inputs)``, keeping nothing but its inputs if `recompute`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(attended, *inputs, use_reentrant=False)
        return attended(*inputs)


def _collective(name: str, before: str) -> Callable[..., Any]:
    """A function of torch.distributed, by its name since PyTorch 2.13 or the one before."""
    return getattr(dist, name, None) or getattr(dist, before)


class _Gather(torch.autograd.Function):
    """(..., T, width) of every process to (..., S, width); gradients are summed over processes.

    Parts are exchanged along the first dimension and with one length, that of the longest.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split) -> Tensor:  # pyright: ignore
        ctx.split, size, longest = split, split.group.size(), max(split.lengths())
        # Index in the exchange of every position of the sequence.
        parts = [
            torch.cat([torch.arange(c.start, c.stop) for c in split.chunks(rank)])
            for rank in range(size)
        ]
        slots = [torch.arange(len(x)) + rank * longest for rank, x in enumerate(parts)]
        order = torch.empty(split.length, dtype=torch.long)
        order[torch.cat(parts)] = torch.cat(slots)
        ctx.order = order.to(part.device)
        sent = part.movedim(-2, 0)
        sent = F.pad(sent, (0, 0) * (sent.dim() - 1) + (0, longest - len(sent))).contiguous()
        whole = sent.new_empty(size * longest, *sent.shape[1:])
        gather = _collective("all_gather_single", "all_gather_into_tensor")
        gather(whole, sent, group=split.group)
        return whole[ctx.order].movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        split, longest = ctx.split, max(ctx.split.lengths())
        grad = grad.movedim(-2, 0)
        whole = grad.new_zeros(split.group.size() * longest, *grad.shape[1:])
        whole[ctx.order] = grad
        own = whole.new_empty(longest, *whole.shape[1:])
        reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        reduce_scatter(own, whole, group=split.group)
        return own[: split.lengths()[split.group.rank()]].movedim(0, -2), None


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
    """Causal attention of a model's layer, with the keys of all processes.

    Args:
        module: The attention module.
        query: (B, H, T, D), after rotation.
        key: (B, G, T, D), after rotation.
        value: (B, G, T, Dv).
        attention_mask: None.
        scaling: Multiplies the scores; default 1/sqrt(D).
        dropout: Probability of dropping an attention weight.
        sliding_window: Keys that a query sees.
        split: How the sequence is split.
        **kwargs: Of other attention functions.

    Returns:
        (B, T, H, Dv), and None for the attention weights.

    Raises:
        UserError: If the layer needs what is not supported, such as a cap on scores.
    """
    extra = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if split is None or extra:
        why = f"attention with {', '.join(extra)}" if extra else "a part of a model"
        raise UserError(f"context parallelism does not support {why}")

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = split.gather(key, value)

        def chunk_of(chunk: slice, rows: Tensor) -> Tensor:
            keys, values = key[..., : chunk.stop, :], value[..., : chunk.stop, :]
            return attend(rows, keys, values, window=sliding_window, scale=scaling, dropout=dropout)

        return split.by_chunk(chunk_of, query)

    return split.run(attended, query, key, value).transpose(1, 2).contiguous(), None


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
    layers_recompute = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    for name, module in model.named_modules():
        # Not once, because a rotary scaling replaces the module.
        if name.rpartition(".")[2].startswith("rotary_emb") and not hasattr(module, "reads_last"):
            module.reads_last = True
            module.register_forward_pre_hook(partial(_with_last, model), with_kwargs=True)
            module.register_forward_hook(_without_last)
    recompute = model.training and not layers_recompute
    split = Split(group, length, recompute)
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
