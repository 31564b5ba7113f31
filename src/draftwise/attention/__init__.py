"""Attention over paged keys and values with causal, tree and sliding-window masks."""
