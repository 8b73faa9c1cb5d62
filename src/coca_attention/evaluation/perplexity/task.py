"""The perplexity task: text, windows and evaluation."""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from coca_attention.data import SourceSettings, held_out
from coca_attention.errors import UserError
from coca_attention.evaluation.perplexity.windows import check_sizes, shared_first_target
from coca_attention.evaluation.task import Cell, Session, Subject, Task, check_at_least
from coca_attention.intervals import LARGEST_EXPONENT, bootstrap_interval, perplexity

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from coca_attention.evaluation.perplexity.score import TokenDocument


@dataclass
class TextSettings(SourceSettings):
    """Which text to score."""

    held_out: float = 0.0
    """Read only this held-out share of the documents: the one that a recipe with the same value
    leaves out of training."""
    max_documents: int | None = None
    """Maximum number of documents."""
    max_tokens: int | None = None
    """Truncate every document to this many tokens."""
    skip_short: bool = False
    """Skip documents shorter than the largest window instead of reporting an error."""


@dataclass
class WindowSettings:
    """Which windows the text is read through."""

    windows: list[int] = field(default_factory=lambda: [512])
    """Window sizes: tokens read in one pass."""
    stride: int | None = None
    """Tokens scored in one pass; by default the smallest window."""
    targets: Literal["shared", "all"] = "shared"
    """shared: the same last tokens at every window; all: every token except the first, once."""
    attend_last: int | None = None
    """Also score the tokens with only this many tokens of context."""
    batch_tokens: int = 8192
    """Tokens per batch; a batch has at least one window."""
    positions: int | None = None
    """Also report perplexity by the number of tokens read before, in this many ranges."""
    key_model: str | None = None
    """Also report perplexity on key tokens: those that this model (folder or name, same tokenizer)
    predicts from the largest window but not from key_short tokens."""
    key_short: int = 64
    """Length in tokens of the short context that does not suffice to predict key tokens."""
    seed: int = 0
    """Random seed of the bootstrap."""


@dataclass
class PerplexitySettings(TextSettings, WindowSettings):
    """Which text to score, and the windows it is read through."""


def check_text(settings: TextSettings, at_least: int) -> None:
    """Raise UserError unless the numbers are in range and allow ``at_least`` tokens."""
    check_at_least(settings, 1, "max_documents", "max_tokens")
    if not 0 <= settings.held_out <= 1:
        raise UserError(f"held_out must lie between 0 and 1, got {settings.held_out}")
    if settings.max_tokens is not None and settings.max_tokens < at_least:
        raise UserError(
            f"max_tokens cuts documents to {settings.max_tokens} tokens and the largest window "
            f"needs {at_least}: increase max_tokens, or use smaller windows"
        )


def load_text(
    settings: TextSettings, tokenizer: "PreTrainedTokenizerBase", *, at_least: int
) -> "list[TokenDocument]":
    """Tokenised documents of a source.

    Args:
        settings: Which documents.
        tokenizer: The model's tokenizer; no special tokens are added.
        at_least: Minimum number of tokens in a document.

    Raises:
        UserError: If a document is shorter and ``skip_short`` is off, or no document is left.
    """
    import torch

    from coca_attention.data import encode_documents
    from coca_attention.evaluation.perplexity.score import TokenDocument

    check_text(settings, at_least)
    documents = settings.documents()
    if settings.held_out:
        documents = (d for d in documents if held_out(d, settings.held_out))
    chosen: list[TokenDocument] = []
    short = 0
    for document, ids in encode_documents(documents, tokenizer, batch=8):
        if len(chosen) == settings.max_documents:
            break
        ids = ids[: settings.max_tokens]
        if len(ids) < at_least:
            short += 1
            if not settings.skip_short:
                raise UserError(
                    f"document {document.id!r} has {len(ids)} tokens and the largest window needs "
                    f"{at_least}: use smaller windows, or skip short documents "
                    "(--skip-short)"
                )
            continue
        chosen.append(TokenDocument(document.id, torch.tensor(ids)))
    if not chosen:
        raise UserError(
            f"{settings.source}: no document of at least {at_least} tokens"
            + (f" ({short} are shorter)" if short else "")
        )
    return chosen


def tokens_needed(settings: WindowSettings) -> int:
    """Minimum number of tokens in a document: the largest window and one target."""
    return max(settings.windows) + 1


def check_settings(settings: WindowSettings) -> int:
    """Raise UserError unless the sizes fit together; return the stride."""
    if not settings.windows:
        raise UserError("give at least one window size")
    stride = settings.stride if settings.stride is not None else min(settings.windows)
    for window in settings.windows:
        check_sizes(window, stride)
    if settings.attend_last is not None and not 1 <= settings.attend_last <= max(settings.windows):
        raise UserError(
            f"attend_last must be at least 1 token and at most the largest window, got "
            f"{settings.attend_last}"
        )
    if settings.positions is not None and not 1 <= settings.positions <= min(settings.windows):
        raise UserError(
            f"positions must be at least 1 and at most the smallest window, got "
            f"{settings.positions}"
        )
    if settings.key_short < 1 or (
        settings.key_model is not None and settings.key_short >= max(settings.windows)
    ):
        raise UserError(
            f"key_short must be at least 1 token and less than the largest window, got "
            f"{settings.key_short}"
        )
    check_at_least(settings, 1, "batch_tokens")
    check_at_least(settings, 0, "seed")
    return stride


def load_keys(
    settings: WindowSettings, subject: Subject, documents: "Sequence[TokenDocument]"
) -> "list[Tensor] | None":
    """The key tokens that ``settings.key_model`` finds; None without one.

    Args:
        settings: Windows and the evaluator.
        subject: The model whose tokenizer, precision and device the evaluator shares.
        documents: Token documents.

    Returns:
        One boolean tensor (length,) per document.

    Raises:
        UserError: If the evaluator cannot be loaded, has another tokenizer, or finds no key token.
    """
    from coca_attention.evaluation.perplexity.keys import key_tokens, load_evaluator

    if settings.key_model is None:
        return None
    stride, window = check_settings(settings), max(settings.windows)
    evaluator = load_evaluator(
        settings.key_model,
        subject.tokenizer,
        dtype=str(subject.model.dtype).removeprefix("torch."),
        device=str(subject.model.device),
    )
    keys = key_tokens(
        evaluator,
        documents,
        window=window,
        short=settings.key_short,
        stride=stride,
        first_target=window - stride + 1 if settings.targets == "shared" else 1,
        batch_tokens=settings.batch_tokens,
    )
    if not any(mask.any() for mask in keys):
        raise UserError(
            f"{settings.key_model} predicts no token of this text better from {window} tokens "
            f"than from {settings.key_short}: choose an evaluator that uses long context"
        )
    return keys


def evaluate_perplexity(
    subject: Subject,
    documents: "Sequence[TokenDocument]",
    settings: WindowSettings,
    session: Session,
    *,
    keys: "Sequence[Tensor] | None" = None,
) -> list[Cell]:
    """Perplexity at every window size.

    Args:
        subject: The model.
        documents: Token documents, each of at least `tokens_needed` tokens.
        settings: Windows, stride, targets.
        session: Rotary scaling, journal and progress; ``ntk`` computes the base from each
            window's size.
        keys: The key tokens of every document (`load_keys`), to be scored separately too.

    Returns:
        One cell per window, and one for ``attend_last``: plain JSON values, None for infinity.

    Raises:
        UserError: If the sizes do not fit, a document is too short, or the model does not support
            the scaling.
    """
    from coca_attention.evaluation.generation import rotary_scaling_for
    from coca_attention.evaluation.perplexity.keys import fingerprint, key_nats
    from coca_attention.evaluation.perplexity.score import (
        TokenScores,
        by_tokens_read,
        score_documents,
    )

    stride = check_settings(settings)
    if not documents:
        raise UserError("no documents to score")
    for document in documents:
        if len(document.tokens) < tokens_needed(settings):
            raise UserError(
                f"document {document.id!r} has {len(document.tokens)} tokens and the largest "
                f"window needs {tokens_needed(settings)}"
            )
    first = shared_first_target(settings.windows, stride) if settings.targets == "shared" else 1
    texts = [[d.id, hashlib.sha256(d.tokens.numpy().tobytes()).hexdigest()] for d in documents]
    text = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    total = sum(len(document.tokens) - first for document in documents)
    runs = [(window, stride, str(session.scaling)) for window in settings.windows]
    if settings.attend_last is not None:
        # With a stride of an eighth, every token has at least 7/8 of the window before it.
        last = settings.attend_last
        runs.append((last, min(max(1, last // 8), stride), "attend-last"))
    cells = []
    for window, run_stride, kind in runs:
        applied = "none" if kind == "attend-last" else kind
        factor = float(session.factor) if applied != "none" else None
        key = {
            "task": "perplexity",
            "model": subject.identity,
            "scaling": [kind, factor],
            "window": [window, run_stride, first],
            "targets": settings.targets,
            "text": text,
            "seed": settings.seed,
            "positions": settings.positions,
            "keys": None if keys is None else fingerprint(keys),
        }
        done = 0
        label = f"{subject.name} {kind} {window}"
        found = session.journal.get(key)
        if found is not None:
            cells.append({**found, **subject.facts})
            session.progress(label, total, total)
            continue

        def advance(tokens: int, label: str = label) -> None:
            nonlocal done
            done += tokens
            session.progress(label, done, total)

        started = time.perf_counter()
        per_token = None
        if settings.positions or keys is not None:
            per_token = [TokenScores(len(document.tokens)) for document in documents]
        with rotary_scaling_for(subject.model, applied, session.factor, window) as rope:
            scores = score_documents(
                subject.model,
                documents,
                window=window,
                stride=run_stride,
                first_target=first,
                batch_tokens=settings.batch_tokens,
                per_token=per_token,
                progress=advance,
            )
        interval = bootstrap_interval(scores, seed=settings.seed)
        cell = {
            "task": "perplexity",
            **subject.facts,
            "scaling": kind,
            "factor": factor,
            "rope_parameters": rope,
            "window": window,
            "stride": run_stride,
            "targets": settings.targets,
            "text": text,
            "perplexity": _number(perplexity(scores)),
            "ci95": list(interval) if interval else None,
            "nats": _number(sum(score.nats for score in scores)),
            "tokens": sum(score.tokens for score in scores),
            "seed": settings.seed,
            "seconds": round(time.perf_counter() - started, 3),
            "documents": [{**asdict(s), "nats": _number(s.nats)} for s in scores],
        }
        if per_token is not None and settings.positions is not None and kind != "attend-last":
            buckets = by_tokens_read(per_token, window, settings.positions)
            cell["by_position"] = [{**b, "nats": _number(b["nats"])} for b in buckets]
        if per_token is not None and keys is not None:
            nats, tokens = key_nats(per_token, keys)
            mean = nats / tokens if tokens else math.inf
            cell["key_tokens"] = tokens
            cell["key_perplexity"] = _number(math.exp(mean)) if mean < LARGEST_EXPONENT else None
        session.journal.put(key, cell)
        cells.append(cell)
    return cells


def _number(value: float) -> float | None:
    """None for infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def _check(settings: PerplexitySettings) -> None:
    check_settings(settings)
    check_text(settings, tokens_needed(settings))


def _cost(settings: PerplexitySettings) -> list[int]:
    """Tokens read for each cell; by default for 50 documents of twice the last window."""
    stride = check_settings(settings)
    per_token = [window // stride + 1 for window in settings.windows]
    if settings.attend_last is not None:
        per_token.append(8)
    tokens = (settings.max_documents or 50) * (settings.max_tokens or 2 * settings.windows[-1])
    return [cost * tokens for cost in per_token]


def _documents(subject: Subject, settings: PerplexitySettings) -> "list[TokenDocument]":
    return subject.cached(
        f"text {settings}",
        lambda: load_text(settings, subject.tokenizer, at_least=tokens_needed(settings)),
    )


def _prepare(subject: Subject, settings: PerplexitySettings) -> None:
    if settings.key_model is not None:
        from coca_attention.models.loading import model_without_weights

        model_without_weights(settings.key_model)
    _documents(subject, settings)


def _evaluate(subject: Subject, settings: PerplexitySettings, session: Session) -> list[Cell]:
    documents = _documents(subject, settings)
    keys = subject.cached(f"keys {settings}", lambda: load_keys(settings, subject, documents))
    return evaluate_perplexity(subject, documents, settings, session, keys=keys)


TASK = Task(
    "perplexity",
    "Perplexity of a Transformers causal language model under sliding windows.",
    PerplexitySettings,
    _evaluate,
    _check,
    _cost,
    _prepare,
)
