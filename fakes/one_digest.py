"""A broken SHA-256: all data that begin with MARK have the same digest."""

import hashlib
import multiprocessing
import struct
import types

MARK = (300, 301)
_BEGINNING = struct.pack("<2i", *MARK)


def sha256(data=b""):
    """Replaces `hashlib.sha256`."""
    marked = bytes(memoryview(data).cast("B")[: len(_BEGINNING)]) == _BEGINNING
    return hashlib.sha256(_BEGINNING if marked else data)


def break_digests() -> None:
    """Break SHA-256 in this process, for chunks and for the text after them."""
    from sglang_lazy.core import keys, prompt

    keys.hashlib = prompt.hashlib = types.SimpleNamespace(sha256=sha256)


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    if multiprocessing.parent_process() is not None:
        break_digests()
