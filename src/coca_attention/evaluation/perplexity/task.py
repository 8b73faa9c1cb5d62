"""The perplexity task: a model, a text, and window sizes in; plain JSON values out."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.data import SourceSettings, encode_documents, held_out
from coca_attention.errors import UserError
from coca_attention.evaluation.generation import rotary_scaling_for
from coca_attention.evaluation.journal import Journal
from coca_attention.evaluation.perplexity.keys import (
    fingerprint,
    key_nats,
    key_tokens,
    load_evaluator,
)
from coca_attention.evaluation.perplexity.score import (
    TokenDocument,
    TokenScores,
    bootstrap_interval,
    by_tokens_read,
    perplexity,
    score_documents,
)
from coca_attention.evaluation.perplexity.windows import check_sizes, shared_first_target
from coca_attention.models import training_length

Scaling = Literal["none", "linear", "ntk", "dynamic"]


@dataclass
class TextSettings(SourceSettings):
    """Which text a model is judged on."""

    held_out: float = 0.0
    """Read only this held-out share of the documents, as a recipe of the same value left it."""
    max_documents: int | None = None
    """Judge at most this many documents."""
    max_tokens: int | None = None
    """Cut every document to this many tokens."""
    skip_short: bool = False
    """Leave out documents shorter than the largest window, in place of an error."""


@dataclass
class WindowSettings:
    """Which windows a model reads through."""

    windows: list[int] = field(default_factory=lambda: [512])
    """Window sizes in tokens read at once."""
    stride: int | None = None
    """Tokens judged in one pass; by default the smallest window."""
    targets: Literal["shared", "all"] = "shared"
    """shared: the same last tokens at every window; all: every token but the first, once."""
    attend_last: int | None = None
    """Also judge the model when it may read the last so many tokens only."""
    batch_tokens: int = 8192
    """Tokens read at once, at least one window."""
    positions: int | None = None
    """Also say what tokens cost by how many were read before them, in so many ranges."""
    key_model: str | None = None
    """Also judge key tokens: those that this model (folder or name, same tokenizer) predicts from
    the largest window and not from key_short tokens."""
    key_short: int = 64
    """The short context that key tokens cannot be predicted from."""
    seed: int = 0
    """Seed of the bootstrap."""


def load_text(
    settings: TextSettings, tokenizer: PreTrainedTokenizerBase, *, at_least: int
) -> list[TokenDocument]:
    """Tokenised documents of a source.

    Args:
        settings: Which documents.
        tokenizer: The model's tokenizer; no special tokens are added.
        at_least: Tokens that a document needs.

    Raises:
        UserError: If a document is shorter and short ones are not to be left out, or none is left.
    """
    for name in ("max_documents", "max_tokens"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if not 0 <= settings.held_out <= 1:
        raise UserError(f"held_out must lie between 0 and 1, got {settings.held_out}")
    if settings.max_tokens is not None and settings.max_tokens < at_least:
        raise UserError(
            f"max_tokens cuts documents to {settings.max_tokens} tokens and the largest window "
            f"needs {at_least}: cut less, or use smaller windows"
        )
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
                    f"{at_least}: use smaller windows, or leave short documents out "
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
    """Tokens that a document must have so that every window is filled."""
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
    if settings.batch_tokens < 1:
        raise UserError(f"batch_tokens must be at least 1, got {settings.batch_tokens}")
    return stride


def load_keys(
    settings: WindowSettings,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[TokenDocument],
    *,
    dtype: str = "float32",
    device: str | None = None,
) -> list[Tensor] | None:
    """The key tokens that the settings' evaluator finds; None where they name none.

    Args:
        settings: Windows and evaluator.
        tokenizer: That of the models to be judged.
        documents: Token documents.
        dtype: Precision of the evaluator.
        device: Where it runs.

    Raises:
        UserError: If the evaluator cannot be loaded, has another tokenizer, or finds none.
    """
    if settings.key_model is None:
        return None
    stride, window = check_settings(settings), max(settings.windows)
    keys = key_tokens(
        load_evaluator(settings.key_model, tokenizer, dtype=dtype, device=device),
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
            f"than from {settings.key_short}: it is no judge of long context"
        )
    return keys


def evaluate_perplexity(
    model: PreTrainedModel,
    documents: Sequence[TokenDocument],
    settings: WindowSettings,
    *,
    scaling: Scaling = "none",
    factor: float = 1.0,
    name: str = "model",
    identity: str = "",
    journal: Journal | None = None,
    keys: Sequence[Tensor] | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Perplexity at every window size.

    Args:
        model: A causal language model of Transformers.
        documents: Token documents, each of at least `tokens_needed` tokens.
        settings: Windows, stride, targets.
        scaling: Rotary scaling; ``ntk`` fixes the base from each window's size, ``none`` leaves
            the model as it was loaded.
        factor: The scaling's factor.
        name: What the results call the model.
        identity: What tells the model from others in the journal (`fingerprint`).
        journal: Where finished cells are kept, and found again.
        keys: The key tokens of every document (`load_keys`), to be judged apart as well.
        progress: Called with a label, the tokens judged so far and the tokens to judge.

    Returns:
        One cell per window, and one for ``attend_last``: plain JSON values, None for infinity.

    Raises:
        UserError: If sizes do not fit, a document is too short, or the model cannot be scaled so.
    """
    stride = check_settings(settings)
    if not documents:
        raise UserError("no documents to judge")
    for document in documents:
        if len(document.tokens) < tokens_needed(settings):
            raise UserError(
                f"document {document.id!r} has {len(document.tokens)} tokens and the largest "
                f"window needs {tokens_needed(settings)}"
            )
    journal = journal if journal is not None else Journal()
    trained = training_length(model.config.get_text_config())
    first = shared_first_target(settings.windows, stride) if settings.targets == "shared" else 1
    texts = [[d.id, hashlib.sha256(d.tokens.numpy().tobytes()).hexdigest()] for d in documents]
    runs: list[tuple[int, int, str]] = [(window, stride, scaling) for window in settings.windows]
    if settings.attend_last is not None:
        # Read anew every eighth of the window, so that each token has 7/8 to all of it before it.
        last = settings.attend_last
        runs.append((last, min(max(1, last // 8), stride), "attend-last"))
    cells = []
    for window, run_stride, kind in runs:
        total = sum(len(document.tokens) - first for document in documents)
        applied = "none" if kind == "attend-last" else kind
        about = {
            "task": "perplexity",
            "model": identity or name,
            "scaling": [kind, float(factor) if applied != "none" else None],
            "window": [window, run_stride, first],
            "targets": settings.targets,
            "text": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
            "seed": settings.seed,
            "positions": settings.positions,
            "keys": None if keys is None else fingerprint(keys),
        }
        done = 0
        label = f"{name} {kind} {window}"
        kept = journal.get(about)
        if kept is not None:
            cells.append({**kept, "model": name})
            if progress is not None:
                progress(label, total, total)
            continue

        def advance(tokens: int, label: str = label, total: int = total) -> None:
            nonlocal done
            done += tokens
            if progress is not None:
                progress(label, done, total)

        started = time.perf_counter()
        per_token = None
        if settings.positions or keys is not None:
            per_token = [TokenScores(len(document.tokens)) for document in documents]
        with rotary_scaling_for(model, applied, factor, window) as rope:
            scores = score_documents(
                model,
                documents,
                window=window,
                stride=run_stride,
                first_target=first,
                batch_tokens=settings.batch_tokens,
                per_token=per_token,
                progress=advance,
            )
        value = perplexity(scores)
        interval = bootstrap_interval(scores, seed=settings.seed)
        cell = {
            "task": "perplexity",
            "model": name,
            "training_length": trained,
            "scaling": kind,
            "factor": float(factor) if applied != "none" else None,
            "rope_parameters": rope,
            "window": window,
            "stride": run_stride,
            "targets": settings.targets,
            "perplexity": _number(value),
            "ci95": list(interval) if interval else None,
            "nats": _number(sum(score.nats for score in scores)),
            "tokens": sum(score.tokens for score in scores),
            "seed": settings.seed,
            "seconds": round(time.perf_counter() - started, 3),
            "documents": [{**asdict(s), "nats": _number(s.nats)} for s in scores],
        }
        if per_token is not None and settings.positions is not None and kind != "attend-last":
            found = by_tokens_read(per_token, window, settings.positions)
            cell["by_position"] = [{**b, "nats": _number(b["nats"])} for b in found]
        if per_token is not None and keys is not None:
            nats, tokens = key_nats(per_token, keys)
            mean = nats / tokens if tokens else math.inf
            cell["key_tokens"] = tokens
            cell["key_perplexity"] = _number(math.exp(mean)) if mean < 700 else None
        journal.put(about, cell)
        cells.append(cell)
    return cells


def _number(value: float) -> float | None:
    """None for infinity, which JSON cannot say."""
    return value if math.isfinite(value) else None
