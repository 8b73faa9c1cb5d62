"""Training with a random context: scores of global layers times ln(N + 1) / ln(L + 1).

N is drawn for every batch, its factor uniformly between those of L and 64 L. Evaluation uses the
weights as they are, so any such factor can be folded into the queries afterwards.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from coca_attention.models.sinks import SINKS, sink_attention

LARGEST = 64


def random_context_attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`sink_attention`, in training with larger queries of global layers."""
    if module.training and module.sliding_window is None:
        length = module.config.max_position_embeddings
        largest = math.log(LARGEST * length + 1) / math.log(length + 1)
        query = query * (1 + torch.rand(()) * (largest - 1))
    return sink_attention(module, query, *args, **kwargs)


AttentionInterface.register(SINKS, random_context_attention)
