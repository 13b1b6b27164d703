"""The chunk methods of `Engine`, which do what the routes do, without a server."""

import time

import pytest

from sglang_lazy import chunk
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.serving.known_chunks import UnknownChunk

pytestmark = pytest.mark.slow  # starts an engine; test_chunk_routes.py has the routes

DOCUMENT = "The ferry left at six, and the last bridge was still under water."
TOKENS = [7, 8, 9, 10, 11]
ID = chunk_id(tokens_digest(TOKENS))


def ask(engine, segment, salt):
    output = engine.generate(
        segments=["Read: ", segment, " When?"], cache_salt=salt, sampling_params={"temperature": 0, "max_new_tokens": 2}
    )
    return output["meta_info"]["chunks"][0]


def test_registered_named_listed_deleted(engine):
    salt = "engine"
    answer = engine.call("register_chunks", [DOCUMENT, chunk(DOCUMENT), {"input_ids": TOKENS}], cache_salt=salt)
    assert answer["requested"] == 3 and answer["skipped"] == []
    of_text, of_tokens = answer["affected"]
    assert of_tokens == ID
    assert ask(engine, chunk(DOCUMENT), salt) == {**ask(engine, {"type": "chunk", "id": of_text}, salt), "hit": True}
    with pytest.raises(UnknownChunk, match=ID):
        ask(engine, {"type": "chunk", "id": ID}, "another")
    page = engine.call("list_chunks", salt, sort="tokens", order="asc", limit=1)
    assert page["total"] == 2 and [one["id"] for one in page["chunks"]] == [ID]
    rest = engine.call("list_chunks", salt, sort="tokens", order="asc", limit=1, cursor=page["next"])
    assert [(one["id"], one["hits"]) for one in rest["chunks"]] == [(of_text, 2)] and rest["next"] is None
    assert {one["cache_salt"] for one in engine.call("list_chunks", everybody=True, limit=1000)["chunks"]} >= {salt}
    found = engine.call("get_chunk", ID, salt)
    assert found["registration"] is None and found["chunks"][0]["tokens"] == len(TOKENS)
    assert engine.call("delete_chunks", [ID, "0" * 16], "another")["affected"] == []
    assert engine.call("delete_chunks", [ID, "0" * 16], salt) == {
        "requested": 2,
        "affected": [{"id": ID, "state": "deleted"}],
        "skipped": [{"id": "0" * 16, "reason": "unknown"}],
    }
    with pytest.raises(UnknownChunk, match=ID):
        engine.call("get_chunk", ID, salt)
    with pytest.raises(UnknownChunk):
        ask(engine, {"type": "chunk", "id": ID}, salt)


def test_pinned_until_it_expires(engine):
    salt = "engine pins"
    assert engine.call("register_chunks", [{"input_ids": TOKENS}], cache_salt=salt, pin=True)["affected"] == [ID]
    assert engine.call("get_chunk", ID, salt)["chunks"][0]["pinned_until"] is None
    before = time.time()
    (pinned,) = engine.call("pin_chunks", [ID], ttl=0.05, cache_salt=salt)["affected"]
    assert pinned["pinned"] and before < pinned["pinned_until"] <= time.time() + 0.05
    time.sleep(0.1)  # the engine's event loop does not run meanwhile
    assert not engine.call("list_chunks", salt)["chunks"][0]["pinned"]
    assert engine.call("pin_chunks", [ID], cache_salt="another")["skipped"] == [{"id": ID, "reason": "unknown"}]
    assert engine.call("pin_chunks", [ID], pin=False, cache_salt=salt)["affected"][0]["pinned"] is False


def test_in_an_event_loop(engine):
    def call(name, **arguments):
        return engine.call(f"async_{name}", **arguments, cache_salt="loop")

    calls = [{"chunks": [f"{i} boats."], "cache_salt": "loop"} for i in range(4)]
    answers = engine.call_together("async_register_chunks", calls)
    names = [name for answer in answers for name in answer["affected"]]
    assert {one["id"] for one in call("list_chunks")["chunks"]} == set(names) and len(names) == 4
    assert call("pin_chunks", ids=names[:1])["affected"]
    assert [one["id"] for one in call("delete_chunks", ids=names)["affected"]] == names
    with pytest.raises(UnknownChunk):
        call("get_chunk", chunk_id=names[0])


def test_reasons_of_failures_are_remembered(engine):
    (skipped,) = engine.call("register_chunks", [{"input_ids": [5] * 9000}], cache_salt="long")["skipped"]
    assert engine.call("get_chunk", skipped["id"], "long") == {
        "chunks": [],
        "registration": {"state": "failed", "reason": skipped["reason"]},
    }
    with pytest.raises(UnknownChunk):
        engine.call("get_chunk", skipped["id"])
    deleted = engine.call("delete_chunks", [skipped["id"]], "long")
    assert deleted["affected"] == [{"id": skipped["id"], "state": "deleted"}]
    with pytest.raises(UnknownChunk):
        engine.call("get_chunk", skipped["id"], "long")


@pytest.mark.parametrize(
    ("method", "arguments", "options", "reason"),
    [
        ("register_chunks", ([],), {}, "1 to 1000"),
        ("register_chunks", ([DOCUMENT, 5],), {}, r"chunks\[1\]"),
        ("register_chunks", ([DOCUMENT],), {"link": "full"}, "computes no chunks"),
        ("register_chunks", ([DOCUMENT],), {"cache_salt": ""}, "cache_salt"),
        ("register_chunks", ([DOCUMENT],), {"ttl": 0}, "ttl"),
        ("register_chunks", ([DOCUMENT],), {"lora_path": "x"}, "no LoRA adapter 'x' is loaded"),
        ("list_chunks", (), {"sort": "size"}, "sort"),
        ("list_chunks", (5,), {}, "cache_salt"),
        ("get_chunk", ("short",), {}, "16 to 64"),
        ("pin_chunks", (ID,), {}, "16 to 64"),
        ("pin_chunks", ([ID],), {"pin": False, "ttl": 5}, "ttl"),
        ("delete_chunks", (["short"],), {}, "16 to 64"),
    ],
)
def test_bad_input(engine, method, arguments, options, reason):
    with pytest.raises(ValueError, match=reason):
        engine.call(method, *arguments, **options)
