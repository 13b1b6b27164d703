"""The tokens of registered chunks, so that prompts may name a chunk by its id, even after its KV has been evicted."""

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_lazy.chunks.catalog import MIN_DIGITS
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.labels import LABEL_KEYS, Label, parse_label
from sglang_lazy.core.remembered import Remembered
from sglang_lazy.core.segments import NO_LIMIT, ChunkLimit, Segment
from sglang_lazy.serving.chunk_lists import check_id
from sglang_lazy.serving.prompts import is_batch
from sglang_lazy.serving.salts import check_cache_salt

CAPACITY = 1 << 28
"""The bytes that the tokens of known chunks may take, at 4 for each token and half a kilobyte for each chunk."""


class UnknownChunk(ValueError):
    """A prompt names a chunk that the server does not know: answered with a 404."""


class KnownChunks:
    """The tokens of the most recently registered or named chunks, by tenant and id, in `capacity` bytes.

    Thread-safe.
    """

    def __init__(self, capacity: int = CAPACITY):
        # Each with its digest. Several chunks have one id only if someone has searched for such texts.
        self._chunks = Remembered[tuple[str | None, str], tuple[tuple[bytes, array], ...]](capacity)
        self._lock = threading.Lock()  # a chunk is added to those that are alike

    def add(self, tenant: str | None, tokens: Sequence[int]) -> None:
        """Remember a chunk. Raises ValueError if another text with the same SHA-256 is known."""
        digest, packed = tokens_digest(tokens), array("i", tokens)
        key = tenant, chunk_id(digest)
        with self._lock:
            alike = self._chunks.get(key) or ()
            if dict(alike).get(digest, packed) != packed:
                raise ValueError(f"chunk {key[1]} is another text with the same SHA-256: send it by its text")
            if digest not in dict(alike):
                self._chunks.put(key, (*alike, (digest, packed)))

    def add_all(self, tenant: str | None, chunks: Iterable[Sequence[int]]) -> None:
        """`add` for several chunks."""
        for tokens in chunks:
            self.add(tenant, tokens)

    def get(self, tenant: str | None, name: str) -> array:
        """The tokens (int32) of the chunk with this id, or with more digits of its digest.

        Raises UnknownChunk if the tenant has none, and ValueError if it has several.
        """
        with self._lock:
            found = [tokens for digest, tokens in self._alike(tenant, name) if digest.hex().startswith(name)]
        if not found:
            raise UnknownChunk(f"chunk {name!r:.80} is unknown: register it, or send its text")
        if len(found) > 1:
            raise ValueError(f"chunk {name!r:.80} is ambiguous: give more digits of the digest")
        return found[0]

    def remove(self, tenant: str | None, name: str) -> bool:
        """Forget the chunk with this id, unless the id is ambiguous. Returns whether a chunk was forgotten."""
        with self._lock:
            alike = self._alike(tenant, name)
            rest = tuple([chunk for chunk in alike if not chunk[0].hex().startswith(name)])
            if len(alike) - len(rest) != 1:
                return False
            self._chunks.pop((tenant, name[:MIN_DIGITS]))
            if rest:
                self._chunks.put((tenant, name[:MIN_DIGITS]), rest)
        return True

    def _alike(self, tenant: str | None, name: str) -> tuple[tuple[bytes, array], ...]:
        return self._chunks.get((tenant, name[:MIN_DIGITS])) or ()


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
                name, label = _name(segment, where)
                segment = Segment(True, input_ids=known.get(check_cache_salt(tenant), name), label=label)
        taken.append(segment)
    return taken


def _name(segment: Mapping[str, Any], where: str) -> tuple[str, Label | None]:
    name = segment["id"]
    if not isinstance(name, str) or segment.keys() - LABEL_KEYS != {"type", "id"}:
        raise ValueError(f"{where}: the id of a chunk must be a string, and replaces text and input_ids")
    try:
        return check_id(name), parse_label(segment.get("name"), segment.get("metadata"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
