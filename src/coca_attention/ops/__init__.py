"""Functions on tensors; requires only torch.

- `positions`: rotary pairs, scaling rules, `Rotation`.
- `forms`: the score forms.
- `maps`: effective queries and keys.
- `collinear`: `coca_attention`, the operator.
- `decoding`: one new token over a half cache.
- `kernels`: fused Triton kernels, used on CUDA if Triton is installed.
- `attention`: softmax attention in linear memory.
- `clipped`: attention under clipped distances; `parts`: its near and far keys without masks.
- `opaque`: operators that torch.compile does not trace.
- `alibi`: attention with linear biases, the paper's baseline.
"""

from coca_attention.ops.attention import attend, hidden_by, with_bias
from coca_attention.ops.clipped import Clipping, attend_clipped, check_clipped_form, far_query_map
from coca_attention.ops.collinear import coca_attention
from coca_attention.ops.decoding import (
    KeyFrames,
    attend_half,
    attend_half_at,
    key_frames,
    tile_length,
)
from coca_attention.ops.forms import FORMS, ScoreForm, get_form, register_form
from coca_attention.ops.maps import activate, fold, key_map, query_map, score_scale
from coca_attention.ops.opaque import compiling
from coca_attention.ops.positions import (
    RULES,
    UNSCALED,
    Decay,
    Rotation,
    Rule,
    apply_rotary,
    register_rule,
)

__all__ = [
    "FORMS",
    "RULES",
    "UNSCALED",
    "Clipping",
    "Decay",
    "KeyFrames",
    "Rotation",
    "Rule",
    "ScoreForm",
    "activate",
    "apply_rotary",
    "attend",
    "attend_clipped",
    "attend_half",
    "attend_half_at",
    "check_clipped_form",
    "coca_attention",
    "compiling",
    "far_query_map",
    "fold",
    "get_form",
    "hidden_by",
    "key_frames",
    "key_map",
    "query_map",
    "register_form",
    "register_rule",
    "score_scale",
    "tile_length",
    "with_bias",
]
