"""The table of books is of the file that the results were read from, and of what pages name."""

import csv
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from coca_lab.data.documents import read_documents
from studies.smollm2.books import CHARACTERS, PREFACE, TOKENS

RESULTS = Path(__file__).parents[2] / "results"
LONG = 32_769
"""Tokens of the books of results/qwen."""
BOOKS = os.environ.get("COCA_BOOKS", "")


def table():
    with (RESULTS / "books.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def excerpt(text, tokens):
    return text[PREFACE : PREFACE + CHARACTERS * tokens]


@pytest.fixture(scope="module")
def texts():
    """The texts by id."""
    if not BOOKS:
        pytest.skip("set COCA_BOOKS to the file that results/README.md describes")
    return {book.id: book.text for book in read_documents(BOOKS)}


def test_the_table_is_of_the_file(texts):
    content = Path(BOOKS).read_bytes()
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert f"`{hashlib.sha256(content).hexdigest()}`" in page
    assert len(texts) == 100
    for row in table():
        text = texts[row["id"]]
        assert len(text) == int(row["characters"])
        assert sha256(text) == row["text_sha256"]
        assert sha256(excerpt(text, TOKENS)) == row["excerpt_sha256"]
        assert sha256(excerpt(text, LONG)) == row["long_excerpt_sha256"]


@pytest.mark.parametrize(
    ("page", "ids", "tokens"),
    [
        ("extend", range(8), TOKENS),
        ("extend", range(8, 16), TOKENS),
        ("extend", range(16, 20), TOKENS),
        ("qwen", range(2), LONG),
        ("qwen", range(2, 6), LONG),
    ],
)
def test_pages_have_the_hashes_of_the_lines_that_were_read(texts, page, ids, tokens):
    """As `python -m studies.smollm2.books` writes them."""
    lines = [{"id": str(id_), "text": excerpt(texts[str(id_)], tokens)} for id_ in ids]
    written = "".join(json.dumps(line) + "\n" for line in lines)
    assert f"`{sha256(written)}`" in (RESULTS / page / "README.md").read_text(encoding="utf-8")


def test_the_table_has_the_books_that_pages_name():
    rows = table()
    assert [row["id"] for row in rows] == [str(index) for index in range(20)]
    page = (RESULTS / "extend/README.md").read_text(encoding="utf-8")
    named = " ".join(page.split())
    for row in rows:
        title = re.split(r" ?[:.,(]| Written| Vol", row["title"])[0]
        assert title in named or title.replace("Saint Mark", "St. Mark") in named, row["title"]
    for page, last in (("extend", 15), ("extend", 19), ("qwen", 5)):
        text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"ids\s+\d+ to {last}\b", text)
