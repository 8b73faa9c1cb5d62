"""Studies: what trains and evaluates several models."""
