"""The implementations to measure, with one interface: plan once per step, call once per layer."""

import importlib
from types import ModuleType
from typing import Any

import torch

import sgl_kernel_lazy
from benchmark.kernels.problem import Problem

IMPLEMENTATIONS = (*sgl_kernel_lazy.IMPLEMENTATIONS, "flashinfer")
# These synchronize with the device or copy from it in every call, which CUDA graphs cannot capture.
NOT_CAPTURABLE = ("torch",)
# These take a plan of the batch in link_extend, which is made on the host.
PLANNED_EXTEND = ("flashinfer",)


def implementation(name: str) -> ModuleType:
    """One of IMPLEMENTATIONS: `sgl_kernel_lazy`'s, or what they are compared with."""
    if name == "flashinfer":
        return importlib.import_module("benchmark.kernels.flashinfer")
    return sgl_kernel_lazy.get_implementation(name)


class Link:
    """An implementation on one problem."""

    rotated = True

    @staticmethod
    def refusal(name: str, problem: Problem) -> str | None:
        """Why an implementation does not take a problem, or None."""
        max_segments = problem.rows.max_segments
        return implementation(name).unsupported(problem.dims.device, problem.layers[0].kind, max_segments)

    def __init__(self, name: str, problem: Problem):
        self.name, self.problem = name, problem
        self.ops = implementation(name)
        self.graph = name not in NOT_CAPTURABLE and problem.dims.device.type == "cuda"
        # A step of the reference takes minutes on a GPU's shapes and tells nothing.
        self.stepped = self.graph or problem.dims.device.type == "cpu"
        dims = problem.dims
        self.options: dict[str, Any] = {}
        if problem.shape.op == "decode":
            self.sizes = dict(num_qo_heads=dims.num_qo_heads, num_kv_heads=dims.num_kv_heads, head_dim=dims.head_dim)
            self.options["workspace"] = self.ops.decode_workspace(
                max_bs=problem.bs, max_segments=problem.rows.max_segments, **self.sizes, device=dims.device
            )

    def plan(self) -> None:
        """Plan the batch, once before all layers."""
        if self.problem.shape.op == "decode":
            self.ops.plan_decode(self.options["workspace"], self.problem.rows, **self.sizes)
        elif self.name in PLANNED_EXTEND:
            self.options["plan"] = self.ops.plan_extend(self.problem.q, self.problem.caches[0][0], self.problem.rows)

    def call(self, i: int, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        problem = self.problem
        op = self.ops.link_decode if problem.shape.op == "decode" else self.ops.link_extend
        op(problem.q, problem.layers[i], problem.rows, out=out, lse=lse, **self.options)
