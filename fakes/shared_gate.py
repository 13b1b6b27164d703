"""The gate of Qwen2-MoE's shared expert in PyTorch: off GPUs, Triton would interpret SGLang's kernel for each token."""

import torch


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """Add the shared expert's output, as far as the gate lets it through, to `out` in place.

    hidden, shared, out: [num_tokens, hidden_size].  gate: [hidden_size].
    """
    out += torch.sigmoid(hidden @ gate)[:, None] * shared


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.models import qwen2_moe

    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
