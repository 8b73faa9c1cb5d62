"""Commands that show what there is: the report page, a model and the machine."""

from dataclasses import dataclass
from pathlib import Path

from coca_attention.errors import UserError
from coca_lab.cli.console import parse
from coca_lab.info import machine, model_folder
from coca_lab.report import write_report


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
    """Turn result files, or folders of runs, suites and studies, into one self-contained page."""
    paths, settings = parse("coca report", run_report, words, [ReportSettings], ["results+"])
    output = Path(settings.output)
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


def run_info(words: list[str]) -> None:
    """Print versions and hardware of this machine, or the configuration of a model."""
    (path,) = parse("coca info", run_info, words, [], ["model?"])
    rows = model_folder(path) if path else machine()
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
