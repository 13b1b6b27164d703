"""The choices of policies for recent prompts, so that a prompt that continues one keeps the same tokens."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sglang_lazy.core.prompt import Ranges
from sglang_lazy.core.remembered import Remembered

CAPACITY = 1 << 25
"""The bytes that choices may take: 32 MiB."""


class _Choice(NamedTuple):
    """What was chosen for one prompt.

    prompt: digest of the whole prompt, `prompt_len` tokens.
    kept: per chunk, the kept ranges, int32 [n, 2]: a chunk may have hundreds, and tuples take ten times the memory.
    """

    prompt_len: int
    prompt: bytes
    kept: tuple[np.ndarray, ...]


class Choices:
    """The most recent choices, by the prompt up to the end of its last chunk, in `capacity` bytes.

    In the next turn of a conversation, the policy would choose other tokens for the new question, and none of the
    conversation's text would be found in the cache. So the first choice stays.
    """

    def __init__(self, capacity: int = CAPACITY):
        self._choices = Remembered[bytes, _Choice](capacity)

    def remember(self, who: tuple, ids: array, chunks: Sequence[tuple[int, int]], kept: Sequence[Ranges]) -> None:
        """Remember that `kept` was chosen for the prompt `ids` (int64).  who: the policy and the tenant, whose `repr`
        tells them apart."""
        *_, key = _keys(who, ids, chunks)
        self._choices.put(key, _Choice(len(ids), _digest(ids), tuple(map(_packed, kept))))

    def recall(self, who: tuple, ids: array, chunks: Sequence[tuple[int, int]]) -> tuple[Ranges, ...]:
        """The choice for the longest remembered prompt that `ids` begins with, for as many chunks as that has."""
        for key in reversed([*_keys(who, ids, chunks)]):
            choice = self._choices.get(key)
            if choice is not None and choice.prompt == _digest(ids[: choice.prompt_len]):
                return tuple([tuple(map(tuple, ranges.tolist())) for ranges in choice.kept])
        return ()


def _digest(ids: array) -> bytes:
    return hashlib.sha256(ids).digest()


def _packed(ranges: Ranges) -> np.ndarray:
    packed = np.empty((len(ranges), 2), dtype=np.int32)  # whose size Python sees, unlike that of a view
    if len(ranges):
        packed[:] = ranges
    return packed


def _keys(who: tuple, ids: array, chunks: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """For each chunk, the digest of the prompt up to its end, and of where its chunks are."""
    digest, view, position = hashlib.sha256(repr(who).encode()), memoryview(ids), 0
    for start, end in chunks:
        digest.update(b"|%d %d|" % (start, end))
        digest.update(view[position:end])
        position = end
        yield digest.digest()
