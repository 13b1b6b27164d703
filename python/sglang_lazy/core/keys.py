"""Chunk identity: a digest of the token ids, and the short name that results show."""

import hashlib
from collections.abc import Sequence

import numpy as np


def tokens_digest(input_ids: Sequence[int]) -> bytes:
    """SHA-256 of the token ids as little-endian int32. Raises ValueError for an id below 0 or above 2^31 - 1."""
    wide = np.asarray(input_ids, dtype=np.int64)
    if np.bitwise_or.reduce(wide, initial=0) >> 31:
        bad = next(token for token in wide.tolist() if not 0 <= token < 1 << 31)
        raise ValueError(f"token id {bad} does not fit into 31 bits")
    return hashlib.sha256(wide.astype("<i4").tobytes()).digest()


def chunk_id(digest: bytes) -> str:
    """A chunk's name in results: the first 16 hex digits of its `tokens_digest`."""
    return digest[:8].hex()
