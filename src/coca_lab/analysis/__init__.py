"""What a model's attention does on real text. docs/analysis.md describes what is measured."""

from coca_lab.analysis.capture import LayerHeads, collect_layers, visit_layers
from coca_lab.analysis.task import AnalysisSettings, analyze, read_token_ids

__all__ = [
    "AnalysisSettings",
    "LayerHeads",
    "analyze",
    "collect_layers",
    "read_token_ids",
    "visit_layers",
]
