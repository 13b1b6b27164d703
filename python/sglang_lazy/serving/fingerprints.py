"""Fingerprints of chunks, which tell what two nearly equal texts differ in, and from which no text can be read."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_SECRET = os.urandom(32)
"""Nobody can look for a text by its hash."""
WINDOW, KEPT = 8, 12
"""Tokens of a window, and how many windows of a chunk are kept: those with the smallest hashes."""
_DIGITS = str.maketrans("123456789", "000000000")
_DATES = """january february march april may june july august september october november december
jan feb mar apr jun jul aug sep sept oct nov dec am pm
monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun"""
_WORDS_OF_DATES = frozenset(_DATES.split())
_BLANKS = {"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"}
"""Blanks in the vocabularies of byte-level and of SentencePiece's tokenizers."""


def _without_numbers(text: str) -> str:
    """Text in which each run of numbers, and of words of dates, is the same."""
    words = text.translate(_DIGITS).split()
    masked = ["0" if "0" in word or word.strip(".,;:()") in _WORDS_OF_DATES else word for word in words]
    return " ".join([word for word, before in zip(masked, ["", *masked], strict=False) if word != "0" or before != "0"])


NORMALIZATIONS: dict[str, Callable[[str], str]] = {
    "white space": str.strip,
    "spacing": lambda text: " ".join(text.split()),
    "case": str.casefold,
    "numbers": _without_numbers,
}
"""What texts may differ in, and what evens that out. Each takes what the one before it gives."""
ENDS = {(True, True): "inside", (False, True): "beginning", (True, False): "end", (False, False): "both ends"}
"""What texts with much in common differ in, by whether their first and last windows are equal."""


class Fingerprint(NamedTuple):
    """texts: hashes of the text after each of `NORMALIZATIONS`; empty if it has none.  windows: hashes of some windows
    of its tokens, ascending.  head, tail: hashes of its first and last window."""

    texts: tuple[int, ...]
    windows: tuple[int, ...]
    head: int
    tail: int

    @property
    def parts(self) -> tuple[int, ...]:
        """All by which others like it are found."""
        return self.texts + self.windows


class TokenTexts:
    """The texts of tokens, as far as fingerprints need them: bytes that are no ASCII stand for themselves."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, input_ids: Sequence[int]) -> str:
        """The text of tokens, up to an encoding."""
        known = self._known
        for token in set(input_ids) - known.keys():
            text = str(self.tokenizer.convert_ids_to_tokens(int(token)))
            if byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
                text = chr(int(byte[1], 16))
            known[token] = "".join([_BLANKS.get(character, character) for character in text])
        return "".join([known[token] for token in input_ids])


def fingerprint(tenant: Any, input_ids: Sequence[int], text: str | None) -> Fingerprint:
    """The fingerprint of a chunk, which equals no other tenant's.  text: None if there is none."""
    salt = hashlib.blake2b(repr(tenant).encode(), digest_size=16).digest()
    texts = []
    if text is not None:
        for name, even in NORMALIZATIONS.items():
            text = even(text)
            hashed = hashlib.blake2b(text.encode("utf-8", "replace"), key=_SECRET, salt=salt, person=name.encode())
            texts.append(int.from_bytes(hashed.digest()[:8]))
    hashes = _window_hashes(np.asarray(input_ids, np.uint64), np.frombuffer(salt, np.uint64)[0])
    few = min(4 * KEPT, len(hashes) - 1)
    smallest = np.unique(np.partition(hashes, few)[: few + 1])[:KEPT]
    return Fingerprint(tuple(texts), tuple(smallest.tolist()), int(hashes[0]), int(hashes[-1]))


_FACTORS = np.frombuffer(hashlib.blake2b(_SECRET, digest_size=8 * WINDOW).digest(), np.uint64) | 1


def _window_hashes(ids: np.ndarray, salt: Any) -> np.ndarray:
    """The hash of each window of tokens, uint64; of all tokens together if they are fewer.  ids: uint64."""
    ids = ids + np.uint64(1)
    if len(ids) < WINDOW:
        ids = np.concatenate([ids, np.zeros(WINDOW - len(ids), np.uint64)])
    size = len(ids) - WINDOW + 1
    mixed = np.full(size, salt)
    for place in range(WINDOW):
        mixed += ids[place : place + size] * _FACTORS[place]
    mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ mixed >> np.uint64(29)
