"""A prompt as the cache sees it: slices of chunks, and spans of text with the namespaces of their KV."""

import dataclasses
import functools
import hashlib
import itertools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_lazy.core.keys import ChunkKey, Namespace, as_int32, chunk_key
from sglang_lazy.core.segments import PromptLayout

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges, ascending and disjoint."""

_NONE = np.empty(0, dtype=np.int32)
_MANY_RANGES = 64
"""From so many on, one computation over all of them is faster than one for each."""


def positions_in(ranges: Ranges) -> np.ndarray:
    """The positions that `ranges` hold, in order; int32."""
    if len(ranges) == 1:
        return np.arange(*ranges[0], dtype=np.int32)
    if len(ranges) < _MANY_RANGES:
        return np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in ranges])
    starts, ends = np.array(ranges, dtype=np.int32).reshape(-1, 2).T
    lens = ends - starts
    return np.repeat(ends - lens.cumsum(dtype=np.int32), lens) + np.arange(lens.sum(), dtype=np.int32)


def tokens_at(ids: array, positions: np.ndarray) -> array:
    """Those of `ids`, int64, at ascending `positions`."""
    if not len(positions):
        return array("q")
    start, end = int(positions[0]), int(positions[-1]) + 1
    if end - start == len(positions):
        return ids[start:end]
    return array("q", np.frombuffer(ids, dtype=np.int64)[positions].tobytes())


class Images(NamedTuple):
    """The images of a prompt, all of them in its text.

    items: what SGLang has of each.
    ranges: of each the half-open range of its tokens in the prompt; ascending.
    digests: of each, what tells its KV from that of others at the same place.
    places: int64 [number of prompt tokens], of each token on the first axis of M-RoPE. On all axes, an image takes up
        fewer places than it has tokens.
    """

    items: Sequence[Any]
    ranges: Ranges
    digests: Sequence[bytes]
    places: np.ndarray


@dataclasses.dataclass(eq=False)
class ChunkSlice:
    """What a prompt uses of a chunk.

    key: the chunk's identity.
    index: its place among the chunks of the prompt's layout.
    prompt_ids: int64, the prompt that contains it.
    start: the position of its first token there.
    num_tokens: its length: what is computed and kept in the cache.
    kept: ranges of its tokens, relative to `start`, whose cached KV the prompt uses; never empty.
    num_kept: how many tokens these have.  num_needed: how many of its first tokens must be resident for them.
    preamble: int64, the tokens behind which the chunk is computed.
    shift: by how much the places of its tokens, on all axes of M-RoPE, exceed their positions; 0 without images.
    """

    key: ChunkKey
    index: int
    prompt_ids: array
    start: int
    num_tokens: int
    kept: tuple[tuple[int, int], ...]
    preamble: array = dataclasses.field(default_factory=lambda: array("q"))
    shift: int = 0

    def __post_init__(self):
        self.num_kept = sum([end - begin for begin, end in self.kept])
        self.num_needed = self.kept[-1][1]

    @functools.cached_property
    def tokens(self) -> array:
        """All token ids of the chunk, int64. Copied only for chunks that are computed or searched for."""
        return self.prompt_ids[self.start : self.start + self.num_tokens]

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """Which of its tokens are kept, int32 [num_kept]."""
        return positions_in(self.kept)

    @property
    def spread(self) -> int:
        """How many tokens before the end of its needed part text begins to look back on it."""
        return self.num_needed - self.kept[0][1]

    @property
    def holes(self) -> np.ndarray:
        """Which tokens between those are not, int32."""
        first = self.kept[0][0]
        hidden = np.ones(self.num_needed - first, dtype=bool)
        hidden[self.indices - first] = False
        return (np.flatnonzero(hidden) + first).astype(np.int32)

    @property
    def positions(self) -> np.ndarray:
        """The positions of the prompt that it stands for, int32 [num_kept]."""
        return positions_in([(self.start + begin, self.start + end) for begin, end in self.kept])

    @property
    def offset(self) -> int:
        """By how much its tokens' places exceed those their keys are stored at; negative behind a long preamble."""
        return self.start + self.shift - len(self.preamble)


@dataclasses.dataclass(frozen=True, eq=False)
class TextSpan:
    """Text that depends on the same slices of chunks and the same images.

    namespace: None for leading text, which shares the ordinary namespace of the request.
    positions: int32, of its tokens in the prompt, ascending. The tokens generated behind a prompt are text of its last
        span.
    image_len: how many of them, the first ones, are those of an image.
    """

    namespace: Namespace | None
    positions: np.ndarray
    image_len: int = 0

    @property
    def start(self) -> int:
        return int(self.positions[0])

    @property
    def end(self) -> int:
        return int(self.positions[-1]) + 1

    def namespace_in(self, extra_key: str | None) -> Namespace | str | None:
        """Its own, or that of leading text in a request with this key."""
        return extra_key if self.namespace is None else self.namespace

    def count_before(self, position: int) -> int:
        """How many of its tokens, generated ones included, stand before `position`."""
        if position < self.end:
            return int(np.searchsorted(self.positions, position))
        return len(self.positions) + position - self.end

    def first(self, count: int) -> np.ndarray:
        """The positions of its first `count` tokens, generated ones included; int32 [count]."""
        if count <= len(self.positions):
            return self.positions[:count]
        num_generated = count - len(self.positions)
        return np.concatenate([self.positions, np.arange(self.end, self.end + num_generated, dtype=np.int32)])


class LinkedPrompt(NamedTuple):
    """The slices of chunks and the text spans of a prompt, each in position order; the last token is text.

    num_chunk_tokens: how many tokens of the slices stand in the request's row.
    beside: whether none do, because the model reads chunks beside the text; positions are then those of the text.
    """

    chunks: tuple[ChunkSlice, ...]
    spans: tuple[TextSpan, ...]
    num_chunk_tokens: int
    images: Images | None = None
    beside: bool = False

    @property
    def in_row(self) -> tuple[ChunkSlice, ...]:
        """The slices that stand in the request's row."""
        return () if self.beside else self.chunks

    @property
    def num_leading_tokens(self) -> int:
        """How much text stands before its first slice."""
        return len(self.spans[0].positions) if self.spans[0].namespace is None else 0

    @classmethod
    def build(
        cls,
        input_ids: array,
        layout: PromptLayout,
        kept: Sequence[Ranges],
        extra_key: str | None,
        preamble: array | None = None,
        adapter: str | None = None,
        images: Images | None = None,
    ) -> "LinkedPrompt":
        """Cut `input_ids` (int64) by `layout`. Raises ValueError for a token id that is negative or at least 2**31.

        kept: per chunk of the layout, what a policy keeps of it. The last token of a prompt is never kept, since the
        pass that computes it gives the first token of the answer.
        preamble: int64, what the chunks are computed behind.
        extra_key, adapter: as in `Namespace`.

        Each slice begins a new span, which holds the tokens recomputed behind the slice's first kept range and the text
        up to the next slice. It is keyed by the SHA-256 of the path before it: every text token, every slice, and every
        chunk token that a slice depends on. So its KV is found again exactly where it is valid. An image
        begins a span, too: its token ids are 30 bits of a hash, so its digest joins the path.
        """
        preamble = preamble or array("q")
        path, ids = hashlib.sha256(), as_int32(input_ids)
        variant = hashlib.sha256(as_int32(preamble)).digest() if preamble else None
        path.update(b"preamble %b" % (variant or b""))
        chunk_namespace = Namespace("chunk", extra_key, layout.cache_salt, variant, adapter)
        chunks: list[ChunkSlice] = []
        spans: list[TextSpan] = []
        holes = _NONE  # of the last slice
        position = 0

        def add_span(begin: int, end: int, before: np.ndarray, image_len: int = 0) -> None:
            """Add the text in [begin, end), and what is recomputed before that."""
            if begin == end and not len(before):
                return
            own = Namespace("text", extra_key, layout.cache_salt, path.digest(), adapter)
            namespace = own if chunks or image_len else None
            positions = np.arange(begin, end, dtype=np.int32)
            if len(before):
                positions = np.concatenate([before, positions])
            spans.append(TextSpan(namespace, positions, image_len))
            path.update(b"text %d " % len(positions))
            if len(before):
                path.update(np.asarray(ids)[before].data)
            path.update(ids[begin:end])

        def end_span(end: int) -> None:
            begin, before, image_len = position, holes, 0
            for (first, last), digest in zip(images.ranges, images.digests, strict=True) if images else ():
                if position <= first < end:
                    add_span(begin, first, before, image_len)
                    path.update(b"image %d %b" % (last - first, digest))
                    begin, before, image_len = first, _NONE, last - first
            add_span(begin, end, before, image_len)

        for index, ((start, end), ranges) in enumerate(zip(layout.chunks, kept, strict=True)):
            if end == len(input_ids):
                limit = end - 1 - start
                ranges = [(first, min(last, limit)) for first, last in ranges if first < limit]
            if not ranges:
                continue
            end_span(start + ranges[0][0])
            key = chunk_key(ids[start:end], chunk_namespace)
            shift = int(images.places[start]) - start if images else 0
            chunk = ChunkSlice(key, index, input_ids, start, end - start, tuple(ranges), preamble, shift)
            chunks.append(chunk)
            # A kept token depends on all of the chunk before it.
            needed = ranges[-1][1]
            seen = key if needed == end - start else chunk_key(ids[start : start + needed], chunk_namespace)
            kept_ranges = array("i", itertools.chain.from_iterable(ranges)).tobytes()
            path.update(b"chunk %d %b %b%b" % (len(ranges), kept_ranges, seen.tokens, seen.check))
            holes = _NONE if len(ranges) == 1 else chunk.holes + np.int32(start)
            position = start + needed
        end_span(len(input_ids))
        return cls(tuple(chunks), tuple(spans), sum(chunk.num_kept for chunk in chunks), images)

    @classmethod
    def build_beside(
        cls, input_ids: array, layout: PromptLayout, extra_key: str | None, adapter: str | None = None
    ) -> "tuple[LinkedPrompt, array]":
        """The prompt of a model that reads chunks beside the text, in no order; and the ids of its text alone (int64).

        Chunks are whole, and sorted by their keys. The text is one span, keyed by the multiset of chunks. A prompt
        without text has its last token as such, too, for the answer to follow. Arguments and errors: `build`.
        """
        ids, chunks, text, position = np.asarray(as_int32(input_ids)), [], array("q"), 0
        text_namespace = Namespace("text", extra_key, layout.cache_salt, adapter=adapter)
        namespace = Namespace("whole", text_namespace.own_key, layout.cache_salt)  # the encoder takes no adapters
        for index, (start, end) in enumerate(layout.chunks):
            own = ids[start:end].data
            key = chunk_key(own, namespace._replace(variant=hashlib.sha256(own).digest()))
            chunks.append(ChunkSlice(key, index, input_ids, start, end - start, ((0, end - start),)))
            text += input_ids[position:start]
            position = end
        text += input_ids[position:]
        chunks.sort(key=lambda chunk: (chunk.key.tokens, chunk.key.check))
        path = hashlib.sha256(b"chunks beside %d " % len(chunks))
        for chunk in chunks:
            path.update(chunk.key.tokens + chunk.key.check)
        text = text or input_ids[-1:]
        span = TextSpan(text_namespace._replace(variant=path.digest()), np.arange(len(text), dtype=np.int32))
        return cls(tuple(chunks), (span,), num_chunk_tokens=0, beside=True), text
