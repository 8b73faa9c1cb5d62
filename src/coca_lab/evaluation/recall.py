"""Associative recall of random tokens (MQAR): pairs of keys and values, and questions for all."""

from itertools import product

import numpy as np
import torch
from torch.utils.data import BatchSampler
from transformers import PreTrainedModel

from coca_lab.data.tasks import recall_text, recall_vocabulary
from coca_lab.engine import Item
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.intervals import wilson_interval
from coca_lab.settings.evaluations import TASK_OPTIONS, RecallSettings

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
        module, vocabulary = model.loaded(), recall_vocabulary(model.tokenizer)
        with method.applied(module, length):
            return [read_texts(module, vocabulary, length, pairs, settings)]

    def cells(values: list[Octaves]) -> list[Cell]:
        asked, right = (sum(column) for column in zip(*values[0].values(), strict=True))
        figures = {"asked": asked, "right": right, "octaves": values[0]}
        shares = {"accuracy": right / asked, "wilson95": wilson_interval(right, asked)}
        return [{**about, **figures, **shares}]

    label = " ".join((model.name, *method.words, f"recall {length:,}"))
    return Measurement([Item([key], work, [None], length * settings.samples, label)], cells)


RECALL_TASK = Task(
    "recall",
    TASK_OPTIONS["recall"].summary,
    RecallSettings,
    measure=measure_recall,
)
