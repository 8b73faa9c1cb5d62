"""Tokenizers, token arrays, and the blocks that training reads."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coca_attention.errors import UserError
from coca_attention.models.hub import check_name
from coca_lab.data.documents import DataError, Document
from coca_lab.environment import replace
from coca_lab.settings import check_vocab_size

MakeBlock = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray | None]]
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CHARACTERS = 100_000_000


def train_tokenizer(
    documents: Iterable[Document],
    vocab_size: int,
    *,
    split_digits: bool = False,
    max_characters: int = TOKENIZER_CHARACTERS,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text in, the same text out; ``<|endoftext|>`` ends documents.

    Args:
        documents: Texts to learn the merges from.
        vocab_size: Maximum number of entries; at least 257 (the bytes and the end of text).
        split_digits: Whether every digit is a token of its own.
        max_characters: Learn from about this many characters at most: more text changes little,
            and a stream may be endless.

    Raises:
        UserError: If vocab_size is too small.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_]) if split_digits else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        left = max_characters
        for document in documents:
            yield document.text
            left -= len(document.text)
            if left <= 0:
                return

    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_or_train_tokenizer(
    folder: str | Path,
    documents: Callable[[], Iterable[Document]],
    vocab_size: int,
    *,
    split_digits: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, or train one and save it there atomically.

    Args:
        folder: Folder of the tokenizer.
        documents: Returns the texts to train on; called only if there is no tokenizer yet.
        vocab_size: As for `train_tokenizer`.
        split_digits: As for `train_tokenizer`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        tokenizer = train_tokenizer(documents(), vocab_size, split_digits=split_digits)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save_pretrained(partial)
        replace(partial, folder)
    return load_tokenizer(folder)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load any Transformers tokenizer by folder or name.

    Raises:
        UserError: If it cannot be loaded.
    """
    check_name(str(path), "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # a damaged file raises a plain Exception, among others
        raise UserError(f"{path}: no tokenizer could be loaded: {_first_line(error)}") from error


def encode_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, batch: int = 64
) -> Iterator[tuple[Document, list[int]]]:
    """Every document with its token ids, without special tokens."""
    stream = iter(documents)
    while chunk := list(islice(stream, batch)):
        texts = [document.text for document in chunk]
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield from zip(chunk, ids["input_ids"], strict=True)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token that ends documents; UserError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError("the tokenizer has no eos_token, which is needed to end documents")
    return end


def token_type(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """uint16 if the vocabulary is small enough, otherwise uint32."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def token_arrays(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
) -> Iterator[np.ndarray]:
    """Token ids of every document, followed by the end of text.

    Args:
        documents: Documents.
        tokenizer: Tokenizer with an ``eos_token``.
        max_tokens: Stop reading after this many tokens; required for endless streams.

    Yields:
        1-D arrays of the tokenizer's `token_type`.

    Raises:
        UserError: If the tokenizer has no end of text.
        DataError: If there are no tokens.
    """
    end, dtype = end_of_text(tokenizer), token_type(tokenizer)
    left = max_tokens
    count = 0
    for _, ids in encode_documents(documents, tokenizer):
        yield np.array([*ids, end], dtype=dtype)[:left]
        count += 1
        if left is not None:
            left -= len(ids) + 1
            if left <= 0:
                return
    if not count:
        raise DataError("no documents to tokenise: the source or the split is empty")


def token_array(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
) -> np.ndarray:
    """All documents as one array of token ids; arguments and errors as `token_arrays`."""
    return np.concatenate(list(token_arrays(documents, tokenizer, max_tokens=max_tokens)))


class BlockDataset(Dataset):
    """Consecutive blocks of a token array; block i predicts tokens i*L + 1 … i*L + L.

    Every item has L inputs and, shifted by one, L targets, so every token of the array except the
    first is a target once, and the last position of a block is trained like the others.
    """

    def __init__(self, tokens: np.ndarray, length: int, *, end: int | None = None) -> None:
        """A view of the tokens.

        Args:
            tokens: 1-D.
            length: L in tokens, at least 1.
            end: Token id of the end of text, to keep documents apart (see `separate_documents`).

        Raises:
            UserError: If the length is below 1.
            DataError: If the text is shorter than one block.
        """
        if length < 1:
            raise UserError(f"the block length must be at least 1 token, got {length}")
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
    """Blocks of a synthetic task's texts, made when they are read.

    Args:
        make: From numbers that determine a block to its L + 1 tokens, and which of them are to be
            predicted, or None for all.
        count: Number of blocks.
        seed: First of these numbers; the second is that of the block.
        end: Token id of the end of text, to keep documents apart (see `separate_documents`).

    Raises:
        UserError: If no complete text fits into a block.
    """

    def __init__(self, make: MakeBlock, count: int, seed: int, *, end: int | None = None) -> None:
        self.make, self.count, self.seed, self.end = make, count, seed, end
        self[0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block, targets = self.make((self.seed, index))
        item = _item(block, self.end)
        if targets is not None:
            ignored = ~torch.from_numpy(targets[1:])
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
    """Keep the documents of an item apart.

    Positions restart in every document, which makes Transformers mask attention between documents.
    The end of a document has no target.

    Args:
        item: ``input_ids`` and ``shift_labels``, each (L,).
        end: Token id that ends documents.
    """
    ended = item["input_ids"] == end
    steps = torch.arange(len(ended))
    starts = torch.zeros_like(steps)
    starts[1:] = torch.where(ended[:-1], steps[1:], 0).cummax(0).values
    targets = item["shift_labels"].masked_fill(ended, -100)
    return {**item, "shift_labels": targets, "position_ids": steps - starts}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
