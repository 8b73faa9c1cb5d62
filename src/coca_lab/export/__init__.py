"""Models for engines that do not have this package: Transformers' GraniteSWA, and GGUF files."""

from coca_lab.export.native import Cost, as_native, export_native, fold_context

__all__ = ["Cost", "as_native", "export_native", "fold_context"]
