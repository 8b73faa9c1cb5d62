"""Which text is read."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from coca_attention.errors import UserError

BadLines = Literal["error", "skip"]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""The type of settings that name a file or a folder: a first ``~`` is the user's folder."""
Precision = Literal["float32", "bfloat16", "float16"]
"""Of weights, or of a computation."""
Dtype = Literal["auto", Precision]
"""The same; auto is that of what is there."""
Thinking = Literal["default", "on", "off"]
"""Whether a model thinks before its answer: as its chat template says, or as it is told."""
TOKEN_IDS = ".npy"
"""Ending of a file of token ids, which training reads in place of text."""
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 257, 10_000_000
"""Of a tokenizer that is trained here: the bytes and the end of text; and beyond any use."""
NO_DOCUMENTS = (
    "has token ids, not documents, so none can be held out: set data.held_out to 0 and, to "
    "validate, validation.source"
)


@dataclass
class SourceSettings:
    """Documents to read."""

    source: PathText = "stdlib"
    """stdlib; a file, folder or glob of .txt, .jsonl, .ndjson, .json (also .gz, .xz, .zst) or
    .parquet; a folder of save_to_disk; or hf:NAME."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""


@dataclass
class TextSettings(SourceSettings):
    """Which text to score."""

    held_out: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Read only this held-out share of the documents: the one that a recipe with the same value
    leaves out of training."""
    max_documents: PositiveInt | None = None
    """Maximum number of documents."""
    max_tokens: PositiveInt | None = None
    """Truncate every document to this many tokens."""
    skip_short: bool | None = None
    """Skip documents shorter than the largest window or length instead of reporting an error; by
    default those of stdlib, whose files are mostly short, and no others."""


def check_text(settings: TextSettings, at_least: int) -> None:
    """Raise UserError unless the documents may have ``at_least`` tokens."""
    if settings.max_tokens is not None and settings.max_tokens < at_least:
        raise UserError(
            f"`max_tokens` cuts documents to {settings.max_tokens} tokens, and at least {at_least} "
            "are needed: raise `max_tokens`, or ask for shorter texts"
        )
