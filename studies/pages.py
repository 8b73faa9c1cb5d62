"""What the pages of studies are made of: tables in Markdown between two marks, and differences."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from coca_attention.errors import UserError
from coca_lab.files import write_text
from coca_lab.intervals import mean_interval

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head, and without others there is none."""
    head, *body = rows
    if not body:
        return "Not run yet."
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def write_tables(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put text between the marks of a page; UserError if it has none."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise UserError(f"{page} has no place for tables: write {begin} and {end} on two lines")
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}")


def mean_and_interval(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The mean over seeds with Student's 95 % interval: of differences by seed, a paired one."""
    if not values:
        return ""
    mean, *ends = map(show, (sum(values) / len(values), *(mean_interval(values) or ())))
    return f"{mean} ({' to '.join(ends)})" if ends else mean
