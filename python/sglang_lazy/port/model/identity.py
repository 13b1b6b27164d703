"""A hash of everything but tokens that the KV of a served model depends on, to name stored chunks."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from sglang_lazy.port.facts import tp_rank, tp_size
from sglang_lazy.recurrent.pool import StateLayout

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size in bytes."""


def identity_of(runners: Sequence[Any], adapter: str | None, states: StateLayout | None = None) -> bytes | None:
    """SHA-256 of the model of a `ModelRunner`, with that of the draft's if there is one, and with the layout of the
    states of recurrent layers if it has any; or of the LoRA adapter with this id; None if it is not loaded."""
    if adapter is None:
        first, *others = map(model_identity, runners)
        if states is not None:  # whose types depend on flags and on the environment
            others.append(repr(states).encode())
        return hashlib.sha256(first + b"".join(others)).digest() if others else first
    loaded = runners[0].lora_manager.loras.get(adapter)
    return None if loaded is None else adapter_identity(loaded)


def model_identity(runner: Any) -> bytes:
    """SHA-256 of a `ModelRunner`'s model, its KV cache dtype, and its part of the heads.

    Weights are hashed through the sums of the bits of each row and each column. These are fast on the device and differ
    even if training has changed only the rows of a few tokens.
    """
    config = {**runner.model_config.hf_config.to_dict(), "_name_or_path": None, "transformers_version": None}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr((str(runner.kv_cache_dtype), tp_rank(), tp_size())).encode())
    _add_weights(digest, _weights(runner.model))
    return digest.digest()


def adapter_identity(loaded: Any) -> bytes:
    """SHA-256 of a `LoRAAdapter`: its weights, on the host, its rank and its scaling."""
    digest = hashlib.sha256(repr((loaded.config.r, loaded.scaling)).encode())
    for part in (*(layer.weights for layer in loaded.layers), loaded.embedding_layers):
        _add_weights(digest, part.items())
    return digest.digest()


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a model's layers compute with, by name."""
    stored = model.state_dict().keys()  # other buffers are tables, computed from the config and the server's flags
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    for name, weight in itertools.chain(model.named_parameters(), buffers, _experts_of_methods(model)):
        name = name.replace(".base_layer.", ".")  # layers that take adapters have their parameters one module deeper
        yield name, weight
        # The quantization state of bitsandbytes is an attribute of the weight, in parts if several weights are fused.
        for part, state in getattr(weight, "bnb_quant_state", {}).items():
            values = {"scale": state} if isinstance(state, torch.Tensor) else state.as_dict()
            for key, value in values.items():
                if isinstance(value, torch.Tensor | float):
                    yield f"{name}.{part}.{key}", torch.as_tensor(value)


def _experts_of_methods(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of experts that are not parameters: those in MXFP4 belong to the method that computes with them, as
    tensors of `triton_kernels`."""
    for name, module in model.named_modules():
        for attribute in ("w13_weight_triton_tensor", "w2_weight_triton_tensor"):
            tensor = getattr(getattr(module, "quant_method", None), attribute, None)
            if tensor is not None:
                yield f"{name}.{attribute}", tensor.storage.data


def _add_weights(digest: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, weight in sorted(weights, key=lambda pair: pair[0]):
        bits = weight.detach().view(_BITS[weight.element_size()])
        sums = [bits.sum(dim, dtype=torch.int64) for dim in (-1, -2)] if bits.dim() > 1 else [bits]
        digest.update(name.encode() + b"".join([part.cpu().numpy().tobytes() for part in sums]))
