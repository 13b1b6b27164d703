"""Benchmark of every implementation against un-rotated attention: `python -m benchmark.kernels`."""
