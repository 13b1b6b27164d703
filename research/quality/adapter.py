"""A trainable LoRA adapter: low-rank products added to a model's projections, written in PEFT's format."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize

from oracle.adapters import MODULES, write_adapter

SCALE = 2
"""The factor of the product: alpha over the rank."""


class LowRank(nn.Module):
    """W + SCALE * B A, where A (initially random) and B (initially zero) are trained (LoRA, arXiv 2106.09685)."""

    def __init__(self, weight: torch.Tensor, rank: int):
        super().__init__()
        self.a, self.b = (
            nn.Parameter(weight.new_zeros(shape)) for shape in ((rank, weight.shape[1]), (len(weight), rank))
        )
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + SCALE * (self.b @ self.a)


def add_adapter(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Add an adapter to all projections of `model`, whose own weights are frozen; returns the adapter's parameters.

    Raises ValueError for a rank below 1 and if the model has no such layers.
    """
    if rank < 1:
        raise ValueError(f"the rank of an adapter must be at least 1, got {rank}")
    model.requires_grad_(False)
    layers = [one for name, one in model.named_modules() if name.rpartition(".")[2] in MODULES]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers named {', '.join(MODULES)}")
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adapted(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            yield name, module.parametrizations.weight[0]


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapter of `model` into a new folder."""
    weights = {name: (part.a.detach().cpu(), part.b.detach().cpu()) for name, part in _adapted(model)}
    rank = len(next(iter(weights.values()))[0])
    write_adapter(folder, weights, SCALE * rank)
