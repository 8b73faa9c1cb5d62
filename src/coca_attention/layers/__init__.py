"""`nn.Module` layers for models of one's own: flat keyword arguments, no configuration object."""

from coca_attention.layers.coca import CoCAAttention

__all__ = ["CoCAAttention"]
