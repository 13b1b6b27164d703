"""Measures the routes and the memory of a real server with many cached chunks.

    python -m benchmark.scheduler.many --chunks 50000 --out many.jsonl

The chunks are random tokens, registered 1,000 at a time. Then each route is called repeatedly while one request
decodes: the longest pause between two of its tokens shows how long a route holds up answers, in any process.
Memory is a process's growth per chunk since before the registrations; the KV pool is allocated at the start and does
not count. With `--screenshots FOLDER` a headless Chromium opens the page meanwhile and saves it there as PNG files.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmark.scheduler.page import shoot
from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment
from benchmark.serving.workloads import draw_distinct, zipf_weights
from oracle.models.build import build
from oracle.tokenizer import VOCAB_SIZE
from sglang_lazy.testing import device_flags, running_server

BATCH = 1000
"""The most chunks that one call registers, lists or deletes."""
TEXT = [11, 12, 13]
IDLE = 3.0
"""Seconds without calls, for comparison."""


class Stream(threading.Thread):
    """Decodes one request at a time until `stop`.  pauses: the end of each pause, and its length in seconds."""

    def __init__(self, url: str, num_tokens: int):
        super().__init__(daemon=True)
        self.pauses: list[tuple[float, float]] = []
        self._url, self._num_tokens, self._ended = url, num_tokens, False

    def run(self) -> None:
        params = {"temperature": 0, "max_new_tokens": self._num_tokens, "ignore_eos": True}
        body = {"input_ids": TEXT, "sampling_params": params, "stream": True}
        while not self._ended:
            with requests.post(f"{self._url}/generate", json=body, stream=True, timeout=60) as response:
                response.raise_for_status()
                last = None
                for line in response.iter_lines(chunk_size=1):
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.pauses.append((now, now - last))
                        last = now
                    if self._ended:
                        return

    def stop(self) -> None:
        self._ended = True
        self.join()

    def between(self, start: float, end: float) -> list[float]:
        """The pauses that overlap with [start, end)."""
        return [pause for at, pause in self.pauses if at > start and at - pause < end]


class Server:
    """Calls to one server over one connection."""

    def __init__(self, url: str):
        self.url, self.session = url, requests.Session()
        port = int(url.rpartition(":")[2])
        (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
        http = psutil.Process(pid)
        (scheduler,) = [process for process in http.children(recursive=True) if "scheduler" in process.name()]
        self.processes = {"HTTP": http, "scheduler": scheduler}

    def call(self, method: str, path: str, body: Any = None, expected: Iterable[int] = (200,)) -> requests.Response:
        response = self.session.request(method, f"{self.url}{path}", json=body, timeout=300)
        assert response.status_code in expected, f"{method} {path}: {response.status_code} {response.text:.300}"
        return response

    def memory(self) -> dict[str, int]:
        """Bytes of memory of each process."""
        return {name: process.memory_info().rss for name, process in self.processes.items()}


def measured(what: str, calls: Iterable[Callable[[], Any]], stream: Stream | None) -> dict:
    """Make the calls; returns a row of results."""
    times, begin = [], time.perf_counter()
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    end = time.perf_counter()
    row = {
        "what": what,
        "calls": len(times),
        "ms_p50": round(1e3 * statistics.median(times), 2),
        "ms_max": round(1e3 * max(times), 2),
        "seconds": round(end - begin, 3),
    }
    if stream is not None:
        time.sleep(0.3)  # includes the token after the last call
        pauses = stream.between(begin, end)
        row |= {"pause_ms_p50": round(1e3 * statistics.median(pauses), 2), "pause_ms_max": round(1e3 * max(pauses), 2)}
    return row


def registrations(server: Server, args: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    rng = random.Random(args.seed)
    for start in range(0, args.chunks, BATCH):
        count = min(BATCH, args.chunks - start)
        chunks = [{"input_ids": rng.choices(range(20, VOCAB_SIZE), k=args.chunk_len)} for _ in range(count)]
        yield lambda chunks=chunks: server.call("POST", "/chunks", {"chunks": chunks, "wait": True})


def prompts(server: Server, ids: list[str], args: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    rng, weights = random.Random(args.seed), zipf_weights(len(ids), 0.9)
    for _ in range(args.prompts):
        chunks = [{"type": "chunk", "id": ids[i]} for i in draw_distinct(rng, weights, 5)]
        body = {"segments": [*chunks, {"type": "text", "input_ids": TEXT}], "sampling_params": {"max_new_tokens": 1}}
        yield lambda body=body: server.call("POST", "/generate", body)


def pages(server: Server, query: str, num_pages: int) -> Iterator[Callable[[], Any]]:
    """One page after another."""
    cursor = ""

    def turn() -> None:
        nonlocal cursor
        page = server.call("GET", f"/chunks?{query}{cursor}").json()
        cursor = f"&cursor={page['next']}" if page["next"] else ""

    yield from itertools.repeat(turn, num_pages)


def all_ids(server: Server) -> list[str]:
    found, cursor = [], ""
    while cursor is not None:
        page = server.call(
            "GET", f"/chunks?sort=created&order=asc&limit={BATCH}{cursor and '&cursor=' + cursor}"
        ).json()
        found += [chunk["id"] for chunk in page["chunks"]]
        cursor = page["next"]
    return found


def pins(server: Server, ids: Iterable[str], ttl: float) -> Iterator[Callable[[], Any]]:
    """Pin one chunk after another, until all are pinned or the budget is spent."""
    full = False

    def pin(name: str) -> None:
        nonlocal full
        answer = server.call("PATCH", f"/chunks/{name}", {"pin": True, "ttl": ttl}, expected=(200, 409))
        full = answer.status_code == 409

    for name in ids:
        yield lambda name=name: pin(name)
        if full:
            return


def rows(server: Server, args: argparse.Namespace) -> Iterator[dict]:
    server.call("POST", "/freeze_gc")  # as docs/operations.md recommends
    before, batches = server.memory(), []
    for call in registrations(server, args):
        batches.append(measured("", [call], None)["seconds"])
    gained = {name: size - before[name] for name, size in server.memory().items()}
    yield {
        "what": f"POST /chunks, {BATCH} each",
        "calls": len(batches),
        "ms_p50": round(1e3 * statistics.median(batches), 2),
        "ms_max": round(1e3 * max(batches), 2),
        "seconds": round(sum(batches), 2),
        "first_s": statistics.median(batches[:5]),
        "last_s": statistics.median(batches[-5:]),
    }
    for name, size in gained.items():
        yield {"what": f"{name} process", "bytes_per_chunk": round(size / args.chunks)}
    ids = all_ids(server)
    yield measured("POST /generate, 5 chunks by id", prompts(server, ids, args), None)
    stream = Stream(server.url, 1900)
    stream.start()
    time.sleep(1)
    yield measured("nothing", [lambda: time.sleep(IDLE)], stream)
    for sort in ("last_use", "hits", "tokens", "created"):
        yield measured(f"GET /chunks?sort={sort}", pages(server, f"sort={sort}&limit=100", 20), stream)
    yield measured(f"GET /chunks?limit={BATCH}", pages(server, f"sort=created&limit={BATCH}", 20), stream)
    for state in ("resident", "host", "pending", "loading"):
        yield measured(f"GET /chunks?state={state}", pages(server, f"state={state}", 20), stream)
    yield measured(
        "GET /chunks/{id}", [lambda name=name: server.call("GET", f"/chunks/{name}") for name in ids[:200]], stream
    )
    yield measured("GET /lazy_info", [lambda: server.call("GET", "/lazy_info")] * 20, stream)
    yield measured("GET /metrics", [lambda: server.call("GET", "/metrics")] * 20, stream)
    yield measured("GET /lazy/survey", [lambda: server.call("GET", "/lazy/survey")] * 3, stream)
    if args.screenshots is not None:
        yield measured("GET /lazy in a browser", [lambda: screenshots(server, args)], stream)
    yield measured("PATCH /chunks/{id}", pins(server, ids[: args.pins], 3600.0), stream)
    some = ids[-args.chunks // 5 :]
    batches = [some[i : i + BATCH] for i in range(0, len(some), BATCH)]
    calls = [lambda few=few: server.call("DELETE", "/chunks?id=" + "&id=".join(few)) for few in batches]
    yield measured(f"DELETE /chunks, {BATCH} each", calls, stream)
    stream.stop()
    time.sleep(1)
    yield measured("POST /flush_cache", [lambda: server.call("POST", "/flush_cache")], None)
    assert server.call("GET", "/chunks").json()["total"] == 0


def screenshots(server: Server, args: argparse.Namespace) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser)
        shoot(browser, f"{server.url}/lazy", "page", args.screenshots / f"served-{args.chunks}.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = typed(positive)
    parser.add_argument("--chunks", type=count, default=50_000)
    parser.add_argument("--chunk-len", type=count, default=16, help="tokens")
    parser.add_argument("--prompts", type=count, default=200)
    parser.add_argument("--pins", type=count, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--screenshots", type=Path, help="folder")
    parser.add_argument("--browser", default="/usr/bin/chromium-headless-shell")
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="of the server")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are written to this file")
    args = parser.parse_args()
    flags = [
        *device_flags(),
        "--max-total-tokens",
        str(args.chunks * (args.chunk_len + 1) + 10_000),
        "--enable-metrics",
    ]
    with tempfile.TemporaryDirectory() as folder, open(args.out, "w", encoding="utf-8") as out:
        environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=flags)
        print(json.dumps({"environment": environment}), file=out, flush=True)
        model = build("llama", Path(folder))
        with running_server(["--model-path", model, *flags], args.log, as_command=True) as url:
            for row in rows(Server(url), args):
                print(json.dumps(row), file=out, flush=True)
                print(row, flush=True)


if __name__ == "__main__":
    main()
