"""The command that draws a page of results, which needs no torch."""

from pathlib import Path

from coca_lab.report import read_results, write_report
from coca_lab.settings.commands import ReportSettings


def report_command(paths: list[str], settings: ReportSettings) -> None:
    """Turn result files, or folders of runs and studies, into one self-contained page."""
    is_there = Path(settings.output).exists()
    contents = read_results(paths)
    page = write_report(contents, **vars(settings))
    for content in contents:
        if check := content.get("check"):
            print(check["decision"])
    replaced = ", in place of the page that was there" if is_there else ""
    print(f"Report: {page}{replaced}")
