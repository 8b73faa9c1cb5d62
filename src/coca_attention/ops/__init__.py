"""Tensors in, tensors out; needs torch alone.

- `rotary`: frequencies, scaling rules, cos/sin, rotation.
- `maps`: the CoCA forms as effective queries and keys.
- `collinear`: `coca_attention`, the operator.
- `decoding`: one new token over a half cache.
- `kernels`: fused Triton kernels, used on CUDA where Triton is installed.
- `attention`: softmax attention in linear memory.
- `alibi`: linear biases, the paper's baseline.
- `oracle`: the paper's equations as printed, in float64.
"""

from coca_attention.ops.attention import attend
from coca_attention.ops.collinear import coca_attention
from coca_attention.ops.decoding import (
    KeyFrames,
    attend_half,
    attend_half_at,
    key_frames,
    tile_length,
)
from coca_attention.ops.maps import FORMS, Form, fold, key_map, query_map, score_scale
from coca_attention.ops.rotary import (
    NO_SCALING,
    SCALING_KINDS,
    RotaryScaling,
    apply_rotary,
    inverse_frequencies,
    ntk_base,
    rotary_cos_sin,
)

__all__ = [
    "FORMS",
    "NO_SCALING",
    "SCALING_KINDS",
    "Form",
    "KeyFrames",
    "RotaryScaling",
    "apply_rotary",
    "attend",
    "attend_half",
    "attend_half_at",
    "coca_attention",
    "fold",
    "inverse_frequencies",
    "key_frames",
    "key_map",
    "ntk_base",
    "query_map",
    "rotary_cos_sin",
    "score_scale",
    "tile_length",
]
