"""Greedy answers to prompts of one length."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coca_attention.errors import UserError
from coca_lab.loading import without_warnings


@contextmanager
def naming_the_limit(model: nn.Module, tokens: int) -> Iterator[None]:
    """Turn the IndexError of a model with a fixed number of positions into a UserError."""
    try:
        yield
    except IndexError as error:
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        raise UserError(
            f"the model cannot read {tokens} tokens at once ({error}); its configuration says "
            f"max_position_embeddings {limit}: use shorter texts"
        ) from error


@contextmanager
def generating_by(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Let a model generate by these settings alone.

    Its own, such as a repetition penalty or beams, would fill in what settings that are passed to
    ``generate`` leave open.
    """
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own


class FiniteScores(LogitsProcessor):
    """Stops a generation at NaN or infinity, which would be read as a token like any other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are, (B, vocabulary); UserError if one is NaN or infinite."""
        if not (scores < math.inf).all():
            raise UserError(
                f"the model returns NaN or infinity after {input_ids.shape[-1]} tokens: its "
                "weights are damaged, or its precision overflows (try float32)"
            )
        return scores


def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Tensor,
    *,
    max_new_tokens: int,
    use_cache: bool = True,
    together: bool = False,
) -> list[str]:
    """Greedy continuations of prompts (B, T) without padding, up to the end-of-text token."""
    generate: Any = model.generate
    prompts = prompts.to(model.device)
    config: Any = model.generation_config
    ends = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = ends[0] if isinstance(ends, list) else ends
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad,
        use_cache=use_cache,
    )
    # Not inference mode: what a model keeps, such as frequencies, may be used in training next.
    limit = naming_the_limit(model, prompts.shape[1] + max_new_tokens)
    reminders = "transformers.generation.stopping_criteria"  # of the training length
    with torch.no_grad(), limit, without_warnings(reminders), generating_by(model, settings):
        output = generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            logits_processor=[FiniteScores()],
            synced_gpus=together,  # processes that share the weights make as many passes
        )
    return tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
