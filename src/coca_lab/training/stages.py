"""Stages of a run: which blocks each reads, and their curves on one axis."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from coca_lab.training.data import TrainingData
from coca_lab.training.recipe import Recipe


def stage_blocks(recipe: Recipe, data: TrainingData) -> Sequence[Dataset[Any]]:
    """The blocks of every stage: consecutive slices of one order for the whole run.

    Without stages they are `TrainingData.blocks`, which the Trainer shuffles if they have no order.
    """
    if not recipe.stages:
        return [data.blocks]
    every = [stage.settings(recipe.training) for stage in recipe.stages]
    borders = np.cumsum([0, *(settings.steps * settings.global_batch_size for settings in every)])
    blocks, order = data.blocks, np.arange(len(data.blocks))
    if not data.is_ordered:
        order = block_order(len(blocks), int(borders[-1]), recipe.training.seed)
    slices: list[Any] = [order[first:end] for first, end in pairwise(borders)]
    return [Subset[Any](blocks, indices) for indices in slices]


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """Order in which a run reads its blocks, (needed,) int64: one permutation after another."""
    generator = np.random.default_rng(seed)
    passes = -(-needed // blocks)
    return np.concatenate([generator.permutation(blocks) for _ in range(passes)])[:needed]


def join_curves(summaries: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """``curve`` or ``validation`` of all stages on one axis; entries name their stage, if any."""
    entries, done = [], 0
    for summary in summaries:
        stage = {"stage": summary["name"]} if summary["name"] else {}
        entries += [{**entry, "step": entry["step"] + done, **stage} for entry in summary[name]]
        done += summary["steps"]
    return entries
