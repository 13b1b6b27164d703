"""A prompt as the cache sees it: chunks and text spans with their namespaces, and the row they make.

The row of a request in `req_to_token` is a permutation of its prompt: chunks in prompt order, then cached text in
position order, then the text to compute in position order. Generated tokens follow, so that an entry at or beyond the
prompt's length has its index as position.
"""

import dataclasses
import functools
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sglang_lazy.core.segments import PromptLayout

CHUNK_NAMESPACE = "chunk"
TEXT_NAMESPACE = "text"


@dataclasses.dataclass(eq=False)
class ChunkRef:
    """One use of a chunk in a prompt.

    namespace: key of the tree's namespace that holds it: a tuple, which no client can name.
    prompt_ids: int64, the prompt that it is cut from.
    start: the position of its first token there.
    num_tokens: how many it has in all: what is computed and kept.
    digest: SHA-256 of all its tokens.
    used: how many of its tokens the prompt takes from the cache: all, or all but the last where the chunk ends the
        prompt, because the last token of a prompt is contextual.
    """

    namespace: tuple
    prompt_ids: array
    start: int
    num_tokens: int
    digest: bytes
    used: int

    @functools.cached_property
    def tokens(self) -> array:
        """All its token ids, int64. Only what computes or keeps a chunk needs them: the others are spared the copy."""
        return self.prompt_ids[self.start : self.start + self.num_tokens]

    @property
    def key(self) -> tuple:
        """What makes two uses the same chunk."""
        return self.namespace, self.digest


class TextSpan(NamedTuple):
    """Text between chunks: positions [start, end); the last span of a prompt also takes the generated tokens.

    namespace: None for leading text, which shares the ordinary namespace of the request.
    """

    namespace: tuple | None
    start: int
    end: int


class LinkedPrompt(NamedTuple):
    """The chunks and text spans of a prompt, each in position order; the last token belongs to the last span.

    num_chunk_tokens: row entries that chunks take: the row's text starts there.
    """

    chunks: tuple[ChunkRef, ...]
    spans: tuple[TextSpan, ...]
    num_chunk_tokens: int

    @classmethod
    def build(cls, input_ids: array, layout: PromptLayout, extra_key: str | None) -> "LinkedPrompt":
        """Cut `input_ids` (int64) by `layout`. Raises ValueError for a token id that is negative or 2^31 and more.

        A text span after a chunk is keyed by the SHA-256 of the path before it: every text token and the SHA-256 of
        every chunk slice really used, so that its KV is found again exactly where it is valid.
        """
        tenant = (extra_key, layout.salt)
        chunk_namespace = (CHUNK_NAMESPACE, *tenant)
        path, ids = hashlib.sha256(), _narrowed(input_ids)
        chunks, spans = [], []
        position = 0

        def add_text(end: int) -> None:
            nonlocal position
            if position < end:
                namespace = (TEXT_NAMESPACE, *tenant, path.digest()) if chunks else None
                spans.append(TextSpan(namespace, position, end))
                path.update(b"text %d " % (end - position))
                path.update(ids[position:end])
                position = end

        for start, end in layout.chunks:
            add_text(start)
            used = min(end, len(input_ids) - 1) - start
            if used > 0:
                digest = used_digest = hashlib.sha256(ids[start : start + used]).digest()
                if start + used < end:
                    digest = hashlib.sha256(ids[start:end]).digest()
                chunks.append(ChunkRef(chunk_namespace, input_ids, start, end - start, digest, used))
                path.update(b"chunk %d %b" % (used, used_digest))
                position = start + used
        add_text(len(input_ids))
        return cls(tuple(chunks), tuple(spans), sum(chunk.used for chunk in chunks))


def _narrowed(ids: array) -> np.ndarray:
    """`ids` as int32: half as much to hash. Raises ValueError where they do not fit."""
    wide = np.frombuffer(ids, dtype=np.int64)
    if np.bitwise_or.reduce(wide) >> 31:
        bad = next(token for token in ids if not 0 <= token < 1 << 31)
        raise ValueError(f"token id {bad} is outside the vocabulary")
    return wide.astype(np.int32)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions in as few ranges as there can be, none of them empty."""
    joined = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined


class Row:
    """The order in which one scheduling of a request lays its prompt into `req_to_token`.

    cached: per text span, how many of its first tokens stand among the row's cached text.
    published: per text span, how many of its first tokens the tree owns; grows while the request runs.
    positions: int32 [prompt and earlier output], the position of each row entry.
    """

    def __init__(self, prompt: LinkedPrompt, cached: list[int], num_tokens: int):
        self.prompt = prompt
        self.cached = cached
        self.published = list(cached)
        self.cached_start = []
        self.computed_start = []
        ranges = [(chunk.start, chunk.start + chunk.used) for chunk in prompt.chunks]
        row_end = prompt.num_chunk_tokens
        for span, count in zip(prompt.spans, cached, strict=True):
            self.cached_start.append(row_end)
            ranges.append((span.start, span.start + count))
            row_end += count
        for i, (span, count) in enumerate(zip(prompt.spans, cached, strict=True)):
            end = num_tokens if i == len(prompt.spans) - 1 else span.end
            self.computed_start.append(row_end)
            ranges.append((span.start + count, end))
            row_end += end - span.start - count
        assert row_end == num_tokens, (row_end, num_tokens)
        self._ranges = _joined(ranges)
        positions = [np.arange(start, end, dtype=np.int32) for start, end in self._ranges]
        self.positions = positions[0] if len(positions) == 1 else np.concatenate(positions)

    def permuted(self, ids: array) -> array:
        """The tokens `ids`, by position, in the order of the row: `ids` itself if that is the same."""
        if len(self._ranges) == 1:
            return ids
        view = memoryview(ids)
        return array("q", b"".join([view[start:end] for start, end in self._ranges]))

    def available(self, i: int, row_len: int) -> int:
        """How many of the first tokens of span `i` stand in the first `row_len` entries of the row."""
        cached, start = self.cached[i], self.computed_start[i]
        if i == len(self.cached) - 1:
            return cached + max(0, row_len - start)
        return cached + min(max(0, row_len - start), self.computed_start[i + 1] - start)

    def positions_of(self, start: int, end: int) -> np.ndarray:
        """int32 [end - start]: positions of row entries [start, end), generated tokens included."""
        known = self.positions[start:end]
        if len(known) == end - start:
            return known
        generated = np.arange(max(start, len(self.positions)), end, dtype=np.int32)
        return np.concatenate([known, generated])


class FillRow:
    """The order in which a fill lays its chunks into `req_to_token`: the beginnings that are cached, then the rest.

    cached: per chunk, how many of its first tokens are cached.
    """

    def __init__(self, chunks: Sequence[ChunkRef], cached: Sequence[int]):
        self.cached = cached
        self._lens = [chunk.num_tokens for chunk in chunks]
        self._cached_start = [*itertools.accumulate(cached, initial=0)]
        computed = [length - count for length, count in zip(self._lens, cached, strict=True)]
        self._computed_start = [*itertools.accumulate(computed, initial=self._cached_start[-1])]

    def permuted(self, ids: array) -> array:
        """The tokens `ids`, chunk by chunk, in the order of the row: `ids` itself if that is the same."""
        if not any(self.cached[1:]):
            return ids
        view, start, beginnings, rest = memoryview(ids), 0, [], []
        for length, count in zip(self._lens, self.cached, strict=True):
            beginnings.append(view[start : start + count])
            rest.append(view[start + count : start + length])
            start += length
        return array("q", b"".join(beginnings + rest))

    def windows(self, i: int, end: int | None = None) -> list[tuple[int, int]]:
        """The ranges of the row that hold chunk `i`, in order, as far as it is in the first `end` entries."""
        computed_end = self._computed_start[i + 1] if end is None else min(self._computed_start[i + 1], end)
        ranges = [(self._cached_start[i], self._cached_start[i + 1]), (self._computed_start[i], computed_end)]
        return [(start, stop) for start, stop in ranges if start < stop]

    def parts(self, start: int, end: int) -> Iterator[tuple[list[tuple[int, int]], int, int]]:
        """Of each chunk with tokens to compute among entries [start, end): its windows until `end`, how many entries
        these hold, and how many of them are to be computed."""
        for i, (first, last) in enumerate(itertools.pairwise(self._computed_start)):
            num_new = min(last, end) - max(first, start)
            if num_new > 0:
                yield self.windows(i, end), self.cached[i] + min(last, end) - first, num_new
