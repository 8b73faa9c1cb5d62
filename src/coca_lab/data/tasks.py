"""Synthetic tasks whose texts are mixed into training data, by their names in recipes."""

from collections.abc import Callable
from typing import Any

from coca_lab.data.blocks import MakeBlock
from coca_lab.data.passkey import encoder, passkey_block
from coca_lab.data.recall import recall_block
from coca_lab.data.tokens import end_of_text


def _passkeys(tokenizer: Any, length: int) -> MakeBlock:
    encode, end = encoder(tokenizer), end_of_text(tokenizer)
    return lambda seed: (passkey_block(encode, end, length, seed), None)


def recall_vocabulary(tokenizer: Any) -> list[int]:
    """The tokens of recall texts: all but the special ones."""
    special = set(tokenizer.all_special_ids)
    return [index for index in range(len(tokenizer)) if index not in special]


def _recall(tokenizer: Any, length: int) -> MakeBlock:
    vocabulary, end = recall_vocabulary(tokenizer), end_of_text(tokenizer)
    return lambda seed: recall_block(vocabulary, end, length, seed)


TASK_BLOCKS: dict[str, Callable[[Any, int], MakeBlock]] = {"passkey": _passkeys, "recall": _recall}
"""From a tokenizer and a number of tokens to a function that makes blocks, see `TaskBlocks`."""
