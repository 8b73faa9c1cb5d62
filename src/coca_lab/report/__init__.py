"""Result files → one self-contained HTML page. Reads result files alone."""

from coca_lab.cells import CELLS, CheckedCell
from coca_lab.report.charts import LineChart
from coca_lab.report.page import build_report, write_figures, write_report
from coca_lab.report.result_files import read_results
from coca_lab.report.section import Entry, Section
from coca_lab.report.task_sections import REPORTS, TaskReport, printed_tables

__all__ = [
    "CELLS",
    "REPORTS",
    "CheckedCell",
    "Entry",
    "LineChart",
    "Section",
    "TaskReport",
    "build_report",
    "printed_tables",
    "read_results",
    "write_figures",
    "write_report",
]
