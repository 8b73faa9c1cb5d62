"""Perplexity under sliding windows, as docs/evaluation.md describes it."""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.cells import ATTEND_LAST
from coca_lab.data import documents_of, encode_documents
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.evaluation.windows import (
    TokenDocument,
    Window,
    score_windows,
    shared_first_target,
    windows_of,
)
from coca_lab.fingerprints import fingerprint
from coca_lab.intervals import DocumentScore, perplexity, perplexity_interval
from coca_lab.loading import check_vocabulary
from coca_lab.settings.evaluations import PERPLEXITY, PerplexitySettings, WindowSettings
from coca_lab.settings.sources import TextSettings, check_text

log = logging.getLogger(__name__)

ITEM_TOKENS = 65_536
"""Tokens that an item reads at most, if one window has fewer: what a killed process can lose."""
Tally = dict[str, list[tuple[int, float | None, int]]]
"""Index, nats (None: infinite) and tokens of documents, ranges of positions, and repeats."""


def load_text(
    settings: TextSettings, tokenizer: PreTrainedTokenizerBase, *, at_least: int
) -> list[TokenDocument]:
    """Tokenised documents of a source, each of at least so many tokens, or a UserError."""
    check_text(settings, at_least)
    documents = documents_of(settings, settings.held_out, from_held_out=settings.held_out > 0)
    skip_short = settings.source == "stdlib" if settings.skip_short is None else settings.skip_short
    chosen: list[TokenDocument] = []
    short, longest = 0, 0
    for document, ids in encode_documents(documents, tokenizer, batch=8):
        if len(ids[: settings.max_tokens]) >= at_least:
            chosen.append(TokenDocument(document.id, torch.tensor(ids[: settings.max_tokens])))
            if len(chosen) == settings.max_documents:
                break
        elif skip_short:
            short += 1
            longest = max(longest, len(ids[: settings.max_tokens]))
        else:
            sizes = "windows" if isinstance(settings, WindowSettings) else "lengths"
            raise UserError(
                f"document {document.id!r} has {len(ids)} tokens and the largest of `{sizes}` "
                f"needs {at_least}: use smaller ones, or set `skip_short` to skip short documents"
            )
    if not chosen:
        raise UserError(
            f"{settings.source}: no document of at least {at_least:,} tokens"
            + (f", of {short:,} the longest has {longest:,}" if short else "")
            + ": give longer texts, or ask for shorter ones"
        )
    if settings.max_documents is None:
        log.info(
            "text: all %s documents of %s that have %s tokens (`max_documents` takes fewer)",
            f"{len(chosen):,}",
            settings.source,
            f"{at_least:,}",
        )
    return chosen


def distant_repeats(tokens: Tensor, n: int, beyond: int) -> Tensor:
    """Which tokens (length,) end an n-gram whose latest earlier one ends further back, bool."""
    ids = tokens.tolist()
    last = {}
    repeats = torch.zeros(len(ids), dtype=torch.bool)
    for index in range(n - 1, len(ids)):
        gram = tuple(ids[index - n + 1 : index + 1])
        repeats[index] = index - last.get(gram, index) > beyond
        last[gram] = index
    return repeats


@dataclass(frozen=True)
class WindowReading:
    """How the documents are read for one cell."""

    window: int
    stride: int
    first: int
    """Index of the first target of a document."""
    scaled: Cell
    """What the cell says about the method, or `ATTEND_LAST`."""
    method: MethodSettings
    edges: list[int] | None
    """Where the ranges of ``by_position`` end, inclusive, after 0; None without ranges."""
    repeats: list[Tensor] | None
    """For every document the targets that are scored separately too, (length,), bool."""
    settings: WindowSettings
    documents: Sequence[TokenDocument]
    text: str
    """Hash of the documents."""


def measure_perplexity(
    model: Model, settings: PerplexitySettings, method: MethodSettings
) -> list[Measurement]:
    """Perplexity of documents at every window size, and of ``attend_last``: a cell each."""
    documents = perplexity_texts(model, settings)
    largest = max(int(document.tokens.max()) for document in documents)
    check_vocabulary(model.module, model.tokenizer, largest)
    if settings.targets == "one-pass":
        # The last input of the only window predicts the token after it.
        documents = [replace(d, tokens=d.tokens[: settings.tokens_needed]) for d in documents]
    return [_measure_cell(model, each) for each in _readings(documents, settings, method)]


def perplexity_texts(model: Model, settings: PerplexitySettings) -> list[TokenDocument]:
    """The documents to score; read once for a model, whatever the method."""
    name = str(settings)
    if name not in model.texts:
        needed = settings.tokens_needed
        model.texts[name] = load_text(settings, model.tokenizer, at_least=needed)
    return model.texts[name]


def _readings(
    documents: Sequence[TokenDocument], settings: WindowSettings, method: MethodSettings
) -> list[WindowReading]:
    """How the documents are read for every cell."""
    windows = settings.windows
    stride = settings.step
    positions = settings.positions
    first = shared_first_target(windows, stride) if settings.targets == "shared" else 1
    repeats = None
    if settings.repeats is not None:
        repeats = [distant_repeats(d.tokens, settings.repeats, settings.near) for d in documents]
    texts = [[d.id, hashlib.sha256(d.tokens.numpy().tobytes()).hexdigest()] for d in documents]
    # What those of one method have in common.
    plain = WindowReading(
        window=max(windows),
        stride=max(windows),
        first=first,
        scaled=method.facts,
        method=method,
        edges=[0, *sorted(set(windows))],
        repeats=repeats,
        settings=settings,
        documents=documents,
        text=fingerprint(texts),
    )
    readings = [plain] if settings.targets == "one-pass" else []
    for window in windows if settings.targets != "one-pass" else ():
        edges = None
        if positions is not None:
            edges = [round(window * i / positions) for i in range(positions + 1)]
        readings.append(replace(plain, window=window, stride=stride, edges=edges))
    last = settings.attend_last
    if last is not None:
        # With a stride of an eighth, every token has at least 7/8 of the window before it.
        step = min(max(1, last // 8), stride)
        alone = replace(plain, window=last, stride=step, edges=None)
        scaled = {"scaling": ATTEND_LAST, "factor": None}
        readings.append(replace(alone, scaled=scaled, method=MethodSettings()))
    return readings


def _measure_cell(model: Model, reading: WindowReading) -> Measurement:
    """The items of one cell, each of some windows, and the cell."""
    settings = reading.settings
    key = {
        "scaled": reading.scaled,
        "window": [reading.window, reading.stride, reading.first],
        "text": reading.text,
        "edges": reading.edges,
        "repeats": None if reading.repeats is None else [settings.repeats, settings.near],
    }

    def work(ranges: list[tuple[int, int]]) -> list[Tally]:
        module = model.loaded()
        with reading.method.applied(module, reading.window):
            return [_tallies(module, reading, windows[start:stop]) for start, stop in ranges]

    def cells(tallies: list[Tally]) -> list[Cell]:
        cell = {
            **reading.scaled,
            "rope_parameters": reading.method.parameters(model.module, reading.window),
            "window": reading.window,
            "stride": reading.stride,
            "targets": settings.targets,
            "text": reading.text,
        }
        return [cell | _figures(reading, tallies)]

    lengths = [len(document.tokens) for document in reading.documents]
    windows = windows_of(lengths, reading.window, reading.stride, reading.first)
    costs = [window.inputs for _, window in windows]
    about = " ".join((model.name, *reading.method.words, f"perplexity {reading.window:,}"))
    items = []
    for start, stop in cut(costs):
        label = f"{about}, windows {start + 1:,} to {stop:,} of {len(windows):,}"
        cost = sum(costs[start:stop])
        items.append(Item([[key, start, stop]], work, [(start, stop)], cost, label))
    return Measurement(items, cells)


def _tallies(
    module: PreTrainedModel, reading: WindowReading, windows: Sequence[tuple[int, Window]]
) -> Tally:
    """What some windows add to the figures of a cell."""
    documents = reading.documents
    batch_tokens = reading.settings.batch_tokens
    sums = {"documents": torch.zeros(len(documents), 2, dtype=torch.float64)}
    edges = torch.tensor(reading.edges or [])
    if reading.edges is not None:
        sums["ranges"] = torch.zeros(len(edges) - 1, 2, dtype=torch.float64)
    if reading.repeats is not None:
        sums["repeats"] = torch.zeros_like(sums["documents"])
    for index, window, nats in score_windows(module, documents, windows, batch_tokens):
        targets = torch.arange(window.first_target, window.stop + 1)
        scores = torch.stack((nats.double(), torch.ones(len(nats))), dim=1)
        sums["documents"][index] += scores.sum(0)
        if reading.edges is not None:
            ranges = torch.bucketize(targets - window.start, edges) - 1
            sums["ranges"].index_add_(0, ranges, scores)
        if reading.repeats is not None:
            sums["repeats"][index] += scores[reading.repeats[index][targets]].sum(0)
    return {
        name: [(i, _number(nats), int(n)) for i, (nats, n) in enumerate(rows.tolist()) if n]
        for name, rows in sums.items()
    }


def _figures(reading: WindowReading, tallies: Sequence[Tally]) -> Cell:
    """What a cell says about the tallies of all its windows."""
    documents = reading.documents
    counts = _added(tallies, "documents", len(documents))
    scores = [
        DocumentScore(document.id, nats, tokens)
        for document, (nats, tokens) in zip(documents, counts, strict=True)
    ]
    figures: Cell = {
        "perplexity": _number(perplexity(scores)),
        "ci95": perplexity_interval(scores),
        "nats": _number(sum(score.nats for score in scores)),
        "tokens": sum(score.tokens for score in scores),
        "documents": [{**asdict(s), "nats": _number(s.nats)} for s in scores],
    }
    if reading.edges is not None:
        ranges = [*pairwise(reading.edges)]
        counts = _added(tallies, "ranges", len(ranges))
        figures["by_position"] = [
            {"first": low + 1, "last": high, "nats": _number(nats), "tokens": tokens}
            for (low, high), (nats, tokens) in zip(ranges, counts, strict=True)
        ]
    if reading.repeats is not None:
        counts = _added(tallies, "repeats", len(documents))
        figures["repeats"] = {
            "n": reading.settings.repeats,
            "beyond": reading.settings.near,
            "documents": [{"nats": _number(nats), "tokens": tokens} for nats, tokens in counts],
        }
    return figures


def _added(tallies: Sequence[Tally], name: str, size: int) -> list[tuple[float, int]]:
    """Nats and tokens of every index; None is infinity."""
    nats = [0.0] * size
    tokens = [0] * size
    for each in tallies:
        for index, more, count in each[name]:
            nats[index] += math.inf if more is None else more
            tokens[index] += count
    return [*zip(nats, tokens, strict=True)]


def cut(costs: Sequence[int], most: int = ITEM_TOKENS) -> list[tuple[int, int]]:
    """Starts and ends of ranges that cost at most ``most`` together, or of one entry."""
    ranges = []
    start = 0
    tokens = 0
    for index, cost in enumerate(costs):
        if index > start and tokens + cost > most:
            ranges.append((start, index))
            start = index
            tokens = 0
        tokens += cost
    return [*ranges, (start, len(costs))]


def _number(value: float) -> float | None:
    """None for infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None


PERPLEXITY_TASK = Task(**vars(PERPLEXITY), measure=measure_perplexity)
