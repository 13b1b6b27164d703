"""Attention over linked rows: the kernels' metadata of a batch, and a cost estimate."""
