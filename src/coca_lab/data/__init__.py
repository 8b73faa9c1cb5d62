"""From documents to tokens."""

from coca_lab.data.documents import (
    DataError,
    Document,
    SourceSettings,
    held_out,
    read_documents,
)
from coca_lab.data.text import encode_documents, load_tokenizer, tokenise, train_tokenizer

__all__ = [
    "DataError",
    "Document",
    "SourceSettings",
    "encode_documents",
    "held_out",
    "load_tokenizer",
    "read_documents",
    "tokenise",
    "train_tokenizer",
]
