"""The chunk methods of `Engine`, which do what the routes do, without a server."""

import asyncio
import time

import pytest

from sglang_lazy import chunk
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.serving.known_chunks import UnknownChunk

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
    answer = engine.register_chunks([DOCUMENT, chunk(DOCUMENT), {"input_ids": TOKENS}], cache_salt=salt)
    assert answer["requested"] == 3 and answer["skipped"] == []
    of_text, of_tokens = answer["affected"]
    assert of_tokens == ID
    assert ask(engine, chunk(DOCUMENT), salt) == {**ask(engine, {"type": "chunk", "id": of_text}, salt), "hit": True}
    with pytest.raises(UnknownChunk, match=ID):
        ask(engine, {"type": "chunk", "id": ID}, "another")
    page = engine.list_chunks(salt, sort="tokens", order="asc", limit=1)
    assert page["total"] == 2 and [one["id"] for one in page["chunks"]] == [ID]
    rest = engine.list_chunks(salt, sort="tokens", order="asc", limit=1, cursor=page["next"])
    assert [(one["id"], one["hits"]) for one in rest["chunks"]] == [(of_text, 2)] and rest["next"] is None
    assert {one["cache_salt"] for one in engine.list_chunks(everybody=True, limit=1000)["chunks"]} >= {salt}
    found = engine.get_chunk(ID, salt)
    assert found["registration"] is None and found["chunks"][0]["tokens"] == len(TOKENS)
    assert engine.delete_chunks([ID, "0" * 16], "another")["affected"] == []
    assert engine.delete_chunks([ID, "0" * 16], salt) == {
        "requested": 2,
        "affected": [{"id": ID, "state": "deleted"}],
        "skipped": [{"id": "0" * 16, "reason": "unknown"}],
    }
    with pytest.raises(UnknownChunk, match=ID):
        engine.get_chunk(ID, salt)
    with pytest.raises(UnknownChunk):
        ask(engine, {"type": "chunk", "id": ID}, salt)


def test_pinned_until_it_expires(engine):
    salt = "engine pins"
    assert engine.register_chunks([{"input_ids": TOKENS}], cache_salt=salt, pin=True)["affected"] == [ID]
    assert engine.get_chunk(ID, salt)["chunks"][0]["pinned_until"] is None
    before = time.time()
    (pinned,) = engine.pin_chunks([ID], ttl=0.05, cache_salt=salt)["affected"]
    assert pinned["pinned"] and before < pinned["pinned_until"] <= time.time() + 0.05
    time.sleep(0.1)  # the engine's event loop does not run meanwhile
    assert not engine.list_chunks(salt)["chunks"][0]["pinned"]
    assert engine.pin_chunks([ID], cache_salt="another")["skipped"] == [{"id": ID, "reason": "unknown"}]
    assert engine.pin_chunks([ID], pin=False, cache_salt=salt)["affected"][0]["pinned"] is False


def test_in_an_event_loop(engine):
    async def run():
        texts = [f"{i} boats." for i in range(4)]
        answers = await asyncio.gather(*(engine.async_register_chunks([text], cache_salt="loop") for text in texts))
        names = [name for answer in answers for name in answer["affected"]]
        listed = await engine.async_list_chunks("loop")
        assert {one["id"] for one in listed["chunks"]} == set(names) and len(names) == 4
        assert (await engine.async_pin_chunks(names[:1], cache_salt="loop"))["affected"]
        deleted = await engine.async_delete_chunks(names, "loop")
        assert [one["id"] for one in deleted["affected"]] == names
        with pytest.raises(UnknownChunk):
            await engine.async_get_chunk(names[0], "loop")

    engine.loop.run_until_complete(run())


def test_reasons_of_failures_are_remembered(engine):
    (skipped,) = engine.register_chunks([{"input_ids": [5] * 9000}], cache_salt="long")["skipped"]
    assert engine.get_chunk(skipped["id"], "long") == {
        "chunks": [],
        "registration": {"state": "failed", "reason": skipped["reason"]},
    }
    with pytest.raises(UnknownChunk):
        engine.get_chunk(skipped["id"])
    assert engine.delete_chunks([skipped["id"]], "long")["affected"] == [{"id": skipped["id"], "state": "deleted"}]
    with pytest.raises(UnknownChunk):
        engine.get_chunk(skipped["id"], "long")


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
        getattr(engine, method)(*arguments, **options)
