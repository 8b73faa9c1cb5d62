"""Tokens that need long context, after LongPPL (arXiv 2410.23771).

Most tokens can be predicted from a short context and dominate an average over all tokens. A model
that is good at long context (the evaluator) selects the others; all models are scored on those.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_attention.models.scaling import rotary_restored
from coca_lab.data import load_tokenizer
from coca_lab.evaluation.perplexity.score import (
    TokenDocument,
    TokenScores,
    score_documents,
)
from coca_lab.loading import load_model


def key_tokens(
    evaluator: PreTrainedModel,
    documents: Sequence[TokenDocument],
    *,
    window: int,
    short: int,
    stride: int,
    first_target: int = 1,
    gain: float = 2.0,
    least: float = -2.0,
    batch_tokens: int = 8192,
) -> list[Tensor]:
    """Tokens of every document that the evaluator predicts from the long context only.

    A token is a key token if its log-probability increases by more than ``gain`` nats when the
    evaluator reads ``window`` tokens instead of ``short``, and then is above ``least``.

    Args:
        evaluator: A causal language model that reads ``window`` tokens well.
        documents: Token documents.
        window: The long context, in tokens.
        short: The short context, in tokens.
        stride: Tokens scored in one pass of the long context.
        first_target: Index of the first scored token.
        gain: Minimum gain in nats.
        least: Minimum log-probability in nats.
        batch_tokens: Tokens per batch; a batch has at least one window.

    Returns:
        One boolean tensor (length,) per document.
    """
    found = []
    for size, step in ((window, stride), (short, max(1, min(short // 8, stride)))):
        scores = [TokenScores(len(document.tokens)) for document in documents]
        # Transformers' own dynamic scaling would read the short context as it did the long one.
        with rotary_restored(evaluator):
            score_documents(
                evaluator,
                documents,
                window=size,
                stride=step,
                first_target=first_target,
                batch_tokens=batch_tokens,
                per_token=scores,
            )
        found.append(scores)
    # Tokens that were not scored are NaN; comparisons with NaN are false.
    return [
        (near.nats - far.nats > gain) & (-far.nats > least)
        for far, near in zip(*found, strict=True)
    ]


def load_evaluator(
    path: str, tokenizer: PreTrainedTokenizerBase, *, dtype: str = "float32", device: str | None
) -> PreTrainedModel:
    """Load the evaluator from a folder or by name.

    Raises:
        UserError: If its tokenizer differs from ``tokenizer``.
    """
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{path}: the evaluator of key tokens has another tokenizer than the model; choose an "
            "evaluator that shares the model's tokenizer"
        )
    return load_model(path, dtype=dtype, device=device)


def key_nats(scores: Sequence[TokenScores], keys: Sequence[Tensor]) -> tuple[float, int]:
    """Nats and number of the scored key tokens."""
    nats, tokens = 0.0, 0
    for score, mask in zip(scores, keys, strict=True):
        chosen = mask & (score.read > 0)
        nats += score.nats[chosen].double().sum().item()
        tokens += int(chosen.sum())
    return nats, tokens


def fingerprint(keys: Sequence[Tensor]) -> list[int]:
    """Counts and position sums of the key tokens: identifies a selection in the journal."""
    return [
        int(part)
        for mask in keys
        for part in (mask.sum(), (mask.nonzero().flatten() + 1).square().sum())
    ]
