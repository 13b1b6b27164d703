"""Running a model's first layers only: SGLang's models run a range of layers, which pipeline parallelism sets."""

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.lru_cache(maxsize=8)
def _ranged(model: torch.nn.Module) -> torch.nn.Module | None:
    """The part of `model` that runs layers `start_layer` to `end_layer`, or None."""
    return next((module for module in model.modules() if "end_layer" in vars(module)), None)


def exists(model: torch.nn.Module) -> bool:
    """Whether the model has such a range."""
    return _ranged(model) is not None


def is_cut(model: torch.nn.Module) -> bool:
    """Whether only the first layers are run now."""
    ranged = _ranged(model)
    return ranged is not None and ranged.end_layer < len(ranged.layers)


@contextlib.contextmanager
def first(model: torch.nn.Module, num_layers: int) -> Iterator[None]:
    """Within this, the model ends after its first `num_layers` layers; its norm and head follow as usual."""
    ranged = _ranged(model)
    assert ranged is not None
    end, ranged.end_layer = ranged.end_layer, min(num_layers, ranged.end_layer)
    try:
        yield
    finally:
        ranged.end_layer = end
