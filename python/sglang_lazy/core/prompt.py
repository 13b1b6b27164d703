"""A prompt as the cache sees it: slices of chunks, and spans of text with the namespaces of their KV."""

import dataclasses
import functools
import hashlib
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
"""From this many ranges on, one computation over all of them is faster than one for each."""


def positions_in(ranges: Ranges) -> np.ndarray:
    """The positions in `ranges`, ascending; int32."""
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

    items: SGLang's multimodal items, one for each image.
    ranges: the half-open range of each image's tokens in the prompt; ascending.
    digests: one for each image: different images at the same position have different KV.
    places: int64 [number of prompt tokens], each token's position on the first axis of M-RoPE. On every axis, an image
        spans fewer places than it has tokens.
    """

    items: Sequence[Any]
    ranges: Ranges
    digests: Sequence[bytes]
    places: np.ndarray


def _without(images: Images, input_ids: array) -> array:
    """The prompt with zeros for its images."""
    ids = input_ids[:]
    for first, last in images.ranges:
        ids[first:last] = array("q", bytes(8 * (last - first)))
    return ids


@dataclasses.dataclass(eq=False)
class ChunkSlice:
    """The part of a chunk that a prompt uses.

    key: the chunk's identity.
    index: its index among the chunks of the prompt's layout.
    prompt_ids: int64, the prompt that contains it.
    start: the position of its first token in the prompt.
    num_tokens: the length of the whole chunk, which is computed and cached.
    kept: ranges of its tokens, relative to `start`, whose cached KV the prompt uses; never empty.
    num_kept: the number of tokens in `kept`.  num_needed: how many of the chunk's first tokens must be resident.
    spread: the distance from the end of the first kept range to that of the needed part. Recomputed text may stand
        anywhere in between, so window KV is needed that much further back.
    preamble: int64, the tokens after which the chunk is computed.
    shift: its tokens' places on the axes of M-RoPE minus their positions; 0 without images.
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
        self.spread = self.num_needed - self.kept[0][1]

    @functools.cached_property
    def tokens(self) -> array:
        """All token ids of the chunk, int64. Copied on first use, since a hit by key does not need them."""
        return self.prompt_ids[self.start : self.start + self.num_tokens]

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """The indices of the kept tokens within the chunk, int32 [num_kept]."""
        return positions_in(self.kept)

    @property
    def holes(self) -> np.ndarray:
        """The indices of the tokens between the first and the last kept one that are not kept, int32."""
        first = self.kept[0][0]
        hidden = np.ones(self.num_needed - first, dtype=bool)
        hidden[self.indices - first] = False
        return (np.flatnonzero(hidden) + first).astype(np.int32)

    @property
    def positions(self) -> np.ndarray:
        """The kept tokens' positions in the prompt, int32 [num_kept]."""
        return positions_in([(self.start + begin, self.start + end) for begin, end in self.kept])

    @property
    def offset(self) -> int:
        """Its tokens' places in the prompt minus those that their keys are rotated for. Negative if the preamble is
        longer than what precedes the chunk."""
        return self.start + self.shift - len(self.preamble)


@dataclasses.dataclass(eq=False)
class TextSpan:
    """Text tokens that depend on the same slices of chunks and the same images.

    positions: int32, its tokens' positions in the prompt, ascending. Generated tokens belong to the last span.
    image_len: how many of its first tokens are those of an image.
    """

    namespace: Namespace
    positions: np.ndarray
    image_len: int = 0

    @property
    def start(self) -> int:
        return int(self.positions[0])

    @property
    def end(self) -> int:
        return int(self.positions[-1]) + 1

    def count_before(self, position: int) -> int:
        """How many of its tokens, including generated ones, precede `position`."""
        if position < self.end:
            return int(np.searchsorted(self.positions, position))
        return len(self.positions) + position - self.end

    def first(self, count: int) -> np.ndarray:
        """The positions of its first `count` tokens, including generated ones; int32 [count]."""
        if count <= len(self.positions):
            return self.positions[:count]
        num_generated = count - len(self.positions)
        return np.concatenate([self.positions, np.arange(self.end, self.end + num_generated, dtype=np.int32)])


class LinkedPrompt(NamedTuple):
    """The slices of chunks and the text spans of a prompt, each in position order; the last token is text.

    num_chunk_tokens: how many tokens of the slices are in the request's row.
    unkept: the chunks of which it keeps nothing, whole.
    cross: whether none are, because the model reads chunks by cross-attention; positions then count text only.
    """

    chunks: tuple[ChunkSlice, ...]
    spans: tuple[TextSpan, ...]
    num_chunk_tokens: int
    images: Images | None = None
    cross: bool = False
    unkept: tuple[ChunkSlice, ...] = ()

    @property
    def span_lens(self) -> list[int]:
        """How many tokens of the prompt are in each text span."""
        return [len(span.positions) for span in self.spans]

    @property
    def in_row(self) -> tuple[ChunkSlice, ...]:
        """The slices that are in the request's row."""
        return () if self.cross else self.chunks

    @property
    def num_leading_tokens(self) -> int:
        """How many text tokens precede the first slice."""
        return len(self.spans[0].positions) if self.spans[0].namespace.variant is None else 0

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
        """Cut `input_ids` (int64) into slices and spans. Raises ValueError for a token id below 0 or of at least 2**31.

        kept: per chunk of the layout, the ranges that the policy keeps. The last token of a prompt is never kept,
            since computing it gives the first token of the answer.
        preamble: int64, the tokens after which the chunks are computed.
        extra_key, adapter: as in `Namespace`.

        Each slice begins a new span: the tokens recomputed after the slice's first kept range, and the text up to the
        next slice. The span's namespace holds the SHA-256 of the path before it: every text token, every slice, and
        every chunk token that a slice depends on. So its KV is found exactly where it is valid. An image begins a span,
        too, and its digest joins the path, with zeros for its token ids, which are parts of a hash.
        """
        preamble = preamble or array("q")
        text = _without(images, input_ids) if images else input_ids
        path, ids = hashlib.sha256(), as_int32(text)
        variant = hashlib.sha256(as_int32(preamble)).digest() if preamble else None
        path.update(b"preamble %b" % (variant or b""))
        chunk_namespace = Namespace("chunk", extra_key, layout.cache_salt, variant, adapter)
        chunks: list[ChunkSlice] = []
        unkept: list[ChunkSlice] = []
        spans: list[TextSpan] = []
        all_images = [*zip(images.ranges, images.digests, strict=True)] if images else []
        holes = _NONE  # of the last slice
        position = 0

        def add_span(begin: int, end: int, before: np.ndarray, image_len: int) -> None:
            """Add the text in [begin, end), preceded by the recomputed tokens at positions `before`."""
            leads = not chunks and not image_len
            namespace = chunk_namespace.leading
            if not leads:
                namespace = namespace._replace(variant=path.digest())
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
            for (first, last), digest in all_images:
                if position <= first < end:
                    if begin < first or len(before):
                        add_span(begin, first, before, image_len)
                    path.update(b"image %d %b" % (last - first, digest))
                    begin, before, image_len = first, _NONE, last - first
            if begin < end or len(before):
                add_span(begin, end, before, image_len)

        for index, ((start, end), ranges) in enumerate(zip(layout.chunks, kept, strict=True)):
            if end == len(input_ids):
                limit = end - 1 - start
                ranges = [(first, min(last, limit)) for first, last in ranges if first < limit]
            key = chunk_key(ids[start:end], chunk_namespace)
            if not ranges:
                unkept.append(ChunkSlice(key, index, input_ids, start, end - start, ((0, end - start),), preamble))
                continue
            end_span(start + ranges[0][0])
            shift = int(images.places[start]) - start if images else 0
            chunk = ChunkSlice(key, index, input_ids, start, end - start, tuple(ranges), preamble, shift)
            chunks.append(chunk)
            # A kept token depends on all of the chunk before it.
            needed = ranges[-1][1]
            seen = key if needed == end - start else chunk_key(ids[start : start + needed], chunk_namespace)
            kept_ranges = b"".join([b"%d to %d, " % pair for pair in ranges])
            path.update(b"chunk %d: %b%b%b" % (len(ranges), kept_ranges, seen.tokens, seen.check))
            holes = _NONE if len(ranges) == 1 else chunk.holes + np.int32(start)
            position = start + needed
        end_span(len(input_ids))
        num_chunk_tokens = sum(chunk.num_kept for chunk in chunks)
        return cls(tuple(chunks), tuple(spans), num_chunk_tokens, images, unkept=tuple(unkept))

    @classmethod
    def build_cross(
        cls, input_ids: array, layout: PromptLayout, extra_key: str | None, adapter: str | None
    ) -> "tuple[LinkedPrompt, array]":
        """The prompt of a model that reads chunks by cross-attention, and the ids of its text (int64).

        Chunks are whole, and unordered to the model: they are sorted by key. The text is one span, keyed by the
        multiset of chunks. If there is no text, the prompt's last token becomes it. Arguments and errors as in `build`.
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
        return cls(tuple(chunks), (span,), num_chunk_tokens=0, cross=True), text
