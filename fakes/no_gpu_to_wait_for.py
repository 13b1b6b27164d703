"""Lets memory be released where there is no GPU: SGLang 0.5.23 waits for the one that PyTorch is built for."""

import torch


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
