"""`nn.Module` layers for custom models: flat keyword arguments, no configuration object."""

from coca_attention.layers.coca import CoCAAttention

__all__ = ["CoCAAttention"]
