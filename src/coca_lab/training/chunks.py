"""The next-token loss by chunks of tokens, so that the logits of a whole batch never exist."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coca_attention.errors import UserError


def chunk_loss(model: Any, tokens: int) -> None:
    """Let a model in training compute its loss from the logits of a few tokens at a time.

    The logits of a chunk are computed again in the backward pass. What the model returns as logits
    while it trains are then its last hidden states; in evaluation nothing changes.

    Args:
        model: A causal language model of Transformers; changed in place.
        tokens: Tokens of a chunk.

    Raises:
        UserError: If the model does more with its last hidden states than a linear map.
    """
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        raise UserError(
            f"loss_chunk needs logits that are a linear map, and {type(model).__name__} bounds "
            "them (final_logit_softcapping): leave it out"
        )
    head, whole = model.get_output_embeddings(), model.loss_function
    project = head.forward

    def forward(hidden: Tensor) -> Tensor:
        return hidden if model.training else project(hidden)

    def summed(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(project(hidden).float(), targets, reduction="sum")

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        if not model.training:
            return whole(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        targets = kwargs["shift_labels"].to(logits.device)
        count = kwargs.get("num_items_in_batch")
        if count is None:
            count = (targets != -100).sum()
        pairs = zip(
            logits.flatten(0, -2).split(tokens), targets.flatten().split(tokens), strict=True
        )
        sums = [
            checkpoint(summed, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in pairs
        ]
        total: Any = sum(sums)
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    head.forward, model.loss_function = forward, loss
