"""What a model's attention does on real text. docs/analysis.md describes what is measured."""

from typing import TYPE_CHECKING

from coca_lab.lazy import attach

if TYPE_CHECKING:
    from coca_lab.analysis.capture import LayerHeads, collect_layers, visit_layers
    from coca_lab.analysis.retrieval import (
        RetrievalSettings,
        analyze_retrieval,
        check_retrieval,
    )
    from coca_lab.analysis.task import (
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

__getattr__, __dir__ = attach(
    __name__,
    capture="LayerHeads collect_layers visit_layers",
    retrieval="analyze_retrieval",
    settings="AnalysisSettings RetrievalSettings check_retrieval check_settings",
    task="analyze read_token_ids",
)
