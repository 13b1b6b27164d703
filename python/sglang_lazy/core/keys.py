"""Cache keys: the identity of the KV of chunks and of the text after them."""

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeGuard

import numpy as np
import xxhash


class Namespace(NamedTuple):
    """A part of the radix tree whose KV was computed under the same conditions. A tuple, which no client can forge.

    kind: "chunk"; "whole" for a chunk all of whose tokens see one another; "text" for other text of prompts with any.
    extra_key: that of SGLang's request: its client's own key, and the id of its LoRA adapter.
    cache_salt: the tenant's private namespace, None for the shared one.
    variant: what else the KV depends on. For text, the digest of the path before it, None for leading text. For a
        chunk, the digest of its preamble, None without one. For a whole chunk, its own digest: it shares its beginning
        with no other.
    adapter: the id of the LoRA adapter, new with each load; None for the base model.
    """

    kind: str
    extra_key: str | None
    cache_salt: str | None
    variant: Hashable = None
    adapter: str | None = None

    @property
    def is_chunk(self) -> bool:
        return self.kind != "text"

    @property
    def has_preamble(self) -> bool:
        return self.kind == "chunk" and self.variant is not None

    @property
    def leading(self) -> "Namespace":
        """That of text before all chunks, under the same conditions."""
        return Namespace("text", self.extra_key, self.cache_salt, None, self.adapter)

    @property
    def own_key(self) -> str | None:
        """The client's own key, None without one."""
        return (self.extra_key or "").removesuffix(self.adapter or "") or None


def of_chunks(extra_key: object) -> TypeGuard[Namespace]:
    """Whether this `extra_key` of a node is a namespace of chunks; SGLang's own namespaces are no `Namespace`."""
    return isinstance(extra_key, Namespace) and extra_key.is_chunk


class ChunkKey(NamedTuple):
    """The identity of a chunk's KV.

    tokens: SHA-256, see `tokens_digest`.
    check: XXH3 of the same bytes, in case two texts collide in SHA-256.
    """

    tokens: bytes
    namespace: Namespace
    check: bytes

    @property
    def most_states(self) -> int:
        """How many states of recurrent layers a fill of this chunk reserves for it at most: also its preamble's."""
        return 1 + self.namespace.has_preamble


def as_int32(input_ids: Sequence[int]) -> memoryview:
    """Token ids as little-endian int32, for hashing. Raises ValueError for an id below 0 or of at least 2**31."""
    ids = input_ids if isinstance(input_ids, array) else array("q", input_ids)
    wide = np.frombuffer(ids, dtype=ids.typecode)
    if np.bitwise_or.reduce(wide) >> 31:
        bad = next(token for token in wide.tolist() if not 0 <= token < 1 << 31)
        raise ValueError(f"token id {bad} is outside the vocabulary")
    return wide.astype("<i4").data


def tokens_digest(input_ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids as little-endian int32."""
    return hashlib.sha256(as_int32(input_ids)).digest()


def digests(input_ids: Sequence[int], ranges: Iterable[tuple[int, int]]) -> list[bytes]:
    """The `tokens_digest` of each of these half-open ranges of a prompt."""
    ids = as_int32(input_ids)
    return [hashlib.sha256(ids[start:end]).digest() for start, end in ranges]


def chunk_key(ids: memoryview, namespace: Namespace) -> ChunkKey:
    """The key of a chunk with these token ids, as `as_int32` gives them."""
    return ChunkKey(hashlib.sha256(ids).digest(), namespace, xxhash.xxh3_128_digest(ids))


def chunk_id(digest: bytes) -> str:
    """The first 16 hexadecimal digits of a chunk's `tokens_digest`."""
    return digest.hex()[:16]
