"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers."""

import coca_attention.models  # noqa: F401
