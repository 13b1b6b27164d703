"""Which implementation of the kernels serves each layer."""

import dataclasses
import logging
from collections.abc import Mapping

import torch

from sgl_kernel_lazy import get_implementation
from sgl_kernel_lazy.layer import LayerKind
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.model import AttentionLayer
from sglang_lazy.core.supported import Unfit

logger = logging.getLogger(__name__)


def choose_kernels(
    config: LazyConfig,
    layers: Mapping[int, AttentionLayer],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> dict[int, AttentionLayer]:
    """`layers`, each with its kernels: the configured implementation, or the fastest that supports it on this machine.

    dtype: of queries.  kv_dtype: of caches. Raises Unfit if the configured implementation does not support all layers,
    or none does.
    """

    def unfit(name: str, layer: AttentionLayer) -> str | None:
        return unfit_kernels(name, layer, device, dtype, kv_dtype, config.max_chunks)

    fastest = "cuda" if device.type == "cuda" else "torch"
    name = fastest if config.kernels == "auto" else config.kernels
    chosen, refused = {}, dict[str, list[int]]()
    for layer_id, layer in layers.items():
        if reason := unfit(name, layer):
            refused.setdefault(reason, []).append(layer_id)
        chosen[layer_id] = dataclasses.replace(layer, kernels=get_implementation("triton" if reason else name))
    if refused and config.kernels != "auto":
        raise Unfit([f"--lazy-kernels {name}: {reason}" for reason in refused])
    instead = [unfit("triton", layers[i]) for ids in refused.values() for i in ids]
    if reasons := dict.fromkeys(filter(None, instead)):
        raise Unfit([f"neither CUDA nor Triton kernels support this model: {reason}" for reason in reasons])
    for reason, ids in refused.items():
        of_which = f" in layers {', '.join(map(str, ids))}" if len(ids) < len(layers) else ""
        logger.info("sglang-lazy: triton kernels instead of the CUDA ones%s: %s", of_which, reason)
    return chosen


def unfit_kernels(
    name: str,
    layer: AttentionLayer,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_chunks: int,
) -> str | None:
    """Why this implementation cannot serve a layer of an otherwise supported model, or None."""
    kind = LayerKind(
        dtype,
        kv_dtype,
        layer.num_qo_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.rope.cos_sin_cache.shape[1],
        windowed=layer.window is not None,
        sinks=layer.sinks,
        capped=layer.logit_cap is not None,
    )
    return get_implementation(name).unsupported(device, kind, max_chunks)
