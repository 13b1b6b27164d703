"""Benchmark of every implementation against un-rotated attention: `python -m sgl_kernel_lazy.bench`."""
