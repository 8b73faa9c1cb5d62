"""The command that draws a page of results, which needs no torch."""

from coca_lab.report import write_report
from coca_lab.settings.commands import ReportSettings


def report_command(paths: list[str], settings: ReportSettings) -> None:
    """Turn result files, or folders of runs and studies, into one self-contained page."""
    page = write_report(paths, **vars(settings))
    print(f"Report: {page}")
