"""Kernel tests: native on a GPU, under Triton's interpreter without one."""

import os

import torch

# Triton reads this when a kernel is defined, so it must be set before the first import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # The interpreter's tensors are tiny; threads would only get in each other's way.
    torch.set_num_threads(1)
