"""Makes SGLang serve models with recurrent layers on a CPU, for which it has Triton kernels alone: each is replaced by
plain PyTorch. `ENVIRONMENT` is what such a server needs besides; the options `WITHOUT_OVERLAP` choose the way in which
SGLang schedules such models if not by default."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from fakes import recurrent_layers

ENVIRONMENT = {
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # of the inputs in states; by default bf16, whatever the model's
    "TORCHDYNAMO_DISABLE": "1",
}
WITHOUT_OVERLAP = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}

OPS = "sglang.kernels.ops"
MAMBA = "sglang.srt.layers.attention.mamba"
HOMES = {
    f"{OPS}.mamba.causal_conv1d_triton": ("causal_conv1d_fn", "causal_conv1d_update"),
    f"{MAMBA}.causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    f"{OPS}.attention.linear.fused_gdn_gating": ("fused_gdn_gating",),
    f"{OPS}.attention.fla.chunk": ("chunk_gated_delta_rule",),
    f"{OPS}.attention.fla.kda": ("chunk_kda",),
    f"{OPS}.attention.fla.fused_recurrent": (
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_recurrent_kda_packed_decode",
    ),
    f"{OPS}.attention.linear.fused_sigmoid_gating_recurrent": ("fused_sigmoid_gating_delta_rule_update",),
    f"{OPS}.mamba.mamba_state_scatter_triton": (
        "scatter_mamba_states_after_mtp_verify",
        "track_mamba_states_all_layers",
        "track_mamba_states_if_needed",
    ),
    f"{OPS}.attention.fla.layernorm_gated": ("layernorm_fn",),
    f"{OPS}.attention.fla.fused_norm_gate": ("rms_norm_gated",),
    f"{OPS}.attention.triton_gdn_fused_proj": (
        "fused_qkvzba_split_reshape_cat",
        "fused_qkvzba_split_reshape_cat_contiguous",
    ),
    f"{OPS}.elementwise.elementwise": ("fused_gate_sigmoid_mul", "fused_gate_sigmoid_mul_add", "fused_sigmoid_mul"),
    f"{OPS}.mamba.triton_ops": ("mamba_chunk_scan_combined", "selective_state_update"),
}
"""Where SGLang defines its kernels, and their names."""
USERS = (
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.layers.attention.linear.kernels.gdn_triton",
    "sglang.srt.layers.attention.linear.kernels.kda_triton",
    "sglang.srt.layers.attention.hybrid_linear_attn_backend",
    f"{MAMBA}.mamba",
)


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    for name in USERS:  # they import each other in circles, so the kernels' own modules do not come first
        importlib.import_module(name)
    for home, names in HOMES.items():
        for name in names:
            _replace(importlib.import_module(home), name, getattr(recurrent_layers, name))
    mamba_hook = importlib.import_module("sglang.srt.arg_groups.mamba_hook")
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # SGLang pins what it tracks in decode, on any device
    torch.cuda.current_device = lambda: "cpu"  # Qwen3-Next's norms are made there
    backends = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    absorbed = importlib.import_module("sglang.srt.models.deepseek_common.attention_forward_methods").AttnForwardMethod
    # The only way for which SGLang's attention on a CPU finds the keys that its pool holds.
    backends.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed.MLA)
    mixer = importlib.import_module(f"{MAMBA}.mamba")
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):  # it imports these on GPUs only
        for suffix in ("", "_triton"):
            setattr(mixer, name + suffix, getattr(recurrent_layers, name))


def _replace(home: ModuleType, name: str, new: Callable) -> None:
    """Replace home.name, and what other modules have already imported of it."""
    old = getattr(home, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("sglang.")]:
        for attribute in [key for key, value in vars(module).items() if value is old]:
            setattr(module, attribute, new)
