"""The choices of policies for recent prompts, so that a prompt that continues one keeps the same tokens."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sglang_lazy.core.keys import as_int32, tokens_digest
from sglang_lazy.core.prompt import Ranges

CAPACITY = 4096


class _Choice(NamedTuple):
    """What was chosen for one prompt.

    prompt: digest of the whole prompt, `prompt_len` tokens.
    kept: per chunk, the kept ranges, int32 [n, 2]: a chunk may have hundreds, and tuples take ten times the memory.
    """

    prompt_len: int
    prompt: bytes
    kept: tuple[np.ndarray, ...]


class Choices:
    """The most recent choices, by the prompt up to the end of its last chunk.

    In the next turn of a conversation, the policy would choose other tokens for the new question, and none of the
    conversation's text would be found in the cache. So the first choice stays.
    """

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        self._choices: OrderedDict[Hashable, _Choice] = OrderedDict()

    def remember(self, who: Hashable, ids: array, chunks: Sequence[tuple[int, int]], kept: Sequence[Ranges]) -> None:
        """Remember that `kept` was chosen for the prompt `ids` (int64).  who: the policy and the tenant."""
        *_, key = _keys(who, ids, chunks)
        arrays = tuple([np.array(ranges, dtype=np.int32).reshape(-1, 2) for ranges in kept])
        self._choices[key] = _Choice(len(ids), tokens_digest(ids), arrays)
        self._choices.move_to_end(key)
        if len(self._choices) > self._capacity:
            self._choices.popitem(last=False)

    def recall(self, who: Hashable, ids: array, chunks: Sequence[tuple[int, int]]) -> tuple[Ranges, ...]:
        """The choice for the longest remembered prompt that `ids` begins with, for as many chunks as that has."""
        for key in reversed([*_keys(who, ids, chunks)]):
            choice = self._choices.get(key)
            if choice is not None and choice.prompt == tokens_digest(ids[: choice.prompt_len]):
                self._choices.move_to_end(key)
                return tuple([tuple(map(tuple, ranges.tolist())) for ranges in choice.kept])
        return ()


def _keys(who: Hashable, ids: array, chunks: Sequence[tuple[int, int]]) -> Iterator[Hashable]:
    """For each chunk, the key of the prompt up to its end."""
    digest, view, position = hashlib.sha256(), as_int32(ids), 0
    for i, (_, end) in enumerate(chunks, 1):
        digest.update(view[position:end])
        position = end
        yield who, tuple(chunks[:i]), digest.digest()
