"""From documents to tokens."""

from coca_lab.data.documents import (
    DataError,
    Document,
    documents_of,
    held_out,
    read_documents,
)
from coca_lab.data.text import encode_documents, load_tokenizer, tokenise, train_tokenizer
from coca_lab.settings.sources import SourceSettings

__all__ = [
    "DataError",
    "Document",
    "SourceSettings",
    "documents_of",
    "encode_documents",
    "held_out",
    "load_tokenizer",
    "read_documents",
    "tokenise",
    "train_tokenizer",
]
