"""What a model's attention does on real text. docs/analysis.md describes what is measured."""

from coca_attention.analysis.capture import LayerHeads, collect_layers, visit_layers
from coca_attention.analysis.retrieval import (
    RetrievalSettings,
    analyze_retrieval,
    check_retrieval,
)
from coca_attention.analysis.task import (
    AnalysisSettings,
    analyze,
    check_settings,
    read_token_ids,
)

__all__ = [
    "AnalysisSettings",
    "LayerHeads",
    "RetrievalSettings",
    "analyze",
    "analyze_retrieval",
    "check_retrieval",
    "check_settings",
    "collect_layers",
    "read_token_ids",
    "visit_layers",
]
