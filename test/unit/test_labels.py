"""Labels of chunks: bounded, each tenant's own, and no part of what a chunk is."""

import json

import pytest

import sglang_lazy
from fakes.server import FakeServer, new_frontend
from sglang_lazy.core.keys import tokens_digest
from sglang_lazy.core.labels import MAX_METADATA, Label, parse_label
from sglang_lazy.core.segments import parse_segment
from sglang_lazy.routing.bodies import chunks_in
from sglang_lazy.serving.chat import ChunkParts
from sglang_lazy.serving.known_chunks import KnownChunks, with_tokens
from sglang_lazy.serving.labels import NONE, Labels, labels_in, name_chunks, with_labels
from sglang_lazy.serving.registration import parse_registration

LEASE = {"name": "Lease, page 3", "metadata": {"source": "lease.pdf", "page": 3}}
KNOWN = parse_label(**LEASE)


def ids(*tokens, **label):
    return {"type": "chunk", "input_ids": list(tokens), **label}


def identity(*tokens):
    return tokens_digest(list(tokens)).hex()[:16]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        *(({"name": name}, "name must be a non-empty string") for name in ("", 5, "x" * 257, "a\nb", ["x"])),
        *(({"metadata": data}, "metadata must be an object") for data in ("x", [], 5, True)),
        *(({"metadata": {"x": data}}, "must be JSON") for data in (float("nan"), {1}, "\ud800")),
        ({"metadata": {"x": "x" * MAX_METADATA}}, "may have 2048 bytes"),
        ({"metadata": {"x": "ü" * (MAX_METADATA // 2)}}, "may have 2048 bytes"),
    ],
)
def test_bad_labels(label, reason):
    with pytest.raises(ValueError, match=reason):
        parse_segment(ids(5, **label))
    with pytest.raises(ValueError, match=reason):
        sglang_lazy.chunk("a text", **label)
    known = KnownChunks()
    known.add(None, [5])
    with pytest.raises(ValueError, match=reason):
        with_tokens(known, [{"type": "chunk", "id": identity(5), **label}], None)


def test_metadata_nested_deeply_is_refused():
    nested: dict = {}
    for _ in range(100_000):
        nested = {"x": nested}
    with pytest.raises(ValueError, match="metadata m"):
        parse_segment(ids(5, metadata=nested))


def test_the_longest_label():
    metadata = {"x": "x" * (MAX_METADATA - len('{"x":""}'))}
    label = parse_segment(ids(5, name="x" * 256, metadata=metadata)).label
    assert label.fields() == {"name": "x" * 256, "metadata": metadata}


def test_only_chunks_have_labels():
    assert parse_segment(ids(5)).label is None and parse_segment(ids(5, name=None, metadata=None)).label is None
    with pytest.raises(ValueError, match="unknown key 'name' in a text segment"):
        parse_segment({"type": "text", "text": "x", "name": "y"})


def test_each_surface_takes_them():
    segment = parse_segment(sglang_lazy.chunk("a text", **LEASE))
    assert (segment.text, segment.label) == ("a text", KNOWN)
    program = "Read: " + sglang_lazy.chunk("a text", **LEASE).value + sglang_lazy.chunk("another", name="B").value
    sent = program[3:].segments()
    assert sent[1] == {"type": "chunk", "text": "a text", **LEASE} and sent[2]["name"] == "B"
    parts = ChunkParts()
    parts.take_from([{"role": "user", "content": [{"type": "chunk", "text": "a text", **LEASE}]}])
    parts.rendered = {0: "a text "}  # as a template has altered it
    (rendered,) = parts.parse(100)
    assert (rendered.text, rendered.label) == ("a text ", KNOWN)
    known = KnownChunks()
    known.add("a", [5, 6])
    (named,) = with_tokens(known, [{"type": "chunk", "id": identity(5, 6), **LEASE}], "a")
    assert (list(named.input_ids), named.label) == ([5, 6], KNOWN)


def test_a_plan_knows_which_chunk_has_which(monkeypatch):
    prompts = new_frontend().prompts
    segments = [ids(5), ids(6, 7, **LEASE), {"type": "text", "input_ids": [8]}, ids(9, name="B")]
    args = prompts.to_generate_args(segments)
    plan = args["sampling_params"]["custom_params"]["sglang_lazy"].plan
    assert labels_in(plan, args["input_ids"]) == {identity(6, 7): KNOWN, identity(9): Label("B")}
    bare = prompts.to_generate_args([ids(5), ids(6, 7), {"type": "text", "input_ids": [8]}, ids(9)])
    assert bare == args, "nothing that reaches a scheduler differs"
    assert bare["sampling_params"]["custom_params"]["sglang_lazy"].plan.labels == ()


def test_a_router_sees_equal_chunks():
    one, other = ({"segments": [{"type": "chunk", "text": "a text", **label}]} for label in ({}, LEASE))
    assert chunks_in(one) == chunks_in(other)


def test_the_last_label_holds_for_one_tenant():
    labels = Labels()
    labels.add("a", {identity(5): KNOWN})
    labels.add("b", {identity(5): Label("B")})
    labels.add("a", {identity(5): Label("newer")})
    assert labels.get([("a", identity(5)), ("b", identity(5)), (None, identity(5))]) == [
        Label("newer"),
        Label("B"),
        NONE,
    ]
    labels.remove("a", tokens_digest([5]).hex())
    rows = [{"id": identity(5), "cache_salt": salt} for salt in ("a", "b")]
    shown = with_labels(labels, rows)
    assert [(row["name"], row["metadata"]) for row in shown] == [(None, None), ("B", None)]
    name_chunks(labels, "b", rows)
    assert [row["name"] for row in rows] == ["B", "B"]


def test_labels_take_bounded_memory():
    labels = Labels(capacity=100_000)
    longest = parse_label("x" * 256, {"x": "x" * (MAX_METADATA - 8)})
    for i in range(100):
        labels.add(None, {identity(i): longest})
    kept = sum(label is not NONE for label in labels.get([(None, identity(i)) for i in range(100)]))
    assert 20 < kept < 40 and labels.get([(None, identity(99))]) == [longest]


def test_registrations_have_labels():
    body = {"chunks": [{"input_ids": [5], **LEASE}, {"input_ids": [5]}, {"input_ids": [6]}]}
    chunks, requested, _ = parse_registration(new_frontend().prompts, body, None)
    assert [(chunk.id, chunk.label) for chunk in chunks] == [(identity(5), KNOWN), (identity(6), None)]
    assert [chunk.title for chunk in chunks] == [f"{identity(5)} (Lease, page 3)", identity(6)] and requested == 3
    bad = {"chunks": [{"input_ids": [6]}, {"input_ids": [5], "name": ""}]}
    with pytest.raises(ValueError, match=r"chunks\[1\]: name must be"):
        parse_registration(new_frontend().prompts, bad, None)


def test_what_a_label_is_sent_as():
    assert json.loads(KNOWN.packed) == LEASE["metadata"] and FakeServer().adapters == {}
