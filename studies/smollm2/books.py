"""The texts of the studies of SmolLM2 (smollm2, extend-…) and Qwen: the first long books of a file.

    python -m studies.smollm2.books BOOKS.jsonl.xz smollm2 books.jsonl

writes the id and text of every book that has 16,385 tokens, the longest window and a target, behind
its first 20,000 characters, until there are eight.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data import load_tokenizer
from coca_lab.data.documents import Document, read_documents
from coca_lab.files import write_text

TOKENS = 16_385
PREFACE = 20_000
"""Characters that are left out: titles, prefaces and contents."""
CHARACTERS = 8
"""Characters that are kept for every token: English has fewer."""


def long_books(
    source: str, tokenizer: PreTrainedTokenizerBase, tokens: int = TOKENS
) -> Iterator[Document]:
    """What follows the preface, of books that have so many tokens there."""
    for book in read_documents(source):
        text = book.text[PREFACE : PREFACE + CHARACTERS * tokens]
        if len(tokenizer(text)["input_ids"]) >= tokens:
            yield Document(book.id, text)


def main(words: Sequence[str] | None = None) -> None:
    """Write the books; UserError if there are too few."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="books, as coca eval --source takes them")
    parser.add_argument("model", help="folder of the tokenizer")
    parser.add_argument("target", type=Path, help="new file .jsonl")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="behind the preface")
    options = parser.parse_args(words)
    tokenizer = load_tokenizer(options.model)
    lines: list[str] = []
    for book in long_books(options.source, tokenizer, options.tokens):
        lines.append(json.dumps({"id": book.id, "text": book.text}))
        if len(lines) == options.count:
            break
    else:
        raise UserError(f"{options.source}: {len(lines)} of {options.count} books are long enough")
    write_text(options.target, "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
