"""The windows with which SGLang's Triton attention decodes: one token short, unless GPU tests widen them."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import update_sliding_window_buffer

from fakes import whole_windows

WINDOW, LENGTH = 24, 40


@pytest.mark.parametrize("widened", [False, True])
def test_decode_sees(widened):
    """Once SGLang's own windows are whole, `fakes/whole_windows.py` can go."""
    backend = SimpleNamespace(sliding_window_size=WINDOW - 1)  # models count a window without the token itself
    if widened:
        whole_windows.widen(None, backend)
    indptr, row = torch.zeros(2, dtype=torch.int32), torch.tensor([0])
    _, _, num_seen, first = update_sliding_window_buffer(
        indptr, Mock(), None, row, backend.sliding_window_size, torch.tensor([LENGTH]), 1, "cpu"
    )
    assert (first + num_seen).item() == LENGTH and num_seen.item() == WINDOW - (not widened)


@pytest.mark.parametrize("size", [None, -1])
def test_models_without_windows(size):
    backend = SimpleNamespace(sliding_window_size=size)
    whole_windows.widen(None, backend)
    assert backend.sliding_window_size == size
