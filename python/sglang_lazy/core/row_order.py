"""The order of a request's tokens in its row of `req_to_token`.

The row of a linked request is a permutation of its prompt:

    | kept slices of chunks, in prompt order | cached text | text to compute | generated tokens |

Both text parts are in position order. From the prompt's length on, index and position are the same.
"""

import functools
import itertools
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from sglang_lazy.core.prompt import LinkedPrompt, tokens_at


class Row:
    """The order of a linked request's tokens in its row, fixed each time that it is scheduled.

    cached: per text span, how many of its first tokens are in the row's cached part.
    published: per text span, how many of its first tokens the tree owns; grows while the request runs.
    positions: int32 [prompt and earlier output], the position of each token of the row.
    """

    def __init__(self, prompt: LinkedPrompt, cached: list[int], num_tokens: int):
        self.prompt = prompt
        self.cached = cached
        self.published = list(cached)
        self.cached_start = []
        self.computed_start = []
        last, row_end = prompt.spans[-1], prompt.num_chunk_tokens
        self._moves_nothing = last is prompt.spans[0] and last.start == row_end  # all text follows all slices
        if self._moves_nothing:
            parts = [np.arange(row_end, dtype=np.int32)]
        else:
            parts = [chunk.positions for chunk in prompt.in_row]
        to_compute = []
        for span, count in zip(prompt.spans, cached, strict=True):
            positions = span.first(last.count_before(num_tokens)) if span is last else span.positions
            self.cached_start.append(row_end)
            parts.append(positions[:count])
            to_compute.append(positions[count:])
            row_end += count
        for rest in to_compute:
            self.computed_start.append(row_end)
            row_end += len(rest)
        assert row_end == num_tokens, (row_end, num_tokens)
        self._parts = parts + to_compute
        self.positions = np.concatenate(self._parts)

    def permuted(self, ids: array) -> array:
        """`ids`, one for each position, in row order. May return `ids` itself."""
        if self._moves_nothing:
            return ids
        in_order = array("q")
        for positions in self._parts:  # most are consecutive; gathering all at once costs several copies of the prompt
            in_order += tokens_at(ids, positions)
        return in_order

    @functools.cached_property
    def keeps_order(self) -> bool:
        """Whether each token has the same index in the row as in the prompt."""
        return bool((self.positions == np.arange(len(self.positions))).all())

    def available(self, i: int, row_len: int) -> int:
        """How many of span `i`'s first tokens are among the first `row_len` tokens of the row."""
        cached, start = self.cached[i], self.computed_start[i]
        if i == len(self.cached) - 1:
            return cached + max(0, row_len - start)
        return cached + min(max(0, row_len - start), self.computed_start[i + 1] - start)

    def positions_of(self, start: int, end: int) -> np.ndarray:
        """The positions of the row's tokens [start, end), including generated ones; int32 [end - start]."""
        known = self.positions[start:end]
        if len(known) == end - start:
            return known
        generated = np.arange(max(start, len(self.positions)), end, dtype=np.int32)
        return np.concatenate([known, generated])


class FillRow:
    """The order of a fill's tokens in its row: the cached beginnings of all parts, then the rest of each.

    The parts are the preamble, if there is one, and the chunks. Each chunk sees the preamble and itself.

    lens: the number of tokens of each part.
    cached, num_computed: per part, how many of its first tokens are cached, and how many tokens are not.
    """

    def __init__(self, lens: Sequence[int], cached: Sequence[int], has_preamble: bool):
        self.cached = cached
        self._lens, self.has_preamble = lens, has_preamble
        self._cached_start = [*itertools.accumulate(cached, initial=0)]
        self.num_computed = [length - count for length, count in zip(lens, cached, strict=True)]
        self._computed_start = [*itertools.accumulate(self.num_computed, initial=self._cached_start[-1])]

    @property
    def is_sequence(self) -> bool:
        """Whether each token of the row sees all tokens before it, as in an ordinary row."""
        if self.has_preamble:
            return len(self._lens) == 2 and (self.cached[0] == self._lens[0] or self.cached[1] == 0)
        return len(self._lens) == 1

    def permuted(self, ids: array) -> array:
        """`ids`, given part by part, in row order. May return `ids` itself."""
        if not any(self.cached[1:]):
            return ids
        view, start, beginnings, rest = memoryview(ids), 0, [], []
        for length, count in zip(self._lens, self.cached, strict=True):
            beginnings.append(view[start : start + count])
            rest.append(view[start + count : start + length])
            start += length
        return array("q", b"".join(beginnings + rest))

    def split(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """The slots of each part, in the part's order.  slots: int64, those of the row."""
        cached_end = self._cached_start[-1]
        computed = slots[cached_end:].split(self.num_computed)
        if not cached_end:
            return computed
        cached = slots[:cached_end].split(self.cached)
        return [torch.cat(pair) for pair in zip(cached, computed, strict=True)]

    def ranges(self, i: int, end: int | None = None) -> list[tuple[int, int]]:
        """The ranges of the row that hold part `i`, ascending, cut off at row index `end`."""
        computed_end = self._computed_start[i + 1] if end is None else min(self._computed_start[i + 1], end)
        ranges = [(self._cached_start[i], self._cached_start[i + 1]), (self._computed_start[i], computed_end)]
        return [(start, stop) for start, stop in ranges if start < stop]

    def parts(self, start: int, end: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """For each part with tokens to compute in [start, end) of the row: the row's ranges up to `end` that they see,
        and the number of these tokens."""
        for i, num_new, _ in self.computed(start, end):
            preamble = self.ranges(0) if self.has_preamble and i else []
            yield preamble + self.ranges(i, end), num_new

    def computed(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """The parts with tokens to compute in [start, end) of the row: the index of each, the number of these tokens,
        and whether others to compute come before them."""
        for i, (first, last) in enumerate(itertools.pairwise(self._computed_start)):
            num_new = min(last, end) - max(first, start)
            if num_new > 0:
                yield i, num_new, start > first
