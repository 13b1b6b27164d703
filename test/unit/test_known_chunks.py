"""Chunks that prompts name by id: an id yields the right tokens or an error."""

from array import array
from types import SimpleNamespace

import pytest

from fakes import one_digest
from sglang_lazy import chunk
from sglang_lazy.core import keys
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import Segment
from sglang_lazy.serving import known_chunks
from sglang_lazy.serving.known_chunks import KnownChunks, UnknownChunk, with_tokens


def test_a_tenant_names_only_its_own_chunks():
    known = KnownChunks()
    known.add("a", [1, 2, 3])
    digest = tokens_digest([1, 2, 3])
    for name in (chunk_id(digest), digest.hex(), digest.hex()[:20]):
        assert list(known.get("a", name)) == [1, 2, 3]
        for tenant in ("b", None):
            with pytest.raises(UnknownChunk, match=name):
                known.get(tenant, name)
            assert not known.remove(tenant, name)
    for name in ("", digest.hex()[:15], "0" * 16):
        with pytest.raises(UnknownChunk):
            known.get("a", name)
    assert known.remove("a", digest.hex()) and not known.remove("a", digest.hex())


def test_an_id_never_stands_for_another_text(monkeypatch):
    """When a tenant sends two texts with one SHA-256, the second is refused."""
    monkeypatch.setattr(keys, "hashlib", SimpleNamespace(sha256=one_digest.sha256))
    known = KnownChunks()
    one, other = [*one_digest.MARK, 1], [*one_digest.MARK, 2]
    known.add("a", one)
    known.add("a", one)
    with pytest.raises(ValueError, match="another text with the same SHA-256"):
        known.add("a", other)
    assert list(known.get("a", tokens_digest(other).hex())) == one
    known.add("b", other)
    assert list(known.get("b", tokens_digest(one).hex())) == other


def test_recently_used_chunks_are_kept():
    one = KnownChunks()
    one.add(None, [0] * 2)
    known = KnownChunks(capacity=3 * one._chunks.num_bytes)
    names = {i: chunk_id(tokens_digest([i] * 2)) for i in range(4)}
    for i in range(3):
        known.add(None, [i] * 2)
    known.get(None, names[0])
    known.add(None, [3] * 2)
    assert [list(known.get(None, names[i])) for i in (0, 3)] == [[0, 0], [3, 3]]
    with pytest.raises(UnknownChunk):
        known.get(None, names[1])


def test_ids_that_collide_are_refused(monkeypatch):
    monkeypatch.setattr(known_chunks, "tokens_digest", lambda tokens: b"the same" + bytes(tokens) * 24)
    known = KnownChunks()
    known.add(None, [1])
    known.add(None, [2])
    name = b"the same".hex()
    with pytest.raises(ValueError, match="ambiguous"):
        known.get(None, name)
    assert not known.remove(None, name)
    assert [list(known.get(None, name + end)) for end in ("01", "02")] == [[1], [2]]
    assert known.remove(None, name + "01") and list(known.get(None, name)) == [2]


def test_segments_with_ids():
    known = KnownChunks()
    known.add("a", [5, 6])
    name = chunk_id(tokens_digest([5, 6]))
    by_id, resolved = {"type": "chunk", "id": name}, Segment(True, input_ids=array("i", [5, 6]))
    assert with_tokens(known, ["Read", by_id], "a") == ["Read", resolved]
    assert with_tokens(known, [[by_id], ["x"], [by_id]], ["a", None, "a"]) == [[resolved], ["x"], [resolved]]
    assert with_tokens(known, ([by_id], ["x"]), ("a", None)) == [[resolved], ["x"]]
    for untouched in (None, "text", 5, [5, {"id": name}]):
        assert with_tokens(known, untouched, "a") == untouched
    with pytest.raises(UnknownChunk):
        with_tokens(known, [[by_id], [by_id]], ["a", "b"])
    assert with_tokens(known, [chunk(id=name), chunk("x")], "a")[0] == resolved
    malformed = ({"type": "chunk", "id": bad} for bad in (5, "", name[:15], name.upper() + "G", "0" * 65, "x" * 16))
    for bad in ({**by_id, "text": "x"}, *malformed):
        with pytest.raises(ValueError, match=r"segments\[1\]") as refused:
            with_tokens(known, ["x", bad], "a")
        assert not isinstance(refused.value, UnknownChunk)
    for salt in ({}, [], 5, ""):
        with pytest.raises(ValueError, match="cache_salt"):
            with_tokens(known, [by_id], salt)
