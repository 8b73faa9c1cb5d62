"""Result files → one self-contained HTML page."""

from coca_attention.report.page import build_report, write_report
from coca_attention.report.printed import printed_tables
from coca_attention.report.results import read_results

__all__ = ["build_report", "printed_tables", "read_results", "write_report"]
