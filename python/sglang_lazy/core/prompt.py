"""A prompt as the cache sees it: slices of chunks, and spans of text with the namespaces of their KV."""

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from sglang_lazy.core.keys import ChunkKey, Namespace, as_int32
from sglang_lazy.core.segments import PromptLayout

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges, ascending and disjoint."""


@dataclasses.dataclass(eq=False)
class ChunkSlice:
    """What a prompt uses of a chunk.

    key: the chunk's identity.
    index: its place among the chunks of the prompt's layout.
    prompt_ids: int64, the prompt that contains it.
    start: the position of its first token there.
    num_tokens: its length: what is computed and kept in the cache.
    kept: ranges of its tokens, relative to `start`, whose cached KV the prompt uses; never empty.
    """

    key: ChunkKey
    index: int
    prompt_ids: array
    start: int
    num_tokens: int
    kept: tuple[tuple[int, int], ...]

    def __post_init__(self):
        self.num_kept = sum([end - begin for begin, end in self.kept])

    @functools.cached_property
    def tokens(self) -> array:
        """All token ids of the chunk, int64. Copied only for chunks that are computed or searched for."""
        return self.prompt_ids[self.start : self.start + self.num_tokens]

    @property
    def num_needed(self) -> int:
        """How many of its first tokens must be resident."""
        return self.kept[-1][1]

    @property
    def positions(self) -> list[tuple[int, int]]:
        """The ranges of the prompt that it stands for."""
        return [(self.start + begin, self.start + end) for begin, end in self.kept]


class TextSpan(NamedTuple):
    """Text between kept slices: positions [start, end). The last span of a prompt also takes the generated tokens.

    namespace: None for leading text, which shares the ordinary namespace of the request.
    """

    namespace: Namespace | None
    start: int
    end: int


class LinkedPrompt(NamedTuple):
    """The slices of chunks and the text spans of a prompt, each in position order; the last token is text.

    num_chunk_tokens: how many tokens the slices hold.
    """

    chunks: tuple[ChunkSlice, ...]
    spans: tuple[TextSpan, ...]
    num_chunk_tokens: int

    @classmethod
    def build(
        cls, input_ids: array, layout: PromptLayout, kept: Sequence[Ranges], extra_key: str | None
    ) -> "LinkedPrompt":
        """Cut `input_ids` (int64) by `layout`. Raises ValueError for a token id that is negative or at least 2**31.

        kept: per chunk of the layout, what a policy keeps of it. The last token of a prompt is never kept, since the
        pass that computes it gives the first token of the answer.

        Text behind a chunk is keyed by the SHA-256 of the path before it: every text token, every slice, and every
        chunk token that a slice depends on. So its KV is found again exactly where it is valid.
        """
        tenant = (extra_key, layout.cache_salt)
        chunk_namespace = Namespace("chunk", *tenant)
        path, ids = hashlib.sha256(), as_int32(input_ids)
        chunks: list[ChunkSlice] = []
        spans: list[TextSpan] = []
        position = 0

        def add_text(end: int) -> None:
            nonlocal position
            if position < end:
                namespace = Namespace("text", *tenant, path.digest()) if chunks else None
                spans.append(TextSpan(namespace, position, end))
                path.update(b"text %d " % (end - position))
                path.update(ids[position:end])
                position = end

        for index, ((start, end), ranges) in enumerate(zip(layout.chunks, kept, strict=True)):
            if end == len(input_ids):
                limit = end - 1 - start
                ranges = [(first, min(last, limit)) for first, last in ranges if first < limit]
            if not ranges:
                continue
            digest = hashlib.sha256(ids[start:end]).digest()
            chunk = ChunkSlice(ChunkKey(digest, chunk_namespace), index, input_ids, start, end - start, tuple(ranges))
            for first, last in ranges:
                add_text(start + first)
                # A kept token depends on all of the chunk before it.
                seen = digest if last == end - start else hashlib.sha256(ids[start : start + last]).digest()
                path.update(b"chunk %d %d %b" % (first, last, seen))
                if not (chunks and chunks[-1] is chunk):
                    chunks.append(chunk)
                position = start + last
        add_text(len(input_ids))
        return cls(tuple(chunks), tuple(spans), sum(chunk.num_kept for chunk in chunks))
