"""Result files → one self-contained HTML page."""

from coca_attention.report.page import build_report, write_report
from coca_attention.report.results import printed_table

__all__ = ["build_report", "printed_table", "write_report"]
