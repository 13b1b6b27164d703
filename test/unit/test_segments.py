"""Segments: what is accepted, what is refused and why, and the layout that travels with a request."""

import hashlib

import pytest

from sglang_lazy.core.segments import PromptLayout, Segment, chunk_id, parse_segment, parse_segments


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
        ({"type": "chunk", "text": "x", "salt": "y"}, "unknown key 'salt' in a chunk segment"),
        ({"type": "chunk", "text": ""}, "the text of a chunk segment is empty"),
        ({"type": "text", "text": ""}, "the text of a text segment is empty"),
        ("", "the text of a text segment is empty"),
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


@pytest.mark.parametrize(
    "values, reason", [([], "segments is empty"), ("text", "must be a list"), ({}, "must be a list")]
)
def test_no_segments(values, reason):
    with pytest.raises(ValueError, match=reason):
        parse_segments(values)


def test_chunk_id_is_the_hash_of_the_tokens():
    ids = [1, 2, 70000]
    tokens = b"".join(token.to_bytes(8, "little") for token in ids)
    assert chunk_id(ids) == hashlib.sha256(tokens).hexdigest()[:16]
    assert chunk_id(tuple(ids)) == chunk_id(ids) != chunk_id(ids[::-1])


@pytest.mark.parametrize("chunks, link", [(((0, 3), (3, 5)), "block"), ((), "full")])
def test_layout_survives_packing(chunks, link):
    layout = PromptLayout(chunks, salt="tenant é")
    assert PromptLayout.unpack(layout.pack(), 5) == layout and layout.link == link


@pytest.mark.parametrize(
    "packed",
    ["", "[]", "{}", '{"chunks":[[0,2]]}', '{"chunks":[[0,9]],"salt":null}', '{"chunks":[[2,2]],"salt":null}',
     '{"chunks":[[2,4],[3,5]],"salt":null}', '{"chunks":[[-1,2]],"salt":null}', '{"chunks":[[0,2]],"salt":3}'],
)  # fmt: skip
def test_layout_that_does_not_fit_is_refused(packed):
    with pytest.raises(ValueError):
        PromptLayout.unpack(packed, 5)


def test_chunks_of_a_program_are_segments():
    from sglang_lazy import chunk

    assert parse_segment(chunk("doc")) == Segment(True, text="doc")
