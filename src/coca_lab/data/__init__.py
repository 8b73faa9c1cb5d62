"""From documents to tokens to blocks."""

from typing import TYPE_CHECKING

from coca_lab.lazy import attach

if TYPE_CHECKING:
    from coca_lab.data.cache import TokenText, cache_folder, tokenise
    from coca_lab.data.documents import (
        DataError,
        Document,
        SourceSettings,
        held_out,
        read_documents,
    )
    from coca_lab.data.mixture import Mixture, apportion
    from coca_lab.data.tokens import (
        BlockDataset,
        TaskBlocks,
        encode_documents,
        load_or_train_tokenizer,
        load_tokenizer,
        token_array,
        train_tokenizer,
    )

__all__ = [
    "BlockDataset",
    "DataError",
    "Document",
    "Mixture",
    "SourceSettings",
    "TaskBlocks",
    "TokenText",
    "apportion",
    "cache_folder",
    "encode_documents",
    "held_out",
    "load_or_train_tokenizer",
    "load_tokenizer",
    "read_documents",
    "token_array",
    "tokenise",
    "train_tokenizer",
]

__getattr__, __dir__ = attach(
    __name__,
    cache="TokenText cache_folder tokenise",
    documents="DataError Document SourceSettings held_out read_documents",
    mixture="Mixture apportion",
    tokens=(
        "BlockDataset TaskBlocks encode_documents load_or_train_tokenizer load_tokenizer "
        "token_array train_tokenizer"
    ),
)
