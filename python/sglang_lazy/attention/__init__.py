"""Attention over linked rows: how a batch is described to the kernels, and what it costs."""
