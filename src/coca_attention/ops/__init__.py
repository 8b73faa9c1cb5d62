"""Functions on tensors; requires only torch.

- `positions`: rotary pairs and `Rotation`; `rules`: scaling rules of its frequencies.
- `forms`: the score forms.
- `maps`: effective queries and keys.
- `collinear`: `coca_attention`, the operator.
- `decoding`: one new token over a half cache.
- `kernels`: fused Triton kernels, used on CUDA if Triton is installed.
- `attention`: softmax attention in linear memory.
- `distances`: attention under a map of distances; `parts`: its near and far keys without masks.
- `linear`: linear attention with collinear keys, and its state.
- `opaque`: operators that torch.compile does not trace.
"""

from coca_attention.ops.attention import attend
from coca_attention.ops.collinear import coca_attention
from coca_attention.ops.decoding import attend_half, key_frames, tile_length
from coca_attention.ops.forms import FORMS, ScoreForm, get_form, register_form
from coca_attention.ops.linear import LinearState, coca_linear_attention
from coca_attention.ops.maps import activate, fold, key_map, query_map, score_scale
from coca_attention.ops.positions import DistanceMap, Rotation, apply_rotary
from coca_attention.ops.rules import (
    NTK,
    RULES,
    Linear,
    Rule,
    register_rule,
)

__all__ = [
    "FORMS",
    "NTK",
    "RULES",
    "DistanceMap",
    "Linear",
    "LinearState",
    "Rotation",
    "Rule",
    "ScoreForm",
    "activate",
    "apply_rotary",
    "attend",
    "attend_half",
    "coca_attention",
    "coca_linear_attention",
    "fold",
    "get_form",
    "key_frames",
    "key_map",
    "query_map",
    "register_form",
    "register_rule",
    "score_scale",
    "tile_length",
]
