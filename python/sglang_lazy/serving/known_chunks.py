"""The tokens of registered chunks, so that prompts may name a chunk by its id, even after its KV has been evicted."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import NO_LIMIT, ChunkLimit, Segment
from sglang_lazy.serving.chunk_lists import check_id
from sglang_lazy.serving.requests import check_cache_salt, is_batch

CAPACITY = 1 << 26
"""The number of tokens to remember, at 4 bytes each: 256 MiB."""
_ATTR = "_sglang_lazy_known_chunks"


class UnknownChunk(ValueError):
    """A prompt names a chunk that the server does not know: answered with a 404."""


class KnownChunks:
    """The tokens of the most recently registered or named chunks, up to `capacity` tokens, by tenant and digest."""

    def __init__(self, capacity: int = CAPACITY):
        self.capacity = capacity
        self._tokens: OrderedDict[tuple[str | None, str], array] = OrderedDict()
        self._digests: dict[tuple[str | None, str], set[str]] = {}
        self._num_tokens = 0
        self._lock = threading.Lock()  # long prompts are read in threads

    def add(self, tenant: str | None, tokens: Sequence[int]) -> None:
        """Remember a chunk. Raises ValueError if another text with the same SHA-256 is known."""
        digest = tokens_digest(tokens)
        key, packed = (tenant, digest.hex()), array("i", tokens)
        with self._lock:
            if self._tokens.get(key, packed) != packed:
                raise ValueError(f"chunk {chunk_id(digest)} is another text with the same SHA-256: send it by its text")
            if key not in self._tokens:
                self._tokens[key] = packed
                self._digests.setdefault((tenant, chunk_id(digest)), set()).add(digest.hex())
                self._num_tokens += len(tokens)
            self._tokens.move_to_end(key)
            while self._num_tokens > self.capacity:
                self._drop(next(iter(self._tokens)))

    def get(self, tenant: str | None, name: str) -> array:
        """The tokens (int32) of the chunk with this id, or with more digits of its digest.

        Raises UnknownChunk if the tenant has none, and ValueError if it has several.
        """
        with self._lock:
            found = self._find(tenant, name)
            if not found:
                raise UnknownChunk(f"chunk {name!r:.80} is unknown: register it, or send its text")
            if len(found) > 1:
                raise ValueError(f"chunk {name!r:.80} is ambiguous: give more digits of the digest")
            self._tokens.move_to_end((tenant, found[0]))
            return self._tokens[tenant, found[0]]

    def remove(self, tenant: str | None, name: str) -> bool:
        """Forget the chunk with this id, unless the id is ambiguous. Returns whether a chunk was forgotten."""
        with self._lock:
            found = self._find(tenant, name)
            if len(found) == 1:
                self._drop((tenant, found[0]))
        return len(found) == 1

    def _find(self, tenant: str | None, name: str) -> list[str]:
        return [digest for digest in self._digests.get((tenant, name[:16]), ()) if digest.startswith(name)]

    def _drop(self, key: tuple[str | None, str]) -> None:
        tenant, digest = key
        self._num_tokens -= len(self._tokens.pop(key))
        same = self._digests[tenant, digest[:16]]
        same.discard(digest)
        if not same:
            del self._digests[tenant, digest[:16]]


def known_chunks(tokenizer_manager: Any) -> KnownChunks:
    """The known chunks of `tokenizer_manager`."""
    return vars(tokenizer_manager).setdefault(_ATTR, KnownChunks())


def replace(tokenizer_manager: Any, known: Any) -> None:
    """Make `tokenizer_manager` use `known`, which stands for chunks known to another process."""
    setattr(tokenizer_manager, _ATTR, known)


def with_tokens(
    known: KnownChunks, segments: Any, tenant: Any, names: Sequence[str] = (), limit: ChunkLimit = NO_LIMIT
) -> Any:
    """A copy of `segments`, one prompt or a batch, in which a `Segment` replaces each chunk named by id.

    tenant: the salt, or one for each prompt of a batch.  names: what errors call each segment.
    limit: on the chunks of each prompt.
    Other malformed input is left as it is. Raises ValueError, naming the segment, for a malformed id, UnknownChunk for
    one that the tenant has not registered, and TooManyChunks.
    """
    if is_batch(segments):
        tenants = tenant if isinstance(tenant, list | tuple) else [tenant] * len(segments)
        pairs = zip(segments, tenants, strict=False)
        return [*(with_tokens(known, *pair, limit=limit) for pair in pairs), *segments[len(tenants) :]]
    if not isinstance(segments, list | tuple):
        return segments
    taken, num_chunks = [], 0
    for index, segment in enumerate(segments):
        if hasattr(segment, "to_segment"):
            segment = segment.to_segment()
        if isinstance(segment, Mapping) and segment.get("type") == "chunk":
            num_chunks += 1
            limit.check(num_chunks)
            if "id" in segment:
                where = names[index] if names else f"segments[{index}]"
                segment = Segment(True, input_ids=known.get(check_cache_salt(tenant), _name(segment, where)))
        taken.append(segment)
    return taken


def _name(segment: Mapping[str, Any], where: str) -> str:
    name = segment["id"]
    if not isinstance(name, str) or segment.keys() != {"type", "id"}:
        raise ValueError(f"{where}: the id of a chunk must be a string, and replaces text and input_ids")
    try:
        return check_id(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
