"""Associative recall of random tokens (MQAR): pairs of keys and values, and questions for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch.utils.data import BatchSampler
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_lab.cells import Fraction, Name, Natural, Prompts, Whole
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.intervals import wilson_interval
from coca_lab.report import Section
from coca_lab.report.lengths import Measure, Point, frame_of, length_sections
from coca_lab.report.task_sections import prompts_caption
from studies.recall.texts import recall_text, recall_vocabulary


@dataclass
class RecallSettings:
    """Which texts are read."""

    lengths: Annotated[list[PositiveInt], Field(min_length=1)] = field(
        default_factory=lambda: [64, 256, 1024]
    )
    """Tokens of a text."""
    pairs: Annotated[list[PositiveInt], Field(min_length=1)] = field(
        default_factory=lambda: [4, 8, 16]
    )
    """Pairs of a text, each asked for once; those that do not fit into a length, at four tokens a
    pair, are left out there."""
    samples: PositiveInt = 32
    """Texts of each length and number of pairs."""
    seed: NonNegativeInt = 0
    """Random seed of the texts."""
    batch_tokens: PositiveInt = 8192
    """Tokens per batch; a batch has at least one text."""

    def __post_init__(self) -> None:
        fewest = 4 * min(self.pairs)
        if min(self.lengths) < fewest:
            raise UserError(
                f"texts of {min(self.lengths)} tokens have no room for {fewest // 4} pairs, which "
                f"take {fewest}: use longer texts, or fewer pairs"
            )


Octaves = dict[str, list[int]]
"""Answers asked for and right ones, by octave of the distance from the pair: 32 is 32 to 63."""


@torch.inference_mode()
def read_texts(
    module: PreTrainedModel,
    vocabulary: list[int],
    length: int,
    pairs: int,
    settings: RecallSettings,
) -> Octaves:
    """How often the likeliest token is the answer."""
    # A text is read in one pass: what the model says at one answer does not depend on the others.
    asked, right = np.zeros((2, 64), dtype=int)
    size = max(1, settings.batch_tokens // length)
    for indices in BatchSampler(range(settings.samples), size, drop_last=False):
        seeds = ([settings.seed, length, pairs, index] for index in indices)
        batch = [
            recall_text(vocabulary, pairs, length, np.random.default_rng(seed)) for seed in seeds
        ]
        ids = torch.from_numpy(np.stack([text.ids for text in batch])).to(module.device)
        best = module(input_ids=ids, use_cache=False).logits.argmax(-1).cpu().numpy()
        for text, said in zip(batch, best, strict=True):
            octaves = np.log2(text.distances).astype(int)
            asked += np.bincount(octaves, minlength=64)
            hits = said[text.answers - 1] == text.ids[text.answers]
            right += np.bincount(octaves[hits], minlength=64)
    return {str(1 << i): [int(asked[i]), int(right[i])] for i in np.flatnonzero(asked).tolist()}


def measure_recall(
    model: Model, settings: RecallSettings, method: MethodSettings
) -> list[Measurement]:
    """Share of right answers: a cell for every length and number of pairs that fits into it."""
    every = product(settings.lengths, settings.pairs)
    return [
        _measure_cell(model, settings, method, length, pairs)
        for length, pairs in every
        if 4 * pairs <= length
    ]


def _measure_cell(
    model: Model, settings: RecallSettings, method: MethodSettings, length: int, pairs: int
) -> Measurement:
    about = {"length": length, "pairs": pairs, "seed": settings.seed}
    key = [about, settings.samples, method.facts]

    def work(_: list[None]) -> list[Octaves]:
        module = model.loaded()
        vocabulary = recall_vocabulary(model.tokenizer)
        with method.applied(module, length):
            return [read_texts(module, vocabulary, length, pairs, settings)]

    def cells(values: list[Octaves]) -> list[Cell]:
        asked, right = (sum(column) for column in zip(*values[0].values(), strict=True))
        figures = {"asked": asked, "right": right, "octaves": values[0]}
        shares = {"accuracy": right / asked, "wilson95": wilson_interval(right, asked)}
        return [{**about, **figures, **shares}]

    label = " ".join((model.name, *method.words, f"recall {length:,}"))
    return Measurement([Item([key], work, [None], length * settings.samples, label)], cells)


class RecallCell(Prompts):
    """The share of right answers about a number of pairs."""

    accuracy: Fraction
    pairs: Whole | Name = ""
    asked: Natural | None = None
    right: Natural | None = None
    octaves: dict[str, list[Natural]] = {}


ANSWERED = Measure(
    "Associative recall", "share of questions answered", x="tokens of the text", shares=True
)


def recall_sections(cells: Sequence[RecallCell]) -> list[Section]:
    """Right answers by length of the text, for every number of pairs."""
    points = []
    for cell in cells:
        kind = f"{cell.pairs} pairs" if isinstance(cell.pairs, int) else cell.pairs
        points.append(Point(cell, cell.length, cell.accuracy, cell.wilson95, kind))
    return length_sections(frame_of(points, ANSWERED), ANSWERED, prompts_caption(cells))


RECALL_TASK = Task(
    "recall",
    "Associative recall: does a model know the values of the keys it has read?",
    RecallSettings,
    measure=measure_recall,
)
