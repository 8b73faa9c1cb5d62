"""Training from sinks of -4, which hardly anything attends to, in place of 0."""

from typing import Any

from torch import nn
from transformers import initialization
from transformers.models.granite_swa import modeling_granite_swa as granite

START = -4.0
_initialise = granite.GraniteSWAPreTrainedModel._init_weights


def _with_low_sinks(self: Any, module: nn.Module) -> None:
    _initialise(self, module)
    if isinstance(module, granite.GraniteSWAAttention):
        initialization.constant_(module.sinks, START)


granite.GraniteSWAPreTrainedModel._init_weights = _with_low_sinks
