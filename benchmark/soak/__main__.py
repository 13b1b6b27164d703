"""Keeps a small server under hostile traffic for minutes and compares every answer with the oracle's.

    python -m benchmark.soak --minutes 15

Clients send prompts with chunks, without chunks, as plain text and by chunk ids, under several policies and tenants.
They disconnect mid-stream, abort, register, pin, delete and list chunks, flush the cache, and send malformed requests.
The KV pool holds only a few prompts, neither all chunks nor all text, so both kinds evict each other; yet each must
find something in the cache. Each variant of the server gets its share of the time, in rounds. After a round the server
must become idle within seconds; it then checks its accounting, and a leaked slot or lock ends it. Then its cache is
flushed and must be empty, and the next answer must be right without it.

Exits with 1 at the first answer that is wrong, missing or late, or if prompts of one kind never hit; prints the request
and the path of the server's log.
"""

import argparse
import asyncio
import collections
import dataclasses
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from benchmark.soak.actions import SAMPLING, TENANTS, Client, Wrong
from benchmark.soak.prompts import Draw, Prompt, make_prompts
from oracle.models.build import build
from sglang_lazy.testing import ServerError, device_flags, log_tail, running_server

COMMON = (
    "--max-total-tokens",
    "700",
    "--chunked-prefill-size",
    "64",
    "--max-running-requests",
    "6",
    "--enable-metrics",
)
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
STORAGE = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "timeout")


@dataclasses.dataclass(frozen=True)
class Variant:
    """Server flags beyond COMMON, and environment variables."""

    flags: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


# SGLang retracts running requests every third step, even if memory suffices.
RETRACT = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
VARIANTS = {
    "device": Variant(),
    "host": Variant(HOST),
    "storage": Variant((*HOST, *STORAGE)),
    "retraction": Variant(("--disable-overlap-schedule",), RETRACT),
    # Requests copy their chunks, so prompts take twice as many slots.
    "copies": Variant(("--lazy-default-link", "copy", "--max-total-tokens", "1300"), RETRACT),
}

Counts = Mapping[str, int]


async def soak(url: str, prompts: list[Prompt], args: argparse.Namespace, seconds: float) -> tuple[Counts, Counts]:
    """Run rounds of traffic for this long; returns the count of each action, and the hits of each kind of prompts in
    percent. Raises Wrong."""
    counts, asked, found = (collections.Counter[str]() for _ in range(3))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = []
        for number in range(args.clients):
            rng = random.Random(f"{args.seed}/{number}")
            clients.append(Client(url, session, Draw(prompts, rng), rng, f"client-{number}", counts, asked, found))
        end = time.monotonic() + seconds
        for turn in itertools.count():
            await asyncio.gather(*(_until(min(end, time.monotonic() + args.round), client) for client in clients))
            await _settled(url, session, clients[0], prompts[turn % len(prompts)])
            if time.monotonic() >= end:
                hits = {kind: round(100 * found[kind] / number) for kind, number in asked.items()}
                if starved := [kind for kind in ("chunks", "text") if not hits.get(kind)]:
                    raise Wrong(f"prompts with {' and '.join(starved)} find nothing in the cache: {found} of {asked}")
                return counts, hits


async def _until(end: float, client: Client) -> None:
    while time.monotonic() < end:
        await client.act()


async def _settled(url: str, session: aiohttp.ClientSession, client: Client, prompt: Prompt) -> None:
    """Check that the server becomes idle, empties its cache, has all memory back, and still serves. Raises Wrong."""
    async with session.post(f"{url}/flush_cache", params={"timeout": 30}) as response:
        if response.status != 200:
            raise Wrong(f"the server does not become idle: {response.status} {await response.text()}")
    for tenant in TENANTS:
        headers = {} if tenant is None else {"X-Cache-Salt": tenant}
        async with session.get(f"{url}/chunks", headers=headers) as response:
            page = await response.json()
        if response.status != 200 or page["total"]:
            raise Wrong(f"chunks left after a flush: {page}")
    async with session.get(f"{url}/lazy/survey") as response:
        memory = (await response.json())["memory"]
    if any(tier is not None and tier["free"] != tier["size"] for tier in memory.values()):
        raise Wrong(f"slots in use after a flush: {memory}")
    body = {"segments": [segment.to_request() for segment in prompt.segments], "link": prompt.link}
    async with session.post(f"{url}/generate", json={**body, "sampling_params": SAMPLING}) as response:
        answer = await response.json()
    if response.status != 200 or tuple(answer["output_ids"]) != prompt.answer:
        raise Wrong(f"after a flush: {answer} to {prompt}")
    meta = answer["meta_info"]
    if meta["cached_tokens"] != (meta.get("cached_tokens_details") or {}).get("storage", 0):
        raise Wrong(f"cached tokens after a flush that are not in storage: {meta}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="for all variants together, not counting start-up")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--round", type=float, default=15, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (default: a new one)")
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    logs.mkdir(parents=True, exist_ok=True)
    seconds = 60 * args.minutes / len(args.variants)
    with tempfile.TemporaryDirectory() as scratch:
        model_path = build("llama", Path(scratch))
        prompts = make_prompts(model_path, args.seed, args.prompts)
        for name in args.variants:
            variant, log = VARIANTS[name], logs / f"{name}.log"
            flags = [
                "--model-path",
                model_path,
                "--served-model-name",
                "soak",
                *COMMON,
                *variant.flags,
                *device_flags(),
            ]
            environment = {**variant.environment, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": f"{scratch}/storage"}
            try:
                with running_server(flags, log, environment=environment) as url:
                    counts, hits = asyncio.run(soak(url, prompts, args, seconds))
            except (Wrong, ServerError) as error:
                print(f"{name}: {error}\n{log_tail(log)}\nAll of it: {log}", file=sys.stderr)
                return 1
            said = log.read_text(errors="replace")
            if "Traceback" in said:
                print(f"{name}: an exception is in {log}", file=sys.stderr)
                return 1
            if ("Testing retraction" in said) != (variant.environment == RETRACT):
                print(f"{name}: requests were retracted unexpectedly, or not at all: see {log}", file=sys.stderr)
                return 1
            total = sum(counts.values())
            did = ", ".join(f"{action} {count}" for action, count in sorted(counts.items()))
            hit = ", ".join(f"{percent}% of prompts with {kind}" for kind, percent in sorted(hits.items()))
            print(f"{name}: {total} actions in {seconds:.0f} s, all allowed: {did}; hits: {hit}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
