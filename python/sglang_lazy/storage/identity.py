"""Hashes of everything but tokens that the KV of a served model depends on, to name stored chunks."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size in bytes."""


def identity_of(facts: bytes, *parts: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """SHA-256 of `facts` and of weights with their names, whatever their order in each part.

    Weights are hashed through the sums of the bits of each row and each column. These are fast on the device and differ
    even if training has changed only the rows of a few tokens.
    """
    digest = hashlib.sha256(facts)
    for weights in parts:
        for name, weight in sorted(weights, key=lambda pair: pair[0]):
            bits = weight.detach().view(_BITS[weight.element_size()])
            sums = [bits.sum(dim, dtype=torch.int64) for dim in (-1, -2)] if bits.dim() > 1 else [bits]
            digest.update(name.encode() + b"".join([part.cpu().numpy().tobytes() for part in sums]))
    return digest.digest()


def config_facts(config: Mapping[str, Any]) -> bytes:
    """A model's configuration, wherever it lies and whoever has written it."""
    return json.dumps(
        {**config, "_name_or_path": None, "transformers_version": None}, sort_keys=True, default=str
    ).encode()


def joined(identities: Iterable[bytes]) -> bytes:
    """The identity of several that belong together; of one alone, its own."""
    first, *others = identities
    return hashlib.sha256(first + b"".join(others)).digest() if others else first
