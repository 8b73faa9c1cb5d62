"""How probable a model finds numbers that are hidden in its text: nats a digit, without generation.

Whether a number is found takes a whole prompt and gives one bit. Its log probability is continuous,
and one reading of a text has those of all numbers hidden in it, so few documents tell methods
apart. docs/evaluation.md describes the task.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from coca_attention.errors import UserError
from coca_lab.data.needle_texts import DIGITS, NeedleText, hide_needles
from coca_lab.engine import Item
from coca_lab.evaluation.endpoint import TokenReading
from coca_lab.evaluation.perplexity import load_text
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.evaluation.windows import last_logits
from coca_lab.intervals import DocumentScore, mean_nats, nats_interval
from coca_lab.settings.evaluations import NEEDLES, NeedleSettings


def measure_needles(
    model: Model, settings: NeedleSettings, method: MethodSettings
) -> list[Measurement]:
    """Nats a digit of hidden numbers: a cell for every length, an item for every document.

    Lengths above ``attend_last`` have one more cell, of readings of the last tokens alone.
    """
    measurements = []
    for length, texts in needle_texts(model, settings).items():
        about = _hash([*texts.values()])
        measurements.append(
            _measure_cell(model, settings, method, method.facts, length, texts, about)
        )
        last = settings.attend_last
        if last is not None and last < length:
            ends = {name: text.last(last) for name, text in texts.items()}
            alone = {"scaling": last_alone(last), "factor": None}
            measurements.append(
                _measure_cell(model, settings, MethodSettings(), alone, length, ends, about)
            )
    return measurements


def last_alone(tokens: int) -> str:
    """What cells of readings of the last tokens alone have as the name of a method."""
    return f"last {tokens:,} tokens alone"


def needle_texts(model: Model, settings: NeedleSettings) -> dict[int, dict[str, NeedleText]]:
    """By length, the text of every document by its id; made once for a model."""
    name = f"needles {settings}"
    if name in model.texts:
        return model.texts[name]
    documents = load_text(settings, model.tokenizer, at_least=max(settings.lengths))
    if len({document.id for document in documents}) < len(documents):
        raise UserError(f"{settings.source}: two documents have the same id: give each its own")
    model.texts[name] = {
        length: {
            document.id: hide_needles(
                model.tokenizer,
                document.tokens[:length].tolist(),
                length,
                settings.count,
                seed=[settings.seed, length, index],
            )
            for index, document in enumerate(documents)
        }
        for length in settings.lengths
    }
    return model.texts[name]


def _measure_cell(
    model: Model,
    settings: NeedleSettings,
    method: MethodSettings,
    scaled: Cell,
    length: int,
    texts: dict[str, NeedleText],
    about: str,
) -> Measurement:
    """The readings of one length, and their cell.

    ``scaled`` is what the cell says of the method, and ``about`` of the texts: a reading of their
    ends is compared with one of all of them.
    """
    near = settings.near or model.facts["training_length"]

    def read(named: list[str]) -> list[list[Cell]]:
        if model.endpoint is not None:
            said = model.endpoint.log_probabilities([texts[name].ids for name in named])
            return [
                _needles_of(texts[name], answers[texts[name].first_answer - 1 :])
                for name, answers in zip(named, said, strict=True)
            ]
        return [_needles_of(texts[name], _read(model, method, name, texts[name])) for name in named]

    size = model.endpoint.requests if model.endpoint else 1  # so many are answered at once
    names = list(texts)
    items = []
    for start in range(0, len(names), size):
        named = names[start : start + size]
        keys = [[scaled, length, _hash([texts[name]])] for name in named]
        cost = sum(len(texts[name].ids) for name in named)
        number = f"document {start + 1:,} of {len(names):,}"
        label = " ".join((model.name, *method.words, f"needles {length:,}, {number}"))
        items.append(Item(keys, read, named, cost, label=label))

    def cells(readings: list[list[Cell]]) -> list[Cell]:
        documents = [
            {"id": name, "needles": found} for name, found in zip(texts, readings, strict=True)
        ]
        cell: Cell = {
            **scaled,
            "length": length,
            "count": settings.count,
            "digits": DIGITS,
            "seed": settings.seed,
            "text": about,
            "near": near,
            "rope_parameters": model.module and method.parameters(model.module, length),
        }
        ranges = {}
        if near is not None:
            ranges["near"] = figures(documents, near)
            ranges["beyond"] = figures(documents, near, beyond=True)
        return [cell | figures(documents) | {"ranges": ranges, "documents": documents}]

    return Measurement(items, cells)


def _hash(texts: Sequence[NeedleText]) -> str:
    """Identifies texts and what is asked for in them."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def _read(model: Model, method: MethodSettings, name: str, text: NeedleText) -> list[TokenReading]:
    """What the model says about every token of a text from its first answer on."""
    targets = torch.tensor(text.ids[text.first_answer :])
    module = model.loaded()
    inputs = torch.tensor([text.ids[:-1]], device=module.device)
    with method.applied(module, len(text.ids)):
        logits = last_logits(module, inputs, len(targets))[0].cpu()
    nats = F.cross_entropy(logits, targets, reduction="none").double()
    likeliest = logits.argmax(-1) == targets
    if nats.isnan().any():
        raise UserError(
            f"the model returns NaN for document {name!r}: its weights are damaged, or its "
            "precision overflows (try float32)"
        )
    return [
        TokenReading(log_probability, is_likeliest)
        for log_probability, is_likeliest in zip((-nats).tolist(), likeliest.tolist(), strict=True)
    ]


def _needles_of(text: NeedleText, answers: Sequence[TokenReading]) -> list[Cell]:
    """The needles of a text in the order of their answers, from what is said of its last tokens."""
    found: list[Cell] = []
    for needle in text.needles:
        answer = answers[needle.first - text.first_answer : needle.stop - text.first_answer]
        nats = -math.fsum(each.log_probability for each in answer)
        found.append(
            {
                "distance": needle.distance,
                "nats": nats if math.isfinite(nats) else None,
                "found": all(each.likeliest for each in answer),
            }
        )
    return found


def figures(documents: Sequence[Cell], near: int | None = None, beyond: bool = False) -> Cell:
    """Nats a digit and the share found, of all needles or of those up to or beyond a distance.

    Args:
        documents: Of a cell.
        near: Distance in tokens up to which a needle counts; by default any.
        beyond: Whether to count the needles that are farther back instead.
    """
    chosen = [_chosen(document, near, beyond) for document in documents]
    scores = scores_of(documents, near, beyond)
    counted = [needle for needles in chosen for needle in needles]
    mean = mean_nats(scores)
    return {
        "nats": mean if math.isfinite(mean) else None,
        "ci95": nats_interval(scores),
        "found": sum(needle["found"] for needle in counted),
        "needles": len(counted),
    }


def scores_of(
    documents: Sequence[Cell], near: int | None = None, beyond: bool = False
) -> list[DocumentScore]:
    """Nats and digits of every document, with arguments as for `figures`."""
    scores = []
    for document in documents:
        needles = _chosen(document, near, beyond)
        nats = [math.inf if needle["nats"] is None else needle["nats"] for needle in needles]
        scores.append(DocumentScore(document["id"], sum(nats), DIGITS * len(needles)))
    return scores


def _chosen(document: Cell, near: int | None, beyond: bool) -> list[Any]:
    """The needles of a document that count."""
    if near is None:
        return document["needles"]
    return [each for each in document["needles"] if (each["distance"] > near) == beyond]


NEEDLES_TASK = Task(**vars(NEEDLES), measure=measure_needles)
