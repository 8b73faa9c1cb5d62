"""Collinear Constrained Attention (CoCA) for PyTorch and Transformers.

- `coca_attention.ops`: `coca_attention(query, key_coefficients, value)` and its parts.
- `coca_attention.layers`: `CoCAAttention`, a module for any PyTorch model.
- `coca_attention.models`: ``coca_*`` models, registered with Transformers' Auto classes here.
"""

import importlib.util

from coca_attention.layers import CoCAAttention
from coca_attention.ops import (
    Rotation,
    ScoreForm,
    coca_attention,
    fold,
    register_form,
    register_rule,
)

__version__ = "0.1.0"

__all__ = [
    "CoCAAttention",
    "Rotation",
    "ScoreForm",
    "coca_attention",
    "fold",
    "register_form",
    "register_rule",
]

# Operators and layers need only torch; the models need Transformers.
if importlib.util.find_spec("transformers") is not None:
    # Registers the coca_* models.
    from coca_attention.models import convert, load_original, set_rotary_scaling

    __all__ += ["convert", "load_original", "set_rotary_scaling"]
