"""Positions: rotary pairs, rules for their frequencies, and tables of cos and sin."""

from coca_attention.ops.positions.checks import (
    check_positions,
    check_real,
    check_whole,
    check_width,
)
from coca_attention.ops.positions.rotation import (
    Decay,
    Rotation,
    Table,
    apply_rotary,
    join_pairs,
    split_pairs,
)
from coca_attention.ops.positions.rules import (
    NTK,
    RULES,
    UNSCALED,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Rule,
    YaRN,
    register_rule,
)

__all__ = [
    "NTK",
    "RULES",
    "UNSCALED",
    "Decay",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Rotation",
    "Rule",
    "Table",
    "YaRN",
    "apply_rotary",
    "check_positions",
    "check_real",
    "check_whole",
    "check_width",
    "join_pairs",
    "register_rule",
    "split_pairs",
]
