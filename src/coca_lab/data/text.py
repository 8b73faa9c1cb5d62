"""Token ids of documents, cached on disk, and the tokenizer that they train."""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coca_attention.errors import UserError
from coca_lab.data.documents import (
    DataError,
    Document,
    documents_of,
    text_fingerprint,
)
from coca_lab.files import find_model, writing
from coca_lab.fingerprints import fingerprint
from coca_lab.settings.sources import (
    NO_DOCUMENTS,
    SMALLEST_VOCABULARY,
    TOKEN_IDS,
    SourceSettings,
)
from coca_lab.weights import model_file

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "*.model", "*.tiktoken")
"""Patterns of the names that files of a tokenizer have."""
NO_VOCABULARY = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Those that alone make no tokenizer."""
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CHARACTERS = 100_000_000
LONG_RUN = re.compile(r"(\S{1000}|\s{1000})")


def train_tokenizer(
    documents: Iterable[Document], vocab_size: int, *, split_digits: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text in, the same text out; ``<|endoftext|>`` ends documents.

    About `TOKENIZER_CHARACTERS` characters are read: more text changes little, and a stream may be
    endless. ``vocab_size`` is a maximum, at least 257 (the bytes and the end of text), else
    UserError; ``split_digits`` makes every digit a token of its own.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"`vocab_size` must be at least {SMALLEST_VOCABULARY}, got {vocab_size}")
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
    some = up_to(TOKENIZER_CHARACTERS, documents)
    # The time grows with the square of the longest unbroken run, so these are trained on in parts.
    parts = (part for document in some for part in LONG_RUN.split(document.text) if part)
    tokenizer.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def up_to(characters: float, documents: Iterable[Document]) -> Iterator[Document]:
    """Documents until they have so many characters or more; none is read beyond."""
    for document in documents:
        yield document
        characters -= len(document.text)
        if characters <= 0:
            return


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Any Transformers tokenizer, by folder or name; UserError if it cannot be loaded."""
    place = find_model(path)
    folder = Path(place.path)
    found = {file.name for each in TOKENIZER_FILES for file in folder.glob(each)}
    none = (
        f"{path}: the folder has no tokenizer: copy tokenizer.json and tokenizer_config.json from "
        "the model that it was made from"
    )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            place.path, revision=place.revision, trust_remote_code=False
        )
    except Exception as error:  # a damaged file raises a plain Exception, among others
        if folder.is_dir() and found <= set(NO_VOCABULARY):
            raise UserError(none) from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        alone = "tokenizer.model" in found and TOKENIZER_JSON not in found
        if alone and find_spec("sentencepiece") is None:
            # Transformers then tries tiktoken, and names that.
            reason = "tokenizer.model needs the package sentencepiece: pip install sentencepiece"
        elif found:
            reason += f"; if {' or '.join(sorted(found))} is damaged, copy it again"
        raise UserError(f"{path}: no tokenizer could be loaded: {reason}") from error
    # From a model's type alone Transformers makes a tokenizer of a few tokens (GPT-NeoX, Qwen3).
    files = tokenizer.vocab_files_names.values()  # none for ByT5, whose tokens are bytes
    if files and found <= set(NO_VOCABULARY):
        there = [model_file(place, name) for name in files]
        if not any(there):
            raise UserError(none)
    tokenizer.init_kwargs.pop("auto_map", None)  # names code of the folder, which is never run
    return tokenizer


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token that ends documents; UserError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError("the tokenizer has no eos_token, which is needed to end documents")
    return end


def encode_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, batch: int = 64
) -> Iterator[tuple[Document, list[int]]]:
    """Every document with its token ids, without special tokens."""
    stream = iter(documents)
    while chunk := list(islice(stream, batch)):
        texts = [document.text for document in chunk]
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield from zip(chunk, ids["input_ids"], strict=True)


def _token_arrays(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> Iterator[np.ndarray]:
    end = end_of_text(tokenizer)
    dtype = _token_type(tokenizer)
    count = 0
    for _, ids in encode_documents(documents, tokenizer):
        left = None if max_tokens is None else max_tokens - count
        yield np.array([*ids, end], dtype=dtype)[:left]
        count += len(ids) + 1
        if max_tokens is not None and count >= max_tokens:
            return
    if not count:
        raise DataError("no documents to tokenise: the source or the split is empty")


def _token_type(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


def tokenise(
    source: SourceSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    share: float = 0.0,
    from_held_out: bool = False,
    max_tokens: int | None = None,
    folder: Path | None = None,
    content: str | None = None,
) -> np.ndarray:
    """The training or the held-out documents as token ids, each followed by the end of text.

    With a folder, the tokens are in a file there, which is written once and memory-mapped, so
    memory does not grow with the text. Its name is the fingerprint of everything that the tokens
    depend on: the settings, the tokenizer, and the text (`text_fingerprint`). If several
    processes need the same text, one writes it and the others wait. A source that ends with .npy
    is a file of token ids: a 1-D array of uint16 or uint32, made with this tokenizer.

    Args:
        source: The documents.
        tokenizer: Tokenizer with an ``eos_token``.
        share: Share of documents that are held out.
        from_held_out: Whether to tokenise the held-out documents instead of the others.
        max_tokens: Stop reading after this many tokens; required for endless streams.
        folder: Folder of the caches; None for none.
        content: The `text_fingerprint` of the source, where it is known.

    Returns:
        (tokens,), uint16 or uint32, in memory or mapped.

    Raises:
        UserError: If the tokenizer has no end of text, the cache cannot be written, or documents of
            a file of token ids are to be held out.
        DataError: If the source cannot be read, is empty, or changes while it is read.
    """
    if source.source.endswith(TOKEN_IDS):
        if share or from_held_out:
            raise UserError(f"{source.source} {NO_DOCUMENTS}")
        return _read_tokens(source.source, tokenizer, max_tokens)
    documents = documents_of(source, share, from_held_out=from_held_out)
    arrays = _token_arrays(documents, tokenizer, max_tokens)
    if folder is None:
        return np.concatenate([*arrays])
    text = content or text_fingerprint(source.source)
    dtype = _token_type(tokenizer)
    settings = [source.text_field, source.bad_lines, share, from_held_out, max_tokens]
    key = fingerprint([text, settings, str(dtype), tokenizer_fingerprint(tokenizer)])
    path = folder / "tokens" / f"{key[:24]}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # waits for a process that writes the same
            if not path.is_file():
                with writing(path) as partial:
                    with open(partial, "wb") as file:
                        shown = f"tokenising {source.source}"
                        for tokens in tqdm(arrays, shown, unit=" documents", disable=None):
                            file.write(tokens.data)
                    if text_fingerprint(source.source) != text:
                        raise DataError(f"{source.source}: changed while it was being read")
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise UserError(
            f"{path.parent}: tokenised text cannot be stored here: {error.strerror or error}; free "
            "disk space, choose another folder with data.cache, or keep the tokens in memory with "
            "data.cache null"
        ) from error


def _read_tokens(path: str, tokenizer: PreTrainedTokenizerBase, most: int | None) -> np.ndarray:
    """Token ids of a .npy file, memory-mapped; DataError if they are not this tokenizer's."""
    try:
        tokens = np.load(Path(path).expanduser(), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: token ids cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32) or not len(tokens):
        raise DataError(
            f"{path}: expected token ids, a 1-D array of uint16 or uint32, got {tokens.dtype} "
            f"with shape {tokens.shape}"
        )
    tokens = tokens[:most]
    if tokens.max() >= len(tokenizer):
        raise DataError(
            f"{path}: has token id {tokens.max()}, and the tokenizer {len(tokenizer)} entries: use "
            "the tokenizer that the file was made with"
        )
    return tokens


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines a tokenizer's ids, independent of its folder."""
    digest = hashlib.sha256(f"{end_of_text(tokenizer)} {type(tokenizer).__name__}".encode())
    if tokenizer.is_fast:
        backend: Any = tokenizer
        rules = json.loads(backend.backend_tokenizer.to_str())
        del rules["truncation"], rules["padding"]  # state of the last call
        digest.update(json.dumps(rules).encode())
        return digest.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            if path.name != "tokenizer_config.json":  # contains the folder
                digest.update(path.read_bytes())
    return digest.hexdigest()
