"""The command that writes the report page."""

from dataclasses import dataclass
from pathlib import Path

from coca_attention.errors import UserError
from coca_lab.cli.console import parse


@dataclass
class ReportSettings:
    """The report page."""

    output: str = "report.html"
    """HTML file to write."""
    title: str | None = None
    """Heading of the page; by default it names what was measured."""
    paper: bool = False
    """Also show the paper's figures; results of its training length have them anyway."""


def run_report(words: list[str]) -> None:
    """Turn result files, or folders of runs, suites and searches, into one self-contained page."""
    split = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    paths, rest = words[:split], words[split:]
    leading = {"RESULT …": "Result files (JSON), and folders of runs, suites and searches."}
    settings = parse("coca report", run_report, rest, [ReportSettings], leading=leading)[0]
    if not paths:
        raise UserError(
            "give result files or folders first: coca report RESULT.json … --output report.html"
        )
    output = Path(settings.output)
    from coca_lab.report import write_report

    try:
        page = write_report(paths, output, title=settings.title, paper=settings.paper)
    except UserError:
        raise
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"{', '.join(paths)}: a result is damaged, or not of this program "
            f"({type(error).__name__}: {error})"
        ) from error
    print(f"Report: {page}")
