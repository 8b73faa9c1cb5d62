"""Conversion of vanilla models and of the authors' checkpoints to CoCA models."""

from coca_attention.models.conversion.convert import INITIALISATIONS, Initialisation, convert
from coca_attention.models.conversion.original import load_original

__all__ = [
    "INITIALISATIONS",
    "Initialisation",
    "convert",
    "load_original",
]
