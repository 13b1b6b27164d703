"""A middleware for the router `smg`: it selects the worker of each prompt and forwards requests unchanged.

It asks the router for its healthy workers and selects one through the router's header; the router still checks, limits,
counts and forwards. If the router cannot reach that worker, the middleware selects another.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from aiohttp import web
from yarl import URL

from sglang_lazy.core.config import SALT_HEADER
from sglang_lazy.routing.block_hashes import BlockHashes
from sglang_lazy.routing.bodies import chunks_in, hits_by_chunk
from sglang_lazy.routing.events import follow
from sglang_lazy.serving.picker import Pick, Picker

TARGET = "X-SMG-Target-Worker"
"""Request header: the worker's index among the healthy ones, in the order of `/workers`."""
ROUTED = "X-SMG-Routed-Worker-Id"
"""Response header: the URL of the worker that answered."""
NAMED = (TARGET, "X-SMG-Routing-Key")
"""Request headers by which a client selects the worker itself."""
ERROR = "X-SMG-Error-Code"
NOT_REACHED = ("call_upstream_connection_failed", "no_available_workers")
BROKE_OFF = "call_upstream_request_error"
"""The worker died and may have had the prompt. Retried only once, in case the prompt killed it."""
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding")
    + ("upgrade", "host")
)
REFRESH_S = 5.0

logger = logging.getLogger(__name__)


class Middleware:
    """The middleware's HTTP application and its state.

    router: the router's URL.
    hashes: to follow workers' KV events; None not to.
    workers: the URLs of the workers that the router reports as healthy, in its order.
    down: workers that the router failed to reach since the last periodic refresh.
    in_flight: number of requests by worker.
    """

    def __init__(self, router: str, picker: Picker, hashes: BlockHashes | None):
        self.router, self.picker, self.hashes = router.rstrip("/"), picker, hashes
        self.workers: list[str] = []
        self.down: set[str] = set()
        self.in_flight: Counter[Hashable] = Counter()
        self._changed = asyncio.Event()
        self._followers: dict[str, asyncio.Task[None]] = {}
        # Tokenizing documents takes milliseconds and must not block streams. One thread, since the tokenizer caches.
        self._reader = ThreadPoolExecutor(1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=0)  # the router has a limit of its own
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _app: web.Application) -> AsyncIterator[None]:
        limits = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(auto_decompress=False, connector=limits, timeout=timeout) as self.session:
            task = asyncio.create_task(self._refresh_periodically())
            yield
            tasks = [task, *self._followers.values()]
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._reader.shutdown()

    async def _refresh_periodically(self) -> None:
        while True:
            self._changed.clear()
            await self.refresh()
            self.down.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), REFRESH_S)

    async def refresh(self) -> None:
        """Ask the router for its workers; keep the current ones if it does not answer."""
        try:
            async with self.session.get(f"{self.router}/workers", timeout=aiohttp.ClientTimeout(REFRESH_S)) as answer:
                listed = (await answer.json())["workers"]
            workers = [worker["url"] for worker in listed if worker["is_healthy"]]
        except (TimeoutError, aiohttp.ClientError, KeyError, TypeError, ValueError) as error:
            logger.warning("the router %s does not list its workers: %r", self.router, error)
            return
        for worker in set(self.workers) - set(workers):
            self.picker.forget(worker)
            if worker in self._followers:
                self._followers.pop(worker).cancel()
        self.workers = workers
        if self.hashes is not None:
            for worker in set(workers) - self._followers.keys():
                self._followers[worker] = asyncio.create_task(follow(worker, self.picker, self.hashes))

    async def handle(self, incoming: web.Request) -> web.StreamResponse:
        """Forward a request to a worker that has its chunks."""
        data = await incoming.read()
        chunks = await asyncio.get_running_loop().run_in_executor(self._reader, self._chunks, data)
        if SALT_HEADER in incoming.headers:
            message = f"the router does not pass on {SALT_HEADER}: put cache_salt into the body"
            return web.json_response({"error": {"message": message}}, status=400)
        chooses = incoming.method == "POST" and not any(name in incoming.headers for name in NAMED)
        again = [*NOT_REACHED, BROKE_OFF]
        while True:
            pick = self._pick(chunks) if chooses else None
            with self._counted(pick):
                try:
                    answer = await self._ask(incoming, data, pick)
                except aiohttp.ClientConnectionError as reason:
                    message = f"the router does not answer: {reason}"
                    return web.json_response({"error": {"message": message}}, status=502)
                async with answer:
                    error = answer.headers.get(ERROR)
                    if pick is None or error not in again:
                        return await self._relay(incoming, answer, chunks, pick)
            if error == BROKE_OFF:
                again.remove(error)
            self.down.add(str(pick.worker))
            self.picker.forget(pick.worker)
            await self.refresh()

    def _chunks(self, data: bytes) -> list[tuple[Hashable, int]]:
        try:
            return chunks_in(json.loads(data), self.hashes) if data else []
        except (ValueError, RecursionError):
            return []

    def _pick(self, chunks: Sequence[tuple[Hashable, int]]) -> Pick | None:
        """The worker for these chunks; None if there is none, so that the router may report what is wrong."""
        loads = {worker: self.in_flight[worker] for worker in self.workers if worker not in self.down}
        return self.picker.pick(dict(chunks), loads) if loads else None

    @contextlib.contextmanager
    def _counted(self, pick: Pick | None) -> Iterator[None]:
        if pick is None:
            yield
            return
        self.in_flight[pick.worker] += 1
        try:
            yield
        finally:
            self.in_flight[pick.worker] -= 1

    async def _ask(self, incoming: web.Request, data: bytes, pick: Pick | None) -> aiohttp.ClientResponse:
        headers = incoming.headers.copy()
        unpacked = ("Content-Encoding", "Content-Length") if "Content-Encoding" in headers else ()  # by aiohttp
        for name in (*HOP_BY_HOP, *unpacked):
            headers.popall(name, None)
        if pick is not None:
            headers[TARGET] = str(self.workers.index(str(pick.worker)))
        return await self.session.request(
            incoming.method,
            URL(self.router + incoming.raw_path, encoded=True),
            data=data or None,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def _relay(
        self,
        incoming: web.Request,
        answer: aiohttp.ClientResponse,
        chunks: Sequence[tuple[Hashable, int]],
        pick: Pick | None,
    ) -> web.StreamResponse:
        """Stream the answer to the client, and learn from the hits in it."""
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        response.headers.extend(
            (name, value) for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP
        )
        await response.prepare(incoming)
        line = bytearray()
        hits: dict[Hashable, bool] = {}
        async for data in answer.content.iter_any():
            await response.write(data)
            if chunks and not hits:
                *ended, rest = data.split(b"\n")
                for end in ended:
                    hits = hits or hits_by_chunk(chunks, bytes(line + end))
                    line.clear()
                line += rest
        if pick is not None and answer.ok:
            routed = answer.headers.get(ROUTED, pick.worker)
            if routed != pick.worker:  # the list of workers has changed
                self._changed.set()
                pick = self.picker.pick(dict(chunks), {routed: 0})
            pick.answered(hits or hits_by_chunk(chunks, bytes(line)))
        await response.write_eof()
        return response
