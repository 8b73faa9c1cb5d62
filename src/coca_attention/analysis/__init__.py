"""Angles between queries and keys on real text. docs/analysis.md describes what is measured."""

from coca_attention.analysis.capture import LayerHeads, collect_layers, visit_layers
from coca_attention.analysis.task import (
    AnalysisSettings,
    analyze,
    check_settings,
    read_token_ids,
)

__all__ = [
    "AnalysisSettings",
    "LayerHeads",
    "analyze",
    "check_settings",
    "collect_layers",
    "read_token_ids",
    "visit_layers",
]
