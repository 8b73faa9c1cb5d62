"""Tokens that long context helps with, after LongPPL (arXiv 2410.23771).

Most tokens can be predicted from the few before them, and drown the others in an average. A model
that is good at long context says which tokens are the others; every model is then judged on those.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from coca_attention.data import load_tokenizer
from coca_attention.errors import UserError
from coca_attention.evaluation.perplexity.score import (
    TokenDocument,
    TokenScores,
    score_documents,
)
from coca_attention.models import load_model


def key_tokens(
    evaluator: nn.Module,
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
    """Which tokens of every document the evaluator predicts from far away only.

    A token is a key token if the evaluator's log-probability of it gains more than ``gain`` nats
    from reading ``window`` tokens in place of ``short``, and is above ``least`` then.

    Args:
        evaluator: A causal language model that reads ``window`` tokens well.
        documents: Token documents.
        window: The long context, in tokens.
        short: The short context, in tokens.
        stride: Tokens judged in one pass of the long context.
        first_target: Index of the first judged token.
        gain: See above, in nats.
        least: See above, in nats.
        batch_tokens: Tokens read at once.

    Returns:
        One boolean tensor (length,) a document.
    """
    found = []
    for size, step in ((window, stride), (short, max(1, min(short // 8, stride)))):
        scores = [TokenScores(len(document.tokens)) for document in documents]
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
    # A comparison with NaN, of tokens that were not judged, is false.
    return [
        (near.nats - far.nats > gain) & (-far.nats > least)
        for far, near in zip(*found, strict=True)
    ]


def load_evaluator(
    path: str, tokenizer: PreTrainedTokenizerBase, *, dtype: str = "float32", device: str | None
) -> nn.Module:
    """The evaluator of a folder or name.

    Raises:
        UserError: If its tokenizer is another one, so that its tokens would not be the same.
    """
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{path}: the evaluator of key tokens has another tokenizer than the model that is "
            "judged; both have to share one"
        )
    return load_model(path, dtype=dtype, device=device)


def key_nats(scores: Sequence[TokenScores], keys: Sequence[Tensor]) -> tuple[float, int]:
    """Nats and number of the key tokens that were judged."""
    nats, tokens = 0.0, 0
    for score, mask in zip(scores, keys, strict=True):
        chosen = mask & (score.read > 0)
        nats += score.nats[chosen].double().sum().item()
        tokens += int(chosen.sum())
    return nats, tokens


def fingerprint(keys: Sequence[Tensor]) -> list[int]:
    """Numbers of key tokens and their weighted places: what tells one choice from another."""
    return [
        int(part)
        for mask in keys
        for part in (mask.sum(), (mask.nonzero().flatten() + 1).square().sum())
    ]
