"""What the CUDA kernels take, and how their modules are built and loaded: by FlashInfer's JIT, with nvcc."""

import functools
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from sgl_kernel_lazy.layer import Layer

CSRC = Path(__file__).parent.parent / "csrc"
# Values of LAZY_DTYPE and LAZY_KV_FP8.
CTYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
KV_FP8 = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


def missing(device: torch.device) -> str | None:
    """What this machine lacks to build or run these modules, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "the kernels need a Hopper GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer, whose JIT builds the kernels, is not installed"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").exists():
        return "nvcc, which compiles the kernels, was not found"
    return None


def kernel_sinks(layer: Layer) -> torch.Tensor | None:
    """A layer's sinks in a type that its kernels read: that of its queries, or float32."""
    if layer.sinks is None or layer.sinks.dtype == layer.dtype:
        return layer.sinks
    return layer.sinks.to(torch.float32)


@functools.cache
def load_module(op: str, **macros: str | int) -> Any:
    """The module of csrc/<op>.cu, compiled for Hopper with these macros, each named LAZY_<NAME>."""
    from flashinfer.jit import env, gen_jit_spec
    from flashinfer.jit.core import sm90a_nvcc_flags

    spec = gen_jit_spec(
        "_".join(["lazy", op, *(str(value).strip("_") for value in macros.values())]),
        [CSRC / f"{op}.cu"],
        extra_cuda_cflags=[*sm90a_nvcc_flags, *(f"-DLAZY_{name.upper()}={value}" for name, value in macros.items())],
        extra_include_paths=[env.FLASHINFER_CSRC_DIR],
    )
    return spec.build_and_load()
