"""What the KV of a served model depends on besides tokens, as a name for stored chunks."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def identity_of(runner: Any, adapter: str | None) -> bytes | None:
    """SHA-256 for the model of a `ModelRunner`, or for the LoRA adapter with this id; None if that is not loaded."""
    if adapter is None:
        return model_identity(runner)
    loaded = runner.lora_manager.loras.get(adapter)
    return None if loaded is None else adapter_identity(loaded)


def model_identity(runner: Any) -> bytes:
    """SHA-256 of what the KV of a `ModelRunner` depends on besides tokens: its model, the type of its cache, and its
    part of the heads.

    Weights count by the sums of the bits in each row and each column. These are quick on the device, and differ even
    where training has changed no more than the rows of a few tokens.
    """
    config = {**runner.model_config.hf_config.to_dict(), "_name_or_path": None, "transformers_version": None}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr((str(runner.kv_cache_dtype), runner.ps.tp_rank, runner.ps.tp_size)).encode())
    _add_weights(digest, _weights(runner.model))
    return digest.digest()


def adapter_identity(loaded: Any) -> bytes:
    """SHA-256 of a `LoRAAdapter`: its weights, on the host, and what their product is multiplied by."""
    digest = hashlib.sha256(repr((loaded.config.r, loaded.scaling)).encode())
    for part in (*(layer.weights for layer in loaded.layers), loaded.embedding_layers):
        _add_weights(digest, part.items())
    return digest.digest()


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a model's layers compute with, by name."""
    for name, weight in model.named_parameters():
        name = name.replace(".base_layer.", ".")  # layers that take adapters have their parameters one module deeper
        yield name, weight
        # What bitsandbytes reads a weight with hangs on it, in parts where several weights have been put into one.
        for part, state in getattr(weight, "bnb_quant_state", {}).items():
            values = {"scale": state} if isinstance(state, torch.Tensor) else state.as_dict()
            for key, value in values.items():
                if isinstance(value, torch.Tensor | float):
                    yield f"{name}.{part}.{key}", torch.as_tensor(value)


def _add_weights(digest: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, weight in sorted(weights, key=lambda pair: pair[0]):
        bits = weight.detach().view(_BITS[weight.element_size()])
        sums = [bits.sum(dim, dtype=torch.int64) for dim in (-1, -2)] if bits.dim() > 1 else [bits]
        digest.update(name.encode() + b"".join([part.cpu().numpy().tobytes() for part in sums]))
