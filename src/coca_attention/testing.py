"""Consistency checks for any Transformers causal LM: same logits, however they are computed.

The same logits can be computed in many ways: in one pass or token by token with a cache, padded on
either side, after a longer text, in another row of the batch. Rotary embeddings often break this: a
base that depends on the length, positions that count padding, keys rotated under one rule and read
under another. Each check measures the largest difference between two ways; `assert_consistent`
reports those beyond round-off. Checks process up to six times the given tokens.

Example:
    >>> from coca_attention.testing import assert_consistent
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> assert_consistent(LlamaForCausalLM(config))
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from inspect import signature

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache

from coca_attention.errors import check_is_loaded

__all__ = [
    "CHECKS",
    "assert_consistent",
    "decoded_logits",
    "difference",
    "logits",
    "measure_consistency",
    "some_tokens",
]

Check = Callable[[PreTrainedModel, Tensor], float]


def some_tokens(model: PreTrainedModel, batch: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    """Random token ids (B, T) from a model's vocabulary, without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    config: PreTrainedConfig = model.config.get_text_config()
    ids = torch.randint(0, config.vocab_size - 1, (batch, length), generator=generator)
    pad = config.pad_token_id
    if isinstance(pad, int):
        ids += ids >= pad  # skips the padding token
    return ids.to(model.device)


@torch.no_grad()
def logits(model: PreTrainedModel, input_ids: Tensor, **kwargs: Tensor | int) -> Tensor:
    """Logits (B, T, vocabulary) of one forward pass, float64."""
    return model(input_ids=input_ids, use_cache=False, **kwargs).logits.double()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference, relative to the largest absolute value of ``theirs``."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.no_grad()
def decoded_logits(
    model: PreTrainedModel, input_ids: Tensor, cache: Cache | None = None, first: int = 0
) -> Tensor:
    """Logits of a text read with a cache: a prefill, one token, a chunk, then single tokens."""
    length = input_ids.shape[1]
    first = first or max(1, 2 * length // 5)
    chunk = min(first + 1 + max(2, length // 5), length)
    edges = [0, first, min(first + 1, length), *range(chunk, length + 1)]
    cache = cache if cache is not None else DynamicCache(config=model.config.get_text_config())
    # Renamed in Transformers 5.24.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    pieces = [
        model(input_ids=input_ids[:, a:b], use_cache=True, **{name: cache}).logits
        for a, b in itertools.pairwise(edges)
        if a < b
    ]
    return torch.cat(pieces, dim=1).double()


def decoding(model: PreTrainedModel, input_ids: Tensor) -> float:
    """Reading in pieces with a growing cache, compared with one pass."""
    return difference(decoded_logits(model, input_ids), logits(model, input_ids))


def static_decoding(model: PreTrainedModel, input_ids: Tensor) -> float:
    """Reading in pieces with a cache of fixed size, compared with one pass."""
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=input_ids.shape[1] + 5)
    return difference(decoded_logits(model, input_ids, cache), logits(model, input_ids))


def long_then_short(model: PreTrainedModel, input_ids: Tensor) -> float:
    """A short text read after a long one, compared with the same text read before it."""
    short = input_ids[:, : max(1, input_ids.shape[1] // 3)]
    before = logits(model, short)
    logits(model, input_ids.repeat(1, 4))
    return difference(logits(model, short), before)


def batch_order(model: PreTrainedModel, input_ids: Tensor) -> float:
    """Rows in reverse order, and each row alone, compared with the batch."""
    batch = logits(model, input_ids)
    reversed_rows = logits(model, input_ids.flip(0)).flip(0)
    alone = torch.cat([logits(model, row.unsqueeze(0)) for row in input_ids])
    return max(difference(reversed_rows, batch), difference(alone, batch))


def batch_composition(model: PreTrainedModel, input_ids: Tensor) -> float:
    """A short text batched with one six times as long, compared with the short text alone."""
    short, long = input_ids[:1], input_ids[1:2].repeat(1, 6)
    alone = logits(model, short)
    padding = torch.zeros_like(long[:, short.shape[1] :])
    rows = torch.cat((torch.cat((short, padding), 1), long))
    mask = torch.ones_like(rows)
    mask[0, short.shape[1] :] = 0
    together = logits(model, rows, attention_mask=mask)[:1, : short.shape[1]]
    return difference(together, alone)


def padding(model: PreTrainedModel, input_ids: Tensor, left: bool) -> float:
    """Rows of different lengths in one padded batch, compared with each row alone."""
    length = input_ids.shape[1]
    rows = [row[: length - 3 * index] for index, row in enumerate(input_ids) if length > 3 * index]
    batch = torch.zeros(len(rows), length + 2, dtype=torch.long, device=input_ids.device)
    mask = torch.zeros_like(batch)
    spans = []
    for index, row in enumerate(rows):
        start = batch.shape[1] - len(row) if left else 0
        spans.append(slice(start, start + len(row)))
        batch[index, spans[-1]] = row
        mask[index, spans[-1]] = 1
    together = logits(model, batch, attention_mask=mask)
    return max(
        difference(together[index, span], logits(model, row.unsqueeze(0))[0])
        for index, (row, span) in enumerate(zip(rows, spans, strict=True))
    )


CHECKS: dict[str, Check] = {
    "decoding": decoding,
    "static decoding": static_decoding,
    "long then short": long_then_short,
    "batch order": batch_order,
    "batch composition": batch_composition,
    "left padding": functools.partial(padding, left=True),
    "right padding": functools.partial(padding, left=False),
}


def measure_consistency(
    model: PreTrainedModel, input_ids: Tensor | None = None, checks: Iterable[str] = tuple(CHECKS)
) -> dict[str, float]:
    """Largest difference of logits, relative to the largest logit, for every check of `CHECKS`."""
    check_is_loaded(model)
    ids, checks = input_ids if input_ids is not None else some_tokens(model), tuple(checks)
    if not checks:
        raise ValueError(f"no checks; choose from {', '.join(CHECKS)}")
    if ids.dim() != 2 or ids.shape[0] < 2 or ids.shape[1] < 10:
        raise ValueError(
            f"input_ids must have at least 2 rows of 10 tokens, got {tuple(ids.shape)}"
        )
    unknown = set(checks) - CHECKS.keys()
    if unknown:
        raise ValueError(f"unknown checks {sorted(unknown)}; choose from {', '.join(CHECKS)}")
    return {name: CHECKS[name](model, ids) for name in checks}


def assert_consistent(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    checks: Iterable[str] = tuple(CHECKS),
    *,
    tolerance: float | None = None,
) -> None:
    """Raise AssertionError unless every check is within round-off.

    Args:
        model: A causal language model in evaluation mode; in half precision with a tolerance.
        input_ids: (B, T), at least 2 rows of 10 tokens, without padding; default `some_tokens`.
        checks: Names in `CHECKS`.
        tolerance: Largest difference relative to the largest logit; default: 1,000 times the
            machine epsilon of the model's dtype.
    """
    check_is_loaded(model)
    if tolerance is None:
        if torch.finfo(model.dtype).bits < 32:
            raise ValueError(
                f"in {model.dtype} rounding hides the differences that these checks look for: use "
                "model.float(), or set a tolerance"
            )
        tolerance = 1000 * torch.finfo(model.dtype).eps
    found = measure_consistency(model, input_ids, checks)
    failed = {name: value for name, value in found.items() if not value <= tolerance}
    if failed:
        listed = ", ".join(f"{name} {value:.2g}" for name, value in failed.items())
        raise AssertionError(
            f"{type(model).__name__} is not consistent: {listed} (differences relative to the "
            f"largest logit; round-off is at most {tolerance:.2g})"
        )
