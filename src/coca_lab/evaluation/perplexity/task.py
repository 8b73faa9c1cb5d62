"""The perplexity task: text, windows and evaluation."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from coca_attention.errors import UserError
from coca_lab.data import SourceSettings, held_out
from coca_lab.evaluation.journal import fingerprint as model_fingerprint
from coca_lab.evaluation.perplexity.windows import check_sizes, shared_first_target
from coca_lab.evaluation.pieces import Piece, cut
from coca_lab.evaluation.task import Cell, Part, Session, Subject, Task, check_at_least
from coca_lab.intervals import (
    LARGEST_EXPONENT,
    DocumentScore,
    perplexity,
    perplexity_interval,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from coca_lab.evaluation.perplexity.score import TokenDocument


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
    targets: Literal["shared", "all", "one-pass"] = "shared"
    """shared: the same last tokens at every window; all: every token except the first, once;
    one-pass: the first tokens of every document, read once, by the number of tokens before them in
    ranges that end at the windows."""
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
    repeats: int | None = None
    """Also score separately the targets that end an n-gram of this length that stands earlier in
    the document, but only farther back than attend_last, or else than the smallest window."""


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

    from coca_lab.data import encode_documents
    from coca_lab.evaluation.perplexity.score import TokenDocument

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
    if settings.targets == "one-pass" and not settings.stride == settings.positions is None:
        raise UserError(
            "one pass over a document has neither stride nor positions: its ranges end at the "
            "windows; leave both out"
        )
    if settings.key_short < 1 or (
        settings.key_model is not None and settings.key_short >= max(settings.windows)
    ):
        raise UserError(
            f"key_short must be at least 1 token and less than the largest window, got "
            f"{settings.key_short}"
        )
    check_at_least(settings, 1, "batch_tokens", "repeats")
    return stride


def load_keys(
    settings: WindowSettings,
    subject: Subject,
    documents: "Sequence[TokenDocument]",
    session: Session,
) -> "list[Tensor] | None":
    """The key tokens that ``settings.key_model`` finds; None without one.

    Args:
        settings: Windows and the evaluator.
        subject: The model whose tokenizer, precision and device the evaluator shares.
        documents: Token documents.
        session: Its journal keeps them, for all models and processes.

    Returns:
        One boolean tensor (length,) per document.

    Raises:
        UserError: If the evaluator cannot be loaded, has another tokenizer, or finds no key token.
    """
    import torch

    if settings.key_model is None:
        return None
    stride, window = check_settings(settings), max(settings.windows)
    first = window - stride + 1 if settings.targets == "shared" else 1
    dtype = str(subject.model.dtype).removeprefix("torch.")
    there = subject.model.device
    device = subject.device if there.type == "meta" else str(there)
    key = {
        "key_model": f"{model_fingerprint(settings.key_model)} {dtype}",
        "window": [window, stride, first, settings.key_short],
        "text": text_hash(documents),
    }

    def compute(missing: list[int], advance: Callable[[int], Any]) -> list[Any]:
        from coca_lab.evaluation.perplexity.keys import key_tokens, load_evaluator

        found = key_tokens(
            load_evaluator(str(settings.key_model), subject.tokenizer, dtype=dtype, device=device),
            documents,
            window=window,
            short=settings.key_short,
            stride=stride,
            first_target=first,
            batch_tokens=settings.batch_tokens,
        )
        return [[mask.nonzero().flatten().tolist() for mask in found]]

    cost = sum(len(document.tokens) for document in documents)
    piece = Piece(f"key tokens of {settings.key_model}", [key], cost, window, compute)
    (found,) = session.complete([piece])
    if not any(found):
        raise UserError(
            f"{settings.key_model} predicts no token of this text better from {window} tokens "
            f"than from {settings.key_short}: choose an evaluator that uses long context"
        )
    masks = [torch.zeros(len(document.tokens), dtype=torch.bool) for document in documents]
    for mask, indices in zip(masks, found, strict=True):
        mask[indices] = True
    return masks


def text_hash(documents: "Sequence[TokenDocument]") -> str:
    """Identifies token documents."""
    texts = [[d.id, hashlib.sha256(d.tokens.numpy().tobytes()).hexdigest()] for d in documents]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


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
    return session.finish(perplexity_parts(subject, documents, settings, session, keys=keys))


def perplexity_parts(
    subject: Subject,
    documents: "Sequence[TokenDocument]",
    settings: WindowSettings,
    session: Session,
    *,
    keys: "Sequence[Tensor] | None" = None,
) -> list[Part]:
    """The work of `evaluate_perplexity`, which describes the arguments: a part for each cell."""
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
    runs = [(window, stride, str(session.scaling)) for window in settings.windows]
    if settings.targets == "one-pass":
        # The last input of the only window predicts the token after it.
        longest = max(settings.windows)
        documents = [replace(d, tokens=d.tokens[: longest + 1]) for d in documents]
        keys = None if keys is None else [mask[: longest + 1] for mask in keys]
        runs = [(longest, longest, str(session.scaling))]
    if settings.attend_last is not None:
        # With a stride of an eighth, every token has at least 7/8 of the window before it.
        last = settings.attend_last
        runs.append((last, min(max(1, last // 8), stride), "attend-last"))
    text = text_hash(documents)
    repeats = _find_repeats(documents, settings)
    return [
        _part(subject, documents, settings, session, keys, repeats, text, first, run)
        for run in runs
    ]


def _find_repeats(
    documents: "Sequence[TokenDocument]", settings: WindowSettings
) -> "list[Tensor] | None":
    """The targets that ``settings.repeats`` asks for, (length,) of every document."""
    from coca_lab.evaluation.perplexity.repeats import distant_repeats

    if settings.repeats is None:
        return None
    return [distant_repeats(d.tokens, settings.repeats, _near(settings)) for d in documents]


def _near(settings: WindowSettings) -> int:
    """Tokens of the short context that longer windows are compared with."""
    return settings.attend_last or min(settings.windows)


def _part(
    subject: Subject,
    documents: "Sequence[TokenDocument]",
    settings: WindowSettings,
    session: Session,
    keys: "Sequence[Tensor] | None",
    repeats: "Sequence[Tensor] | None",
    text: str,
    first: int,
    run: tuple[int, int, str],
) -> Part:
    """The work of one cell, the windows of some documents a piece."""
    from coca_lab.evaluation.perplexity.keys import fingerprint, key_nats
    from coca_lab.evaluation.perplexity.score import (
        TokenScores,
        by_tokens_read,
        equal_ranges,
        score_documents,
        windows_of,
    )
    from coca_lab.generation import rotary_scaling_for

    window, stride, kind = run
    applied = "none" if kind == "attend-last" else kind
    edges = None
    if kind != "attend-last":
        if settings.targets == "one-pass":
            edges = [0, *sorted(set(settings.windows))]
        elif settings.positions is not None:
            edges = equal_ranges(window, settings.positions)
    key = {
        "task": "perplexity",
        "model": subject.identity,
        "scaling": [kind, float(session.factor) if applied != "none" else None],
        "window": [window, stride, first],
        "targets": settings.targets,
        "text": text,
        "positions": settings.windows if settings.targets == "one-pass" else settings.positions,
        "keys": None if keys is None else fingerprint(keys),
        "repeats": None if repeats is None else [settings.repeats, _near(settings)],
    }
    windows = windows_of([len(d.tokens) for d in documents], window, stride, first)

    def piece(part: slice) -> Piece:
        def compute(missing: list[int], advance: Callable[[int], Any]) -> list[Any]:
            per_token = None
            if edges is not None or keys is not None or repeats is not None:
                per_token = [TokenScores(len(document.tokens)) for document in documents]
            with rotary_scaling_for(subject.model, applied, session.factor, window):
                scores = score_documents(
                    subject.model,
                    documents,
                    window=window,
                    stride=stride,
                    first_target=first,
                    batch_tokens=settings.batch_tokens,
                    per_token=per_token,
                    progress=advance,
                    part=part,
                )
            sums = {
                "documents": [
                    [index, _number(score.nats), score.tokens]
                    for index, score in enumerate(scores)
                    if score.tokens
                ]
            }
            if per_token is not None and edges is not None:
                ranges = by_tokens_read(per_token, edges)
                sums["ranges"] = [[_number(r["nats"]), r["tokens"]] for r in ranges]
            if per_token is not None and keys is not None:
                nats, tokens = key_nats(per_token, keys)
                sums["keys"] = [[_number(nats), tokens]]
            if per_token is not None and repeats is not None:
                pairs = zip(per_token, repeats, strict=True)
                chosen = [key_nats([scored], [mask]) for scored, mask in pairs]
                sums["repeats"] = [
                    [index, _number(nats), tokens]
                    for index, (nats, tokens) in enumerate(chosen)
                    if tokens
                ]
            return [sums]

        cost = sum(each.inputs for _, each in windows[part])
        label = f"{subject.name} {kind} {window}"
        return Piece(label, [[key, part.start, part.stop]], cost, window, compute)

    pieces = [piece(part) for part in cut([each.inputs for _, each in windows])]

    def cells() -> list[Cell]:
        found = [session.journal.get(each.keys[0]) for each in pieces]
        scores = _by_document(documents, [row for sums in found for row in sums["documents"]])
        with rotary_scaling_for(subject.model, applied, session.factor, window) as rope:
            pass
        interval = perplexity_interval(scores)
        cell = {
            "task": "perplexity",
            **subject.facts,
            "scaling": kind,
            "factor": key["scaling"][1],
            "rope_parameters": rope,
            "window": window,
            "stride": stride,
            "targets": settings.targets,
            "text": text,
            "perplexity": _number(perplexity(scores)),
            "ci95": list(interval) if interval else None,
            "nats": _number(sum(score.nats for score in scores)),
            "tokens": sum(score.tokens for score in scores),
            "seconds": session.seconds(pieces),
            "documents": [{**asdict(s), "nats": _number(s.nats)} for s in scores],
        }
        if edges is not None:
            ranges = [_sum(rows) for rows in zip(*(sums["ranges"] for sums in found), strict=True)]
            cell["by_position"] = [
                {"first": low + 1, "last": high, "nats": _number(nats), "tokens": tokens}
                for (low, high), (nats, tokens) in zip(pairwise(edges), ranges, strict=True)
            ]
        if repeats is not None:
            cell["repeats"] = {
                "n": settings.repeats,
                "beyond": _near(settings),
                "documents": [
                    {"nats": _number(score.nats), "tokens": score.tokens}
                    for score in _by_document(
                        documents, [row for sums in found for row in sums["repeats"]]
                    )
                ],
            }
        if keys is not None:
            nats, tokens = _sum(sums["keys"][0] for sums in found)
            mean = nats / tokens if tokens else math.inf
            cell["key_tokens"], cell["keys"] = tokens, key["keys"]
            cell["key_perplexity"] = _number(math.exp(mean)) if mean < LARGEST_EXPONENT else None
        return [cell]

    return Part(pieces, cells)


def _by_document(
    documents: "Sequence[TokenDocument]", rows: Sequence[Sequence[Any]]
) -> list[DocumentScore]:
    """The score of every document from rows of its index, nats and tokens."""
    return [
        DocumentScore(document.id, *_sum(row[1:] for row in rows if row[0] == index))
        for index, document in enumerate(documents)
    ]


def _sum(rows: Iterable[Sequence[Any]]) -> tuple[float, int]:
    """Nats and tokens of parts together; None is infinity."""
    nats, tokens = 0.0, 0
    for more_nats, more_tokens in rows:
        nats += math.inf if more_nats is None else more_nats
        tokens += more_tokens
    return nats, tokens


def _number(value: float) -> float | None:
    """None for infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def _check(settings: PerplexitySettings) -> None:
    check_settings(settings)
    check_text(settings, tokens_needed(settings))


def _documents(subject: Subject, settings: PerplexitySettings) -> "list[TokenDocument]":
    return subject.cached(
        f"text {settings}",
        lambda: load_text(settings, subject.tokenizer, at_least=tokens_needed(settings)),
    )


def _prepare(subject: Subject, settings: PerplexitySettings) -> None:
    if settings.key_model is not None:
        from coca_lab.loading import model_without_weights

        model_without_weights(settings.key_model)
    _documents(subject, settings)


def _parts(subject: Subject, settings: PerplexitySettings, session: Session) -> list[Part]:
    documents = _documents(subject, settings)
    keys = subject.cached(
        f"keys {settings}", lambda: load_keys(settings, subject, documents, session)
    )
    return perplexity_parts(subject, documents, settings, session, keys=keys)


TASK = Task(
    "perplexity",
    "Perplexity of a Transformers causal language model under sliding windows.",
    PerplexitySettings,
    lambda subject, settings, session: session.finish(_parts(subject, settings, session)),
    _check,
    prepare=_prepare,
    parts=_parts,
)
