"""Result files → one self-contained HTML page."""

from coca_attention.report.page import build_report, write_report

__all__ = ["build_report", "write_report"]
