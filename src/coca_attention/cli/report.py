"""The command that writes the report page."""

from dataclasses import dataclass

from coca_attention.cli.console import parse
from coca_attention.errors import UserError


@dataclass
class ReportSettings:
    """The report page."""

    output: str = "report.html"
    """HTML file to write."""
    title: str | None = None
    """Heading of the page; by default it names what was measured."""


def run_report(words: list[str]) -> None:
    """Turn result files and run folders into one self-contained HTML page."""
    split = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    paths, rest = words[:split], words[split:]
    leading = {"RESULT …": "Result files (JSON) and run folders."}
    settings = parse("coca report", run_report, rest, [ReportSettings], leading=leading)[0]
    if not paths:
        raise UserError("give result files first: coca report RESULT.json … --output report.html")
    from coca_attention.report import write_report

    print(f"Report: {write_report(paths, settings.output, title=settings.title)}")
