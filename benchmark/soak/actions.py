"""The actions of a soak's clients: each sends one or more requests and checks the answers."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from benchmark.soak.prompts import NUM_TOKENS, Draw, Prompt
from oracle.segments import Segment, token_ids
from sglang_lazy.core.keys import chunk_id, tokens_digest

PATIENCE = 90
"""Seconds after which a request counts as hung."""
TENANTS = (None, "soak-a", "soak-b")
SAMPLING = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
TEXT = {"type": "text", "input_ids": [11, 12]}
MALFORMED: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/generate", {"segments": "text"}),
    ("POST", "/generate", {"segments": []}),
    ("POST", "/generate", {"segments": [{"type": "chunk"}, TEXT]}),
    ("POST", "/generate", {"segments": [{"type": "chunk", "input_ids": [-1]}, TEXT]}),
    ("POST", "/generate", {"segments": [{"type": "chunk", "input_ids": [10**9]}, TEXT]}),
    ("POST", "/generate", {"segments": [{"type": "chunk", "id": "zz"}, TEXT]}),
    ("POST", "/generate", {"segments": [{"type": "picture", "input_ids": [5]}, TEXT]}),
    ("POST", "/generate", {"segments": [TEXT], "link": "epic:tokens=many"}),
    ("POST", "/generate", {"segments": [TEXT], "cache_salt": 7}),
    ("POST", "/generate", {"segments": [TEXT], "sampling_params": {"temperature": "hot"}}),
    ("POST", "/generate", {"segments": [{"type": "chunk", "input_ids": [20] * 5000}, TEXT]}),
    ("POST", "/v1/completions", {"model": "soak", "prompt": "x", "segments": "y"}),
    ("POST", "/v1/chat/completions", {"model": "soak", "messages": [{"role": "user", "content": [{"type": "chunk"}]}]}),
    ("POST", "/chunks", {"chunks": []}),
    ("POST", "/chunks", {"chunks": [{"input_ids": ["a"]}]}),
    ("POST", "/chunks", {"chunks": [{"input_ids": [5, 6]}], "ttl": -1, "pin": True}),
    ("GET", "/chunks?limit=0", None),
    ("GET", "/chunks?cursor=none-such", None),
    ("PATCH", "/chunks/0123456789abcdef", {"pin": "yes"}),
    ("DELETE", "/chunks/short", None),
)


class Wrong(AssertionError):
    """An answer that the server must not give."""


@dataclasses.dataclass
class Client:
    """One client of the server at `url`; `rng` decides what it does next.

    counts: of actions, by name.
    asked, found: answers to prompts of each kind, and those that found something of that kind in the cache.
    """

    url: str
    session: aiohttp.ClientSession
    draw: Draw
    rng: random.Random
    name: str
    counts: Counter[str]
    asked: Counter[str]
    found: Counter[str]
    _numbers: Any = dataclasses.field(default_factory=itertools.count)

    async def act(self) -> None:
        """Do one random action. Raises Wrong."""
        actions, weights = zip(*ACTIONS, strict=True)
        action = self.rng.choices(actions, weights)[0]
        await action(self)
        self.counts[action.__name__] += 1

    async def ask(self) -> None:
        """Ask a prompt; the answer must be the oracle's."""
        prompt = self.draw()
        status, body = await self._generate(prompt, self._segments(prompt), self.rng.choice(TENANTS))
        self._expect(status, {200}, body)
        self._check_answer(prompt, body["output_ids"])
        self._count_hit("text" if prompt.is_text else "chunks", body["meta_info"])

    async def ask_as_text(self) -> None:
        """Ask a prompt under `full`, as plain tokens."""
        prompt = next(found for found in iter(self.draw, None) if found.is_text)
        body = {"input_ids": token_ids(list(prompt.segments)), "sampling_params": SAMPLING}
        body |= _salt(self.rng.choice(TENANTS))
        status, answer = await self._call("POST", "/generate", body)
        self._expect(status, {200}, answer)
        self._check_answer(prompt, answer["output_ids"])
        self._count_hit("text", answer["meta_info"])

    async def ask_by_id(self) -> None:
        """Refer to chunks by ids, which the server may not know (any more)."""
        prompt, tenant = self.draw(), self.rng.choice(TENANTS)
        segments = [{"type": "chunk", "id": _id(s)} if s.kind == "chunk" else s.to_request() for s in prompt.segments]
        status, body = await self._generate(prompt, segments, tenant)
        self._expect(status, {200, 404}, body)
        if status == 200:
            self._check_answer(prompt, body["output_ids"])

    async def leave(self) -> None:
        """Disconnect from a stream before or after the first token."""
        prompt = self.draw()
        body = self._body(prompt, self._segments(prompt), self.rng.choice(TENANTS)) | {"stream": True}
        timeout = aiohttp.ClientTimeout(total=self.rng.uniform(0.01, 1))
        with contextlib.suppress(asyncio.TimeoutError):
            async with self.session.post(f"{self.url}/generate", json=body, timeout=timeout) as response:
                self._expect(response.status, {200}, None)
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        message = json.loads(line[len(b"data: ") :])
                        self._check_answer(prompt, message["output_ids"], whole=False)

    async def abort(self) -> None:
        """Abort a request by its id soon after sending it."""
        prompt, rid = self.draw(), f"{self.name}-{next(self._numbers)}"
        body = self._body(prompt, self._segments(prompt), self.rng.choice(TENANTS)) | {"rid": rid}
        asked = asyncio.create_task(self._call("POST", "/generate", body))
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        status, answer = await self._call("POST", "/abort_request", {"rid": rid})
        self._expect(status, {200}, answer)
        status, answer = await asked
        self._expect(status, {200, 400, 503}, answer)
        if status == 200:
            self._check_answer(prompt, answer["output_ids"], whole=False)

    async def register(self) -> None:
        """Register chunks ahead of use, some of them pinned."""
        chunks = self.draw().chunks
        if chunks:
            body = {"chunks": [{"input_ids": list(c.ids)} for c in chunks], "wait": self.rng.random() < 0.5}
            body |= {"pin": True, "ttl": self.rng.uniform(0.5, 3)} if self.rng.random() < 0.4 else {}
            status, answer = await self._call("POST", "/chunks", body, self.rng.choice(TENANTS))
            self._expect(status, {200, 202}, answer)

    async def pin(self) -> None:
        """Pin a chunk, or end its pin."""
        if chunk := self._any_chunk():
            body = {"pin": self.rng.random() < 0.6, "ttl": 2}
            body = body if body["pin"] else {"pin": False}
            path, tenant = f"/chunks/{_id(chunk)}", self.rng.choice(TENANTS)
            status, answer = await self._call("PATCH", path, body, tenant)
            self._expect(status, {200, 404, 409}, answer)

    async def delete(self) -> None:
        if chunk := self._any_chunk():
            status, answer = await self._call("DELETE", f"/chunks/{_id(chunk)}", None, self.rng.choice(TENANTS))
            self._expect(status, {200, 404, 409}, answer)

    async def browse(self) -> None:
        """Page through the list of cached chunks."""
        tenant, cursor = self.rng.choice(TENANTS), None
        sort = self.rng.choice(["last_use", "hits", "tokens", "created"])
        for _ in range(4):
            query = f"sort={sort}&limit=3" + (f"&cursor={cursor}" if cursor else "")
            status, page = await self._call("GET", f"/chunks?{query}", None, tenant)
            self._expect(status, {200}, page)
            if any(chunk["cache_salt"] != tenant for chunk in page["chunks"]):
                raise Wrong(f"{tenant} was shown another tenant's chunks: {page}")
            cursor = page["next"]
            if cursor is None:
                break

    async def misuse(self) -> None:
        """Send a request that must be refused and must not affect others."""
        method, path, body = self.rng.choice(MALFORMED)
        status, answer = await self._call(method, path, body)
        if not 400 <= status < 500:
            raise Wrong(f"{method} {path} {str(body)[:200]}: {status} {answer}")

    async def flush(self) -> None:
        """Flush the cache; SGLang refuses while requests run."""
        status, answer = await self._call("POST", "/flush_cache")
        self._expect(status, {200, 400}, answer)

    def _any_chunk(self) -> Segment | None:
        chunks = self.draw().chunks
        return self.rng.choice(chunks) if chunks else None

    def _segments(self, prompt: Prompt) -> list[dict]:
        return [segment.to_request() for segment in prompt.segments]

    def _body(self, prompt: Prompt, segments: list[dict], tenant: str | None) -> dict:
        return {"segments": segments, "link": prompt.link, "sampling_params": SAMPLING, **_salt(tenant)}

    async def _generate(self, prompt: Prompt, segments: list[dict], tenant: str | None) -> tuple[int, Any]:
        return await self._call("POST", "/generate", self._body(prompt, segments, tenant))

    async def _call(self, method: str, path: str, body: Any = None, tenant: str | None = None) -> tuple[int, Any]:
        """The status and body of a response."""
        headers = {} if tenant is None else {"X-Cache-Salt": tenant}
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        try:
            async with self.session.request(
                method, self.url + path, json=body, headers=headers, timeout=timeout
            ) as response:
                text = await response.text()
        except TimeoutError:
            raise Wrong(f"{method} {path} hung: {str(body)[:300]}") from None
        except aiohttp.ClientError as error:
            raise Wrong(f"{method} {path}: {error!r}: {str(body)[:300]}") from None
        with contextlib.suppress(json.JSONDecodeError):
            return response.status, json.loads(text)
        return response.status, text

    def _count_hit(self, kind: str, meta: dict[str, Any]) -> None:
        details = meta.get("cached_tokens_details") or {}
        self.asked[kind] += 1
        self.found[kind] += (details.get("chunk", 0) if kind == "chunks" else meta["cached_tokens"]) > 0

    def _expect(self, status: int, allowed: set[int], answer: Any) -> None:
        if status not in allowed:
            raise Wrong(f"{status} where {sorted(allowed)} may be: {str(answer)[:500]}")

    def _check_answer(self, prompt: Prompt, tokens: list[int], whole: bool = True) -> None:
        """Raise Wrong unless the answer is right.  whole: it must be complete."""
        expected = prompt.answer if whole else prompt.answer[: len(tokens)]
        if tuple(tokens) != expected:
            raise Wrong(f"{tokens} instead of {expected}, to {prompt}")


ACTIONS: tuple[tuple[Callable[[Client], Awaitable[None]], int], ...] = (
    (Client.ask, 40),
    (Client.ask_as_text, 25),
    (Client.ask_by_id, 8),
    (Client.leave, 12),
    (Client.abort, 8),
    (Client.register, 6),
    (Client.pin, 5),
    (Client.delete, 5),
    (Client.browse, 3),
    (Client.misuse, 6),
    (Client.flush, 2),
)
"""The actions of clients, with their relative frequencies."""


def _salt(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"cache_salt": tenant}


def _id(chunk: Segment) -> str:
    return chunk_id(tokens_digest(chunk.ids))
