"""Segments: what is accepted, what is refused with which reason, and the layout that travels with a request."""

import hashlib
import json
import struct
from array import array

import pytest

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import LAYOUT_VERSION, PromptLayout, Segment, parse_segment, parse_segments


def test_accepted_forms():
    values = ["plain", {"type": "text", "input_ids": [1, 2]}, {"type": "chunk", "text": "doc", "input_ids": None}]
    assert parse_segments(values, vocab_size=8) == [
        Segment(False, text="plain"),
        Segment(False, input_ids=[1, 2]),
        Segment(True, text="doc"),
    ]


@pytest.mark.parametrize(
    "value, reason",
    [
        ({"type": "image", "text": "x"}, "unknown segment type 'image'"),
        ({"text": "x"}, "unknown segment type None"),
        ({"type": ["chunk"], "text": "x"}, "unknown segment type"),
        (3, "expected a string, a chunk or an object"),
        (None, "expected a string, a chunk or an object"),
        ({"type": "chunk", "text": "x", "cache_salt": "y"}, "unknown key 'cache_salt' in a chunk segment"),
        ({"type": "chunk", "text": ""}, "the text of a chunk segment is empty"),
        ({"type": "text", "text": ""}, "the text of a text segment is empty"),
        ("", "the text of a text segment is empty"),
        ("half: \ud83d", "surrogates not allowed"),
        ({"type": "chunk", "text": 5}, "must be a string, got int"),
        ({"type": "chunk"}, "exactly one of text and input_ids"),
        ({"type": "chunk", "text": "x", "input_ids": [1]}, "exactly one of text and input_ids"),
        ({"type": "chunk", "input_ids": []}, "input_ids of a chunk segment are empty"),
        ({"type": "chunk", "input_ids": "12"}, "must be a list of integers"),
        ({"type": "chunk", "input_ids": [1, 2.0]}, "must be a list of integers"),
        ({"type": "chunk", "input_ids": [True]}, "must be a list of integers"),
        ({"type": "chunk", "input_ids": [1, 8]}, "token id 8 in a chunk segment is outside the vocabulary of 8"),
        ({"type": "text", "input_ids": [-1]}, "token id -1 in a text segment is outside the vocabulary of 8"),
    ],
)
def test_refusals_name_the_segment(value, reason):
    with pytest.raises(ValueError) as error:
        parse_segments(["first", value], vocab_size=8)
    assert str(error.value).startswith("segments[1]: ")
    assert reason in str(error.value)


def test_refusals_list_the_id_only_where_it_is_taken():
    for value, with_id, without in (
        ({"type": "chunk"}, "exactly one of text, input_ids and id", "exactly one of text and input_ids"),
        ({"type": "chunk", "title": "x"}, "type and text, input_ids or id", "type and text or input_ids"),
        ({"type": "text", "id": "x"}, "type and text or input_ids", "type and text or input_ids"),
    ):
        for by_id, expected in ((True, with_id), (False, without)):
            with pytest.raises(ValueError, match=f"{expected}$"):
                parse_segments([value], by_id=by_id)


@pytest.mark.parametrize(
    "values, reason", [([], "segments is empty"), ("text", "must be a list"), ({}, "must be a list")]
)
def test_no_segments(values, reason):
    with pytest.raises(ValueError, match=reason):
        parse_segments(values)


@pytest.mark.parametrize("ids", [[1, 2, 70000], [0], [2**31 - 1], []])
def test_a_chunks_id_is_the_hash_of_its_tokens(ids):
    expected = hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids))
    for form in (ids, tuple(ids), array("q", ids)):
        assert tokens_digest(form) == expected.digest()
    assert chunk_id(tokens_digest(ids)) == expected.hexdigest()[:16]
    assert len(ids) < 2 or tokens_digest(ids[::-1]) != expected.digest()


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_token_ids_beyond_31_bits_have_no_digest(bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        tokens_digest([5, bad, 6])


@pytest.mark.parametrize("chunks", [((0, 3), (3, 5)), ()])
@pytest.mark.parametrize("link", ["block", "full", "a policy to come"])
def test_layout_survives_packing(chunks, link):
    layout = PromptLayout(chunks, cache_salt="tenant é", link=link)
    assert PromptLayout.unpack(layout.pack(), 5) == layout


def packed(**changes):
    return json.dumps({"v": 1, "chunks": [[0, 2]], "cache_salt": None, "link": "block", **changes})


def test_the_wire_format():
    assert LAYOUT_VERSION == 1
    assert PromptLayout.unpack(packed(), 5) == PromptLayout(((0, 2),))
    assert json.loads(PromptLayout(((0, 2),), "a", "copy").pack()) == {
        "v": 1, "chunks": [[0, 2]], "cache_salt": "a", "link": "copy"
    }  # fmt: skip


BAD_LAYOUTS = [
    "", "[]", "{}", 3, packed(chunks=[[0, 9]]), packed(chunks=[[2, 2]]), packed(chunks=[[2, 4], [3, 5]]),
    packed(chunks=[[-1, 2]]), packed(chunks=[3]), packed(cache_salt=3), packed(link=None),
    '{"v":1,"chunks":[[0,2]],"cache_salt":null}', '{"chunks":[[0,2]],"cache_salt":null,"link":"block"}',
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_LAYOUTS)
def test_malformed_layouts_are_refused(bad):
    with pytest.raises(ValueError):
        PromptLayout.unpack(bad, 5)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_layouts_of_another_version_are_refused(version):
    with pytest.raises(ValueError, match=f"layout of version {version!r}, but this is version 1"):
        PromptLayout.unpack(json.dumps({"v": version, "spans": []}), 5)


def test_chunks_of_a_program_are_segments():
    from sglang_lazy import chunk

    assert parse_segment(chunk("doc")) == Segment(True, text="doc")
