"""Names of the methods after which a model reads farther; `coca_attention.models.methods` has them.

Here without Transformers, for options and recipes.
"""

from typing import Literal

MethodName = Literal[
    "none",
    "limited",
    "yarn",
    "dynamic",
    "ntk",
    "leaky",
    "self_extend",
    "shifted",
    "string",
    "temperature",
    "ntk_text",
    "linear",
    "llama3",
    "longrope",
]
