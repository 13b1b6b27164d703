"""Values that were used recently, within a number of bytes: what clients send must not make a process grow."""

import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY = 200
"""Bytes of an entry beside its key and value."""


def size_of(*parts: Any) -> int:
    """The bytes of objects and of those in their tuples, as if nothing else held them."""
    return sum([sys.getsizeof(part) + (size_of(*part) if isinstance(part, tuple) else 0) for part in parts])


def deep_size(value: Any) -> int:
    """The bytes of an object and of all that it holds, each counted once, except classes and functions."""
    num_bytes, left, seen = 0, [value], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen and not callable(one):
            seen.add(id(one))
            num_bytes += sys.getsizeof(one)
            left += gc.get_referents(one)
    return num_bytes


class Remembered(Generic[K, V]):
    """The values used last, by key, of `capacity` bytes at most. Thread-safe.

    size: returns the bytes of a key and its value; by default `size_of` both.
    num_bytes: held now.
    """

    def __init__(self, capacity: int, size: Callable[[K, V], int] = size_of):
        self.capacity, self.num_bytes = capacity, 0
        self._size, self._values = size, OrderedDict[K, tuple[V, int]]()  # with their sizes
        self._lock = threading.Lock()  # long prompts are read in threads

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which is used now; None if there is none."""
        with self._lock:
            if (found := self._values.get(key)) is None:
                return None
            self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V) -> None:
        """Remember a value, unless it is too large, instead of the key's former one; forget the least recently used."""
        size = ENTRY + self._size(key, value)
        with self._lock:
            self._pop(key)
            if size > self.capacity:
                return
            self._values[key] = value, size
            self.num_bytes += size
            while self.num_bytes > self.capacity:
                self._pop(next(iter(self._values)))

    def pop(self, key: K) -> V | None:
        """Forget a value, and return it; None if there is none."""
        with self._lock:
            return self._pop(key)

    def _pop(self, key: K) -> V | None:
        if (found := self._values.pop(key, None)) is None:
            return None
        self.num_bytes -= found[1]
        return found[0]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
            self.num_bytes = 0


class Field:
    """One field of records of responses, as a dictionary by response id."""

    def __init__(self, records: Remembered[str, Mapping[str, Any]], name: str):
        self._records, self._name = records, name

    def get(self, response_id: str, default: Any = None) -> Any:
        return (self._records.get(response_id) or {}).get(self._name, default)

    def __getitem__(self, response_id: str) -> Any:
        """Raises ValueError, answered with a 400, if it has been forgotten since the response was looked up, or was
        too large."""
        if (value := self.get(response_id)) is None:
            raise ValueError(f"{response_id} is no longer stored with its {self._name}: send the whole conversation")
        return value

    def __setitem__(self, response_id: str, value: Any) -> None:
        self._records.put(response_id, {**(self._records.get(response_id) or {}), self._name: value})
