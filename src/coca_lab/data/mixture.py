"""Mix the blocks of several sources by their shares, deterministically for a seed."""

from typing import Any

import numpy as np
from torch.utils.data import Dataset


def apportion(weights: list[float], batch: int, steps: int) -> np.ndarray:
    """Number of blocks of each source that have been read before every step.

    Every step reads whole blocks; later steps compensate for rounding. A source is never a whole
    block ahead of its share, and no count ever decreases.

    Args:
        weights: Shares of the sources, in any unit.
        batch: Blocks per step.
        steps: Number of steps.

    Returns:
        (steps + 1, sources), int64; row s sums to s * batch.
    """
    shares = np.array(weights) / sum(weights)
    read = np.zeros((steps + 1, len(shares)), dtype=np.int64)
    for step in range(1, steps + 1):
        due = shares * step * batch
        # Start safely below what is due, then give each missing block to the largest deficit.
        given = np.maximum(read[step - 1], np.floor(due).astype(np.int64) - len(shares))
        for _ in range(step * batch - int(given.sum())):
            given[np.argmax(due - given)] += 1
        read[step] = given
    return read


class Mixture(Dataset):
    """The blocks of a whole run in training order; every step is mixed by the shares.

    Each source is read in passes: a pass has each of its blocks once, in a new random order.
    """

    def __init__(self, sources: list[Any], read: np.ndarray, seed: int) -> None:
        """A mixture.

        Args:
            sources: Map-style datasets of blocks.
            read: From `apportion`, for the same sources.
            seed: Seed of the orders.
        """
        self.sources, self.read, self.seed = sources, read, seed
        self.batch = int(read[1].sum())
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return (len(self.read) - 1) * self.batch

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source, number = self.place(index)
        return self.sources[source][number]

    def place(self, index: int) -> tuple[int, int]:
        """The index of a block's source, and the block's index in that source."""
        step, slot = divmod(index, self.batch)
        before = self.read[step]
        ends = np.cumsum(self.read[step + 1] - before)
        source = int(np.searchsorted(ends, slot, side="right"))
        number = int(self.read[step + 1, source] - ends[source] + slot)
        epoch, position = divmod(number, len(self.sources[source]))
        return source, int(self._order(source, epoch)[position])

    def epochs(self) -> list[float]:
        """Number of passes over each source."""
        pairs = zip(self.read[-1], self.sources, strict=True)
        return [int(blocks) / len(source) for blocks, source in pairs]

    def _order(self, source: int, epoch: int) -> np.ndarray:
        """The order of a source's blocks in one pass; cached for the latest pass."""
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            generator = np.random.default_rng([self.seed, source, epoch])
            blocks = len(self.sources[source])
            # uint32 takes 4 bytes per block instead of 8.
            order = generator.permutation(np.arange(blocks, dtype=np.uint32))
            known = self._orders[source] = epoch, order
        return known[1]
