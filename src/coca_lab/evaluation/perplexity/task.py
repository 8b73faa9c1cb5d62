"""The perplexity task: text, windows, repeats and evaluation."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data import SourceSettings, encode_documents, held_out
from coca_lab.engine import Item
from coca_lab.evaluation.perplexity.score import (
    TokenDocument,
    TokenScores,
    by_tokens_read,
    check_sizes,
    equal_ranges,
    score_documents,
    shared_first_target,
    windows_of,
)
from coca_lab.evaluation.task import Cell, Part, Session, Subject, Task, check_at_least
from coca_lab.generation import rotary_scaling_for
from coca_lab.intervals import (
    DocumentScore,
    perplexity,
    perplexity_interval,
)

ITEM_TOKENS = 65_536
"""Tokens that an item reads at most, if one window has fewer: what a killed process can lose."""


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
    repeats: int | None = None
    """Also score separately the targets that end an n-gram of this length that stands earlier in
    the document, but only farther back than attend_last, or else than the smallest window."""

    @property
    def near(self) -> int:
        """Tokens of the short context that longer windows are compared with."""
        return self.attend_last or min(self.windows)


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
    settings: TextSettings, tokenizer: PreTrainedTokenizerBase, *, at_least: int
) -> list[TokenDocument]:
    """Tokenised documents of a source.

    Args:
        settings: Which documents.
        tokenizer: The model's tokenizer; no special tokens are added.
        at_least: Minimum number of tokens in a document.

    Raises:
        UserError: If a document is shorter and ``skip_short`` is off, or no document is left.
    """
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
        if len(ids) >= at_least:
            chosen.append(TokenDocument(document.id, torch.tensor(ids)))
            continue
        short += 1
        if not settings.skip_short:
            raise UserError(
                f"document {document.id!r} has {len(ids)} tokens and the largest window needs "
                f"{at_least}: use smaller windows, or skip short documents (--skip-short)"
            )
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
    longest = max(settings.windows)
    stride = settings.stride if settings.stride is not None else min(settings.windows)
    for window in settings.windows:
        check_sizes(window, stride)
    if settings.attend_last is not None and not 1 <= settings.attend_last <= longest:
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
    check_at_least(settings, 1, "batch_tokens", "repeats")
    return stride


def distant_repeats(tokens: Tensor, n: int, beyond: int) -> Tensor:
    """Which tokens end an n-gram that stands earlier in the document, but only far back.

    Args:
        tokens: (length,), int64.
        n: Length of the n-gram, the token itself included.
        beyond: The latest earlier n-gram ends more than this many tokens before the token.

    Returns:
        (length,), bool.
    """
    ids, last = tokens.tolist(), {}
    found = torch.zeros(len(ids), dtype=torch.bool)
    for index in range(n - 1, len(ids)):
        gram = tuple(ids[index - n + 1 : index + 1])
        found[index] = index - last.get(gram, index) > beyond
        last[gram] = index
    return found


def chosen_nats(score: TokenScores, chosen: Tensor) -> tuple[float, int]:
    """Nats and number of the scored tokens of a document among some chosen ones."""
    chosen = chosen & (score.read > 0)
    return score.nats[chosen].double().sum().item(), int(chosen.sum())


def text_hash(documents: Sequence[TokenDocument]) -> str:
    """Identifies token documents."""
    texts = [[d.id, hashlib.sha256(d.tokens.numpy().tobytes()).hexdigest()] for d in documents]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def evaluate_perplexity(
    subject: Subject,
    documents: Sequence[TokenDocument],
    settings: WindowSettings,
    session: Session,
) -> list[Cell]:
    """Perplexity at every window size.

    Args:
        subject: The model.
        documents: Token documents, each of at least `tokens_needed` tokens.
        settings: Windows, stride, targets.
        session: Rotary scaling and engine; ``ntk`` computes the base from each window's size.

    Returns:
        One cell per window, and one for ``attend_last``: plain JSON values, None for infinity.

    Raises:
        UserError: If the sizes do not fit, a document is too short, or the model does not support
            the scaling.
    """
    return session.finish(perplexity_parts(subject, documents, settings, session))


def perplexity_parts(
    subject: Subject,
    documents: Sequence[TokenDocument],
    settings: WindowSettings,
    session: Session,
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
    scaling = str(session.scaling)
    runs = [(window, stride, scaling) for window in settings.windows]
    if settings.targets == "one-pass":
        # The last input of the only window predicts the token after it.
        longest = max(settings.windows)
        documents = [replace(d, tokens=d.tokens[: longest + 1]) for d in documents]
        runs = [(longest, longest, scaling)]
    if settings.attend_last is not None:
        # With a stride of an eighth, every token has at least 7/8 of the window before it.
        last = settings.attend_last
        runs.append((last, min(max(1, last // 8), stride), "attend-last"))
    repeats = None
    if settings.repeats is not None:
        repeats = [distant_repeats(d.tokens, settings.repeats, settings.near) for d in documents]
    text = text_hash(documents)
    return [
        _Windows(subject, documents, settings, repeats, first, *run, session.factor).part(text)
        for run in runs
    ]


@dataclass
class _Windows:
    """The windows of one cell; called with ranges of them, it returns sums over each.

    Attributes:
        kind: Rotary scaling, or ``attend-last`` for the model as it is.
    """

    subject: Subject
    documents: Sequence[TokenDocument]
    settings: WindowSettings
    repeats: Sequence[Tensor] | None
    first: int
    window: int
    stride: int
    kind: str
    factor: float

    @property
    def scaled(self) -> tuple[str, float, int]:
        """Arguments of `rotary_scaling_for`."""
        return "none" if self.kind == "attend-last" else self.kind, self.factor, self.window

    @property
    def edges(self) -> list[int] | None:
        """Where the ranges of ``by_position`` end."""
        if self.kind == "attend-last":
            return None
        if self.settings.targets == "one-pass":
            return [0, *sorted(set(self.settings.windows))]
        positions = self.settings.positions
        return None if positions is None else equal_ranges(self.window, positions)

    def part(self, text: str) -> Part:
        """The items, each of some windows, and the cell."""
        settings, scaling = self.settings, self.scaled[0]
        one_pass = settings.targets == "one-pass"
        key = {
            "task": "perplexity",
            "model": self.subject.identity,
            "scaling": [self.kind, float(self.factor) if scaling != "none" else None],
            "window": [self.window, self.stride, self.first],
            "targets": settings.targets,
            "text": text,
            "positions": settings.windows if one_pass else settings.positions,
            "repeats": None if self.repeats is None else [settings.repeats, settings.near],
        }
        lengths = [len(document.tokens) for document in self.documents]
        windows = windows_of(lengths, self.window, self.stride, self.first)
        costs = [each.inputs for _, each in windows]
        name = self.subject.name
        items = [
            Item(
                [[key, start, stop]],
                self,
                [(start, stop)],
                sum(costs[start:stop]),
                f"{name} {self.kind} {self.window}",
                name,
            )
            for start, stop in cut(costs)
        ]
        return Part(items, lambda sums, seconds: [self._cell(key, sums, seconds)])

    def __call__(self, ranges: list[tuple[int, int]]) -> list[dict[str, Any]]:
        return [self._score(slice(*each)) for each in ranges]

    def _score(self, part: slice) -> dict[str, Any]:
        edges, model = self.edges, self.subject.loaded()
        per_token = None
        if edges is not None or self.repeats is not None:
            per_token = [TokenScores(len(document.tokens)) for document in self.documents]
        with rotary_scaling_for(model, *self.scaled):
            scores = score_documents(
                model,
                self.documents,
                window=self.window,
                stride=self.stride,
                first_target=self.first,
                batch_tokens=self.settings.batch_tokens,
                per_token=per_token,
                part=part,
            )
        rows = [(score.nats, score.tokens) for score in scores]
        sums = {"documents": _by_index(rows)}
        if per_token is not None and edges is not None:
            ranges = by_tokens_read(per_token, edges)
            sums["ranges"] = [[_number(r["nats"]), r["tokens"]] for r in ranges]
        if per_token is not None and self.repeats is not None:
            pairs = zip(per_token, self.repeats, strict=True)
            sums["repeats"] = _by_index([chosen_nats(scored, mask) for scored, mask in pairs])
        return sums

    def _cell(self, key: dict[str, Any], found: list[dict[str, Any]], seconds: float) -> Cell:
        scores, edges = self._by_document(found, "documents"), self.edges
        with rotary_scaling_for(self.subject.model, *self.scaled) as rope:
            pass
        interval = perplexity_interval(scores)
        cell: Cell = {
            "task": "perplexity",
            **self.subject.facts,
            "scaling": self.kind,
            "factor": key["scaling"][1],
            "rope_parameters": rope,
            "window": self.window,
            "stride": self.stride,
            "targets": self.settings.targets,
            "text": key["text"],
            "perplexity": _number(perplexity(scores)),
            "ci95": list(interval) if interval else None,
            "nats": _number(sum(score.nats for score in scores)),
            "tokens": sum(score.tokens for score in scores),
            "seconds": seconds,
            "documents": [{**asdict(s), "nats": _number(s.nats)} for s in scores],
        }
        if edges is not None:
            ranges = [_sum(rows) for rows in zip(*(sums["ranges"] for sums in found), strict=True)]
            cell["by_position"] = [
                {"first": low + 1, "last": high, "nats": _number(nats), "tokens": tokens}
                for (low, high), (nats, tokens) in zip(pairwise(edges), ranges, strict=True)
            ]
        if self.repeats is not None:
            repeats = self._by_document(found, "repeats")
            cell["repeats"] = {
                "n": self.settings.repeats,
                "beyond": self.settings.near,
                "documents": [{"nats": _number(s.nats), "tokens": s.tokens} for s in repeats],
            }
        return cell

    def _by_document(self, found: list[dict[str, Any]], name: str) -> list[DocumentScore]:
        """The score of every document from rows of its index, nats and tokens."""
        rows = [row for sums in found for row in sums[name]]
        return [
            DocumentScore(document.id, *_sum(row[1:] for row in rows if row[0] == index))
            for index, document in enumerate(self.documents)
        ]


def cut(costs: Sequence[int], most: int | None = None) -> list[tuple[int, int]]:
    """Starts and ends of ranges of at most ``most`` tokens together, or of one entry.

    Args:
        costs: Tokens of every entry.
        most: Tokens of a range; by default `ITEM_TOKENS`.
    """
    ranges, start, tokens = [], 0, 0
    for index, cost in enumerate(costs):
        if index > start and tokens + cost > (most or ITEM_TOKENS):
            ranges.append((start, index))
            start, tokens = index, 0
        tokens += cost
    return [*ranges, (start, len(costs))]


def _by_index(rows: Sequence[tuple[float, int]]) -> list[list[Any]]:
    """Rows of index, nats and tokens; those without tokens are left out."""
    return [[index, _number(nats), tokens] for index, (nats, tokens) in enumerate(rows) if tokens]


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


def _parts(subject: Subject, settings: PerplexitySettings, session: Session) -> list[Part]:
    documents = subject.cached(
        f"text {settings}",
        lambda: load_text(settings, subject.tokenizer, at_least=tokens_needed(settings)),
    )
    return perplexity_parts(subject, documents, settings, session)


TASK = Task(
    "perplexity",
    "Perplexity of a Transformers causal language model under sliding windows.",
    PerplexitySettings,
    check=_check,
    parts=_parts,
)
