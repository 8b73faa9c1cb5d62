"""Blocks of tokens that training reads: of a text, of synthetic tasks, and mixed by shares."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.documents import DataError
from coca_lab.data.tasks import encoder, passkey_block, recall_block, recall_vocabulary
from coca_lab.data.text import end_of_text


class BlockDataset(Dataset):
    """Consecutive blocks of a token array; block i predicts tokens i*L + 1 … i*L + L.

    Every item has L inputs and, shifted by one, L targets, so every token of the array except the
    first is a target once, and the last position of a block is trained like the others.

    Args:
        tokens: 1-D.
        length: L in tokens, at least 1.
        end: Token id of the end of text, to keep documents apart (see `separate_documents`).

    Raises:
        DataError: If the text is shorter than one block.
    """

    def __init__(self, tokens: np.ndarray, length: int, *, end: int | None = None) -> None:
        self.tokens, self.length, self.end = tokens, length, end
        if len(self) < 1:
            raise DataError(
                f"the text has {len(tokens)} tokens, fewer than one block of {length} and its last "
                "target; use more text or a shorter block_length"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return _item(self.tokens[start : start + self.length + 1], self.end)


class TaskBlocks(Dataset):
    """Blocks of a task's texts, made when they are read; UserError if none fits into a block."""

    # task: passkey, or recall, of which the answers alone are trained. The seed and the number of a
    # block determine it.
    def __init__(
        self,
        task: str,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        count: int,
        seed: int,
        separate: bool = False,
    ) -> None:
        self.length, self.count, self.seed = length, count, seed
        self.eos = end_of_text(tokenizer)
        self.end = self.eos if separate else None
        self.encode = encoder(tokenizer) if task == "passkey" else None
        self.vocabulary = recall_vocabulary(tokenizer)
        self[0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        size, seed = self.length + 1, (self.seed, index)
        if self.encode is not None:
            return _item(passkey_block(self.encode, self.eos, size, seed), self.end)
        block, is_answer = recall_block(self.vocabulary, self.eos, size, seed)
        item = _item(block, self.end)
        ignored = ~torch.from_numpy(is_answer[1:])
        item["shift_labels"] = item["shift_labels"].masked_fill(ignored, -100)
        return item


def _item(block: np.ndarray, end: int | None) -> dict[str, Tensor]:
    """L + 1 tokens as L inputs and L targets; with an end of text, documents are kept apart."""
    tokens = torch.from_numpy(block.astype(np.int64))
    # `shift_labels` are already aligned with the inputs; Transformers' loss then does not shift
    # `labels` itself, which would lose the last target.
    item = {"input_ids": tokens[:-1], "labels": tokens[:-1], "shift_labels": tokens[1:]}
    return item if end is None else separate_documents(item, end)


def separate_documents(item: dict[str, Tensor], end: int) -> dict[str, Tensor]:
    """Keep the documents of an item apart, which ``end`` follows, and which has no target."""
    # Positions that restart make Transformers mask attention between documents.
    ended = item["input_ids"] == end
    steps = torch.arange(len(ended))
    starts = torch.zeros_like(steps)
    starts[1:] = torch.where(ended[:-1], steps[1:], 0).cummax(0).values
    targets = item["shift_labels"].masked_fill(ended, -100)
    return {**item, "shift_labels": targets, "position_ids": steps - starts}


def spread_evenly(blocks: BlockDataset, count: int) -> Subset:
    """Blocks to validate on, spread evenly over a text; UserError if it has too few."""
    if len(blocks) < count:
        raise UserError(
            f"the text makes {len(blocks)} blocks, fewer than {count} for validation.batches; use "
            "more text or fewer batches"
        )
    return Subset(blocks, [index * len(blocks) // count for index in range(count)])


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """Order in which stages read their blocks, (needed,) int64: one permutation after another."""
    generator = np.random.default_rng(seed)
    passes = -(-needed // blocks)
    return np.concatenate([generator.permutation(blocks) for _ in range(passes)])[:needed]


def apportion(weights: list[float], batch: int, steps: int) -> np.ndarray:
    """Blocks of each source that have been read before every step, (steps + 1, sources), int64."""
    # Row s sums to s * batch. Later steps compensate for rounding: a source is never a whole block
    # ahead of its share, and no count ever decreases.
    shares = np.array(weights) / sum(weights)
    read = np.zeros((steps + 1, len(shares)), dtype=np.int64)
    for step in range(1, steps + 1):
        due = shares * step * batch
        # Start safely below what is due, then give each missing block to the largest deficit.
        counts = np.maximum(read[step - 1], np.floor(due).astype(np.int64) - len(shares))
        for _ in range(step * batch - int(counts.sum())):
            counts[np.argmax(due - counts)] += 1
        read[step] = counts
    return read


def mixture_order(sizes: Sequence[int], read: np.ndarray, seed: int) -> np.ndarray:
    """Indices into concatenated sources of these sizes, in the order of a run that reads so much.

    ``read`` is from `apportion`. Each source is read in passes: a pass has each of its blocks once,
    in a new random order.
    """
    steps, sources = len(read) - 1, len(sizes)
    source_of = np.repeat(np.tile(np.arange(sources), steps), np.diff(read, axis=0).ravel())
    order = np.empty(len(source_of), dtype=np.int64)
    for source, size in enumerate(sizes):
        wanted = source_of == source
        passes = range(-(-int(wanted.sum()) // size))
        permutations = [np.random.default_rng([seed, source, n]).permutation(size) for n in passes]
        blocks = np.concatenate(permutations) if permutations else np.empty(0, dtype=np.int64)
        order[wanted] = sum(sizes[:source]) + blocks[: wanted.sum()]
    return order
