"""Result files → one self-contained HTML page."""

from coca_attention.report.page import build_report, write_report
from coca_attention.report.results import printed_table, read_results
from coca_attention.report.retrieval import printed_tables

__all__ = ["build_report", "printed_table", "printed_tables", "read_results", "write_report"]
