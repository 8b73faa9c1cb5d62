"""Names of the methods after which a model reads farther; `coca_attention.models.methods` has them.

Here without Transformers, for options and recipes.
"""

from typing import Literal

SavedMethod = Literal[
    "shifted",
    "limited",
    "leaky",
    "yarn",
    "ntk",
    "temperature",
    "dynamic",
    "self_extend",
    "string",
    "linear",
    "llama3",
    "longrope",
]
"""Methods with which a model can be saved."""
MethodName = Literal["none", "ntk_text", SavedMethod]
"""All methods. ``none`` changes nothing, and ``ntk_text`` depends on the text that is read."""
