"""The middleware before a stand-in for the router that behaves as test/e2e/test_routing.py sees `smg` behave."""

import asyncio
import json
import zlib

import pytest
from aiohttp import ClientSession, web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.test_utils import TestServer

from sglang_lazy.routing import Picker
from sglang_lazy.routing.__main__ import parse_args
from sglang_lazy.routing.middleware import Middleware

PROMPT = {"segments": [{"type": "chunk", "text": "a document"}, {"type": "text", "text": "a question"}]}
OTHER = {"segments": [{"type": "chunk", "text": "another"}]}


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--router", "127.0.0.1:30000"], "argument --router: must be a URL like http://127.0.0.1:30000"),
        (["--port", "65536"], "argument --port: must be from 1 to 65535, got '65536'"),
        (["--port", "http"], "argument --port: must be from 1 to 65535, got 'http'"),
        (["--imbalance", "0.5"], "argument --imbalance: must be a number of at least 1, got '0.5'"),
        (["--imbalance", "nan"], "argument --imbalance: must be a number of at least 1, got 'nan'"),
        (["--capacity", "1.5"], "argument --capacity: must be a number of at least 1, got '1.5'"),
        (["--kv-events", "/nowhere"], "argument --kv-events: "),
    ],
)
def test_bad_flags_are_named(capsys, argv, reason):
    with pytest.raises(SystemExit) as ended:
        parse_args(["--router", "http://127.0.0.1:30000", *argv])
    assert ended.value.code == 2 and reason in capsys.readouterr().err


class Router:
    """Addresses workers by their index among the healthy ones."""

    def __init__(self, *workers):
        self.health = dict.fromkeys(workers, True)
        self.dead: set[str] = set()
        self.asked: list[tuple[str, str]] = []  # (worker, path)
        self.caches = {worker: set() for worker in workers}
        self.gate, self.cancelled = asyncio.Event(), asyncio.Event()

    def app(self):
        app = web.Application()
        app.router.add_get("/workers", self.list_workers)
        app.router.add_route("*", "/{path:.*}", self.serve)
        return app

    async def list_workers(self, _request):
        listed = [{"url": worker, "is_healthy": healthy} for worker, healthy in self.health.items()]
        return web.json_response({"workers": listed})

    async def serve(self, request):
        healthy = [worker for worker, is_healthy in self.health.items() if is_healthy]
        target = request.headers.get("X-SMG-Target-Worker")
        worker = "any" if target is None else dict(enumerate(healthy)).get(int(target))
        self.asked.append((worker, request.raw_path))
        if worker is None or worker in self.dead:
            code = "no_available_workers" if worker is None else "call_upstream_connection_failed"
            return web.json_response({"error": code}, status=503, headers={"X-SMG-Error-Code": code})
        body = await request.read()
        if b"deadly" in body:
            code = "call_upstream_request_error"
            return web.json_response({"error": code}, status=500, headers={"X-SMG-Error-Code": code})
        headers = {"X-SMG-Routed-Worker-Id": worker, "X-Body": body[:20].hex()}
        if request.path == "/slow":
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            if self.dead:
                raise ConnectionError
            await response.write(b"data: [DONE]\n\n")
            return response
        cache = self.caches.setdefault(worker, set())
        segments = json.loads(body)["segments"] if b"segments" in body else []
        chunks = [one["text"] for one in segments if one["type"] == "chunk"]
        report = [{"hit": chunk in cache} for chunk in chunks]
        cache.update(chunks)
        return web.json_response({"meta_info": {"chunks": report}}, headers=headers)


def run(test, *workers, hashes=None):
    async def running():
        router = Router(*workers)
        async with TestServer(router.app()) as behind:
            middleware = Middleware(str(behind.make_url("")), Picker(), hashes)
            runner = web.AppRunner(middleware.app(), handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            while middleware.workers != list(workers):
                await asyncio.sleep(0.01)
            async with ClientSession(f"http://{host}:{port}") as client:
                await test(router, middleware, client)
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(running(), 30))


async def worker_for(client, body=PROMPT):
    async with client.post("/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["X-SMG-Routed-Worker-Id"]


def test_prompts_follow_their_chunks():
    async def test(_router, _middleware, client):
        homes = {text: await worker_for(client, body) for text, body in (("a", PROMPT), ("b", OTHER))}
        assert set(homes.values()) == {"w0", "w1"}
        for _ in range(3):
            assert [await worker_for(client, body) for body in (PROMPT, OTHER)] == [homes["a"], homes["b"]]

    run(test, "w0", "w1")


def test_bodies_and_headers_pass_unchanged():
    async def test(router, _middleware, client):
        for body in (b"", b"{", b"[]", b'{"text": "plain"}', b"[" * 100_000):
            async with client.post("/generate?a=%20b", data=body) as answer:
                assert answer.status == 200 and answer.headers["X-Body"] == body[:20].hex()
        async with client.get("/anything") as answer:
            assert answer.status == 200
        assert [path for _, path in router.asked] == ["/generate?a=%20b"] * 5 + ["/anything"]
        assert router.asked[-1] == ("any", "/anything")

    run(test, "w0", "w1")


def test_plain_prompts_go_to_the_least_loaded():
    async def test(router, _middleware, client):
        async with client.post("/slow", json={"text": "plain"}) as answer:
            await answer.content.readany()
            busy = answer.headers["X-SMG-Routed-Worker-Id"]
            for _ in range(3):
                assert await worker_for(client, {"text": "plain"}) != busy

    run(test, "w0", "w1")


def test_a_client_may_name_the_worker():
    async def test(router, _middleware, client):
        home = await worker_for(client)
        for header, value, worker in (("X-SMG-Target-Worker", "1", "w1"), ("X-SMG-Routing-Key", "a", "any")):
            async with client.post("/generate", json=PROMPT, headers={header: value}) as answer:
                assert answer.headers["X-SMG-Routed-Worker-Id"] == worker
        assert await worker_for(client) == home == "w0"

    run(test, "w0", "w1")


def test_a_dead_worker_is_replaced_and_comes_back():
    async def test(router, middleware, client):
        home = await worker_for(client)
        other = next(worker for worker in router.health if worker != home)
        router.dead = {home}
        assert await worker_for(client) == other
        before = len(router.asked)
        assert await worker_for(client, OTHER) == other and len(router.asked) == before + 1
        router.health[home] = False  # the router notices a little later, and indices shift
        await middleware.refresh()
        assert await worker_for(client) == other
        router.dead, router.health[home] = set(), True
        await middleware.refresh()
        middleware.down.clear()  # as after the time for which it is avoided
        new = {"segments": [{"type": "chunk", "text": "nobody's"}]}
        assert await worker_for(client, new) == home

    run(test, "w0", "w1")


def test_a_change_before_the_router_reports_it():
    """An index means another worker by now; the picker must learn about that one."""

    async def test(router, middleware, client):
        home = await worker_for(client)
        assert home == "w0"
        router.health["w0"] = False
        assert await worker_for(client) == "w1"
        while middleware.workers != ["w1", "w2"]:  # the middleware asks again at once
            await asyncio.sleep(0.01)
        new = {"segments": [{"type": "chunk", "text": "nobody's"}]}
        assert await worker_for(client, new) == "w2"  # it was sent less than w1
        assert await worker_for(client) == "w1"

    run(test, "w0", "w1", "w2")


def test_without_workers_the_router_decides():
    async def test(router, _middleware, client):
        router.dead = {"w0", "w1"}
        async with client.post("/generate", json=PROMPT) as answer:
            assert answer.status == 200  # the router chose
        assert [worker for worker, _ in router.asked] == ["w0", "w1", "any"]

    run(test, "w0", "w1")


def test_a_deadly_prompt_is_retried_once():
    async def test(router, _middleware, client):
        async with client.post("/generate", json={"segments": [{"type": "chunk", "text": "deadly"}]}) as answer:
            assert answer.status == 500
        assert len(router.asked) == 2

    run(test, "w0", "w1", "w2")


def test_streams_pass_unbuffered_and_end_as_they_end():
    async def test(router, middleware, client):
        async with client.post("/slow", json=PROMPT) as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            assert sum(middleware.in_flight.values()) == 1
            router.gate.set()
            assert await answer.content.read() == b"data: [DONE]\n\n"
        router.gate.clear()
        async with client.post("/slow", json=PROMPT) as answer:
            await answer.content.readany()
            router.dead = {"all"}
            router.gate.set()
            with pytest.raises(ClientPayloadError):  # a broken stream must not look complete
                await answer.content.read()

    run(test, "w0")


def test_a_client_that_leaves_cancels_its_request():
    async def test(router, middleware, client):
        async with client.post("/slow", json=PROMPT) as answer:
            await answer.content.readany()
        await router.cancelled.wait()
        assert not sum(middleware.in_flight.values())

    run(test, "w0")


def test_the_salt_header_is_refused_since_the_router_drops_it():
    async def test(router, _middleware, client):
        for body in (PROMPT, {"text": "plain"}):
            async with client.post("/generate", json=body, headers={"X-Cache-Salt": "mine"}) as answer:
                assert answer.status == 400
        assert not router.asked

    run(test, "w0")


def test_workers_are_followed_while_the_router_lists_them(monkeypatch):
    following, known = [], object()

    async def follow(worker, picker, hashes):
        assert hashes is known
        following.append(worker)
        try:
            await asyncio.Event().wait()
        finally:
            following.remove(worker)

    async def test(router, middleware, client):
        for healthy in (True, False, True):
            router.health["w1"] = healthy
            await middleware.refresh()
            await asyncio.sleep(0)
            assert sorted(following) == (["w0", "w1"] if healthy else ["w0"])

    monkeypatch.setattr("sglang_lazy.routing.middleware.follow", follow)
    run(test, "w0", "w1", hashes=known)
    assert not following


def test_an_unreachable_router():
    async def test(_router, middleware, client):
        middleware.router = "http://127.0.0.1:9"
        await middleware.refresh()
        assert middleware.workers == ["w0"]
        async with client.post("/generate", json=PROMPT) as answer:
            assert answer.status == 502 and "does not answer" in await answer.text()

    run(test, "w0")


@pytest.mark.parametrize("encoding, wbits", [("gzip", 31), ("deflate", 15)])
def test_a_compressed_body_arrives(encoding, wbits):
    """aiohttp unpacks it on its way in, so its head must not speak of the packed one."""

    async def test(_router, _middleware, client):
        packed = zlib.compress(json.dumps(PROMPT).encode() + b" " * 500, wbits=wbits)
        headers = {"Content-Encoding": encoding}
        for hit in (False, True):
            async with client.post("/generate", data=packed, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["meta_info"]["chunks"] == [{"hit": hit}]

    run(test, "w0", "w1")
