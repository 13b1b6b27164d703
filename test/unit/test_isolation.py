"""What a tenant sees does not depend on whether another tenant holds the same documents.

A tenant runs a script and records all that it can learn: the answers of the chunk routes, whether ids are known, what
prompts report, and, in place of times, the work of each step in tokens. Before it, another tenant has run the script
with the same documents, with others, or not at all.
"""

import asyncio
import time

import fastapi
import httpx
import pytest

from fakes.loop import Loop
from fakes.requests import CHUNK, TEXT
from fakes.server import FakeServer, new_frontend
from fakes.storage import Storage
from sglang_lazy.core.keys import Namespace, chunk_id, tokens_digest
from sglang_lazy.core.segments import LAYOUT_PARAM, Segment
from sglang_lazy.core.state import linked
from sglang_lazy.serving import chunk_routes, surveys
from sglang_lazy.serving.known_chunks import UnknownChunk, with_tokens
from sglang_lazy.serving.tokenization import SegmentTokenizer

pytestmark = pytest.mark.usefixtures("sglang_context")

DOCUMENTS = [(1, 2, 3, 4, 5), (6, 7, 8), (9, 9, 2, 2, 9, 9), (3, 1), (5,) * 70]  # the last one exceeds the context
OTHERS = [tuple((token + 6) % 14 + 1 for token in document) for document in DOCUMENTS]
"""Of the same lengths, and to `fakes.attention` alike: policies that measure choose the same tokens of them."""
ABSENT = "0" * 16
LINKS = ["copy", "epic:tokens=2", "query:ratio=0.4", "base", "blend:ratio=0.4", "static:ratio=0.4", "block"]
LINKS += ["base+query"]


class CountingTokenizer:
    num_texts = 0

    def encode(self, text, **_):
        self.num_texts += 1
        return list(text.encode())

    def convert_ids_to_tokens(self, ids):
        return list(map(chr, ids))


class Server(FakeServer):
    """HTTP process and scheduler in one, without a model."""

    def __init__(self, monkeypatch, **options):
        self.loop = Loop(context_len=64, **options)
        model = self.loop.model_config
        super().__init__(vocab_size=model.vocab_size, context_len=model.context_len)
        self.frontend = new_frontend(self)
        self.texts = SegmentTokenizer(CountingTokenizer())
        monkeypatch.setattr(time, "time", lambda: 1000.0)
        monkeypatch.setattr(surveys, "MIN_AGE", 0.0)
        app = fastapi.FastAPI()
        chunk_routes.add_routes(app, lambda: self.frontend)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    def answer(self, verb, **arguments):
        return self.loop.admission.control.handle(verb, arguments, time.time())

    async def compute(self, input_ids, params, adapter):
        if len(input_ids) > self.context_len:
            raise ValueError("too long")
        layout = params["custom_params"][LAYOUT_PARAM].plan.layout
        ((start, end),) = layout.chunks
        parts = [(CHUNK, input_ids[start:end]), (TEXT, input_ids[end:])]
        self.submit(parts, layout.cache_salt, layout.link, max_new_tokens=1)
        self.loop.run()
        return adapter

    def submit(self, parts, salt, link, **options):
        return self.loop.submit(parts, "r", link=link, cache_salt=salt, **options)

    def work(self):
        """Run until idle; returns per step how many tokens it computed and how many requests it decoded."""
        steps = []
        while not steps or not self.loop.is_fully_idle():
            self.loop.step()
            batch = self.loop.last_batch
            prefill = batch is not None and batch.forward_mode.is_extend()
            steps.append((sum(batch.extend_lens) if prefill else 0, len(batch.reqs) if batch and not prefill else 0))
        return steps


def prompts_of(documents):
    """A prompt, its repetition, its documents in another order, and its next turn."""
    first, second = (CHUNK, documents[0]), (CHUNK, documents[1])
    turn = [(TEXT, (11, 12)), first, (TEXT, (13,)), second, (TEXT, (10, 10))]
    return [
        turn,
        turn,
        [(TEXT, (11, 12)), second, first, (TEXT, (10, 4))],
        [*turn, (CHUNK, documents[2]), (TEXT, (7,))],
    ]


async def act(server, salt, documents, link):
    """Do everything that a tenant can do; returns everything that it sees."""
    seen = []
    ids = [chunk_id(tokens_digest(document)) for document in documents]

    async def call(method, path, **options):
        answer = await server.http.request(method, path, headers={"X-Cache-Salt": salt}, **options)
        seen.append((method, path, answer.status_code, answer.text))
        return answer

    async def look():
        for name in (*ids, ABSENT):
            await call("GET", f"/chunks/{name}")
            try:
                seen.append(with_tokens(server.frontend.known, [{"type": "chunk", "id": name}], salt))
            except UnknownChunk as error:
                seen.append(str(error))
        for sort in ("hits", "created"):
            cursor = {}
            while cursor is not None:
                page = await call("GET", "/chunks", params={"sort": sort, "limit": 2, **cursor})
                cursor = {"cursor": page.json()["next"]} if page.json()["next"] else None
        await call("GET", "/lazy/survey")
        for name in ids:
            await call("GET", f"/lazy/uses/{name}")

    async def change():
        for name in ids:
            await call("PATCH", f"/chunks/{name}", json={"ttl": 60})
        await call("DELETE", "/chunks", params={"id": [ids[1], ABSENT]})
        await call("DELETE", f"/chunks/{ids[3]}")

    await look()
    await change()
    for prompt in prompts_of(documents):
        req = server.submit(prompt, salt, link)
        seen.append(server.work())
        counts = server.loop.counts(req)
        seen.append((counts, list(req.output_ids)))
        chunks = [
            {"id": chunk_id(chunk.key.tokens), "tokens": chunk.num_tokens, "hit": bool(counts[2] >> i & 1)}
            for i, chunk in enumerate(linked(req).prompt.chunks)
        ]
        server.frontend.usage.add(Namespace("chunk", None, salt), link, chunks, counts[1], time.time())
    await look()
    for wait in (True, False):
        chunks = [{"input_ids": list(document)} for document in documents[2:]]
        await call("POST", "/chunks", json={"chunks": chunks, "wait": wait, "pin": wait})
    await change()
    tokenizer = server.texts.tokenizer
    tokenizer.num_texts = 0
    for text in map(str, documents):
        server.texts.encode([Segment(False, "Read: "), Segment(True, text)], salt)
    seen.append(tokenizer.num_texts)
    await look()
    return seen


def seen_by_tenant(monkeypatch, link, before, together=None, **options):
    """before: by salt, documents that others used earlier.  together: those that another tenant uses meanwhile."""

    async def run():
        server = Server(monkeypatch, **options)
        for salt, documents in before.items():
            await act(server, salt, documents, link)
        seen = await act(server, "tenant", DOCUMENTS, link)
        for mine, others in zip(prompts_of(DOCUMENTS), prompts_of(together or ()) if together else (), strict=False):
            reqs = [server.submit(others, "other", link), server.submit(mine, "tenant", link)]
            seen += [server.work(), server.loop.counts(reqs[1])]
        return seen

    return asyncio.run(run())


TIERS = {"device": {}, "host": {"host_size": 600}, "storage": {"host_size": 600, "storage": True}}
EVERYWHERE = [("device", link) for link in LINKS] + [
    (tier, link) for tier in ("host", "storage") for link in LINKS[-2:]
]


@pytest.mark.parametrize(("tier", "link"), EVERYWHERE)
def test_nobody_sees_whether_another_holds_its_documents(monkeypatch, tier, link):
    def seen_after(others):
        options = TIERS[tier] | ({"storage": Storage()} if tier == "storage" else {})
        return seen_by_tenant(monkeypatch, link, others, pool_size=600, **options)

    alone = seen_after({})
    assert seen_after({"other": DOCUMENTS}) == alone
    assert seen_after({"tenan": DOCUMENTS, "tenant2": OTHERS}) == alone
    assert seen_after({"tenant": DOCUMENTS}) != alone, "the script would not notice a cached document"


# Under `blend` and `static` the tokens that another tenant recomputes, and so its demand, depend on its documents.
@pytest.mark.parametrize(("size", "link"), [(600, "block"), *((48, link) for link in (*LINKS[:4], *LINKS[6:]))])
def test_only_the_load_of_a_concurrent_tenant_shows(monkeypatch, size, link):
    """Also in one queue, and when one evicts the other's chunks."""
    same, different = (
        seen_by_tenant(monkeypatch, link, {"other": documents}, documents, pool_size=size)
        for documents in (DOCUMENTS, OTHERS)
    )
    assert same == different
