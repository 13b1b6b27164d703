"""Makes SGLang serve MXFP4 experts on a CPU. It has code for that, dequantised experts in PyTorch, but takes it only
with kernels for CPUs, which its wheels do not have."""


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS, mxfp4
    from triton_kernels.numerics_details import mxfp

    QUANTIZATION_METHODS["mxfp4"] = mxfp4.Mxfp4Config
    mxfp4._is_cpu = True
    mxfp.upcast_from_mxfp = mxfp.upcast_from_mxfp_torch
