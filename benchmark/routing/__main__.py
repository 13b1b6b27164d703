"""Measures the chunk hit rate of several servers behind the router `smg`, by routing method.

    python -m benchmark.routing --out docs/results/routing/rows.jsonl

Workers are real servers of a tiny model on this machine. Each has room for an eighth of all documents, so it matters
which ones. All caches are flushed before each row; the first prompts, which refill them, are not counted.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import requests

from benchmark.routing.processes import running_middleware, running_smg
from benchmark.routing.traffic import TRAFFIC, Traffic, tokens_of
from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment
from oracle.models.build import build
from sglang_lazy.testing import Client, device_flags, running_server
from sglang_lazy.testing.server import free_ports

SMG = Path(sys.prefix) / "smg" / "bin" / "smg"

DOCUMENT_TOKENS = 32
TEXT = list(range(10, 14))
SHARE = 8
"""The number of workers that would hold all documents."""


class Policy(NamedTuple):
    """flags: of the router.  key: the `X-SMG-Routing-Key` of a prompt.

    middlewares: how many of ours run in front of it; prompts alternate between them.  events: they follow KV events.
    """

    flags: Sequence[str] = ()
    key: Callable[[int, Sequence[int]], str] | None = None
    middlewares: int = 0
    events: bool = False


POLICIES = {
    "round robin": Policy(("--policy", "round_robin")),
    "smg's default (cache_aware)": Policy(("--policy", "cache_aware")),
    "hash of the chunk set": Policy(
        key=lambda _, documents: hashlib.sha256(repr(sorted(documents)).encode()).hexdigest()
    ),
    "key of the application": Policy(key=lambda collection, _: f"collection-{collection}"),
    "picker": Policy(middlewares=1),
    "picker, KV events": Policy(middlewares=1, events=True),
    "two pickers": Policy(middlewares=2),
    "two pickers, KV events": Policy(middlewares=2, events=True),
}


def ask(url: str, policy: Policy, collection: int, documents: Sequence[int], local: threading.local) -> dict:
    """Send one prompt; returns what its answer reports."""
    chunks = [{"type": "chunk", "input_ids": tokens_of(document, DOCUMENT_TOKENS)} for document in documents]
    segments = [{"type": "text", "input_ids": TEXT}, *chunks, {"type": "text", "input_ids": TEXT}]
    headers = {"X-SMG-Routing-Key": policy.key(collection, documents)} if policy.key else {}
    body = {"segments": segments, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
    if not hasattr(local, "session"):
        local.session = requests.Session()
    start = time.perf_counter()
    answer = local.session.post(f"{url}/generate", json=body, headers=headers, timeout=60)
    seconds = time.perf_counter() - start
    answer.raise_for_status()
    hits = [chunk["hit"] for chunk in answer.json()["meta_info"]["chunks"]]
    return {"hits": hits, "seconds": seconds, "worker": answer.headers["X-SMG-Routed-Worker-Id"]}


def measure(urls: Sequence[str], policy: Policy, traffic: Traffic, args: argparse.Namespace) -> dict:
    """A row of results: one kind of traffic under one policy.  urls: used in turn."""
    drawn = itertools.islice(traffic.prompts(args.seed), args.warm_up + args.requests)
    prompts = list(zip(itertools.cycle(urls), drawn))
    local = threading.local()
    with ThreadPoolExecutor(args.concurrency) as pool:

        def send(some: Sequence[tuple[str, tuple[int, list[int]]]]) -> list[dict]:
            return list(pool.map(lambda one: ask(one[0], policy, *one[1], local), some))

        send(prompts[: args.warm_up])
        start = time.perf_counter()
        answers = send(prompts[args.warm_up :])
        seconds = time.perf_counter() - start
    hits = [hit for answer in answers for hit in answer["hits"]]
    served = Counter(answer["worker"] for answer in answers)
    return {
        "requests": len(answers),
        "chunk_hit_rate": round(statistics.mean(hits), 4),
        "busiest": round(max(served.values()) * args.workers / len(answers), 3),
        "requests_per_s": round(len(answers) / seconds, 2),
        "ms_p50": round(1e3 * statistics.median(answer["seconds"] for answer in answers), 1),
    }


def rows(args: argparse.Namespace, logs: Path) -> Iterator[dict]:
    documents = max(traffic.collections * traffic.size for traffic in TRAFFIC.values())
    pool = documents // SHARE * DOCUMENT_TOKENS + 32 * args.concurrency  # text and answers of running requests
    model = build("llama", args.models)
    flags = ["--model-path", model, "--max-total-tokens", str(pool), *device_flags()]
    with ExitStack() as stack:
        workers = []
        for index, port in enumerate(free_ports(args.workers)):
            events = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{port}"})
            server = running_server([*flags, "--kv-events-config", events], logs / f"worker-{index}.log")
            workers.append(stack.enter_context(server))
        for name, policy in POLICIES.items():
            for traffic_name, traffic in TRAFFIC.items():
                for worker in workers:
                    Client(worker).flush_cache()
                with ExitStack() as front:
                    smg = front.enter_context(running_smg(args.smg, workers, logs / "smg.log", policy.flags))
                    learning = ["--kv-events", model] if policy.events else []
                    urls = [
                        front.enter_context(running_middleware(smg, logs / f"middleware-{index}.log", learning))
                        for index in range(policy.middlewares)
                    ]
                    yield {"traffic": traffic_name, "policy": name, **measure(urls or [smg], policy, traffic, args)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = typed(positive)
    parser.add_argument("--smg", type=Path, default=SMG, help="the router's command; default: that of `make test-all`")
    parser.add_argument("--workers", type=count, default=4)
    parser.add_argument("--requests", type=count, default=800, help="measured for each row")
    parser.add_argument("--warm-up", type=count, default=400, help="requests before these")
    parser.add_argument("--concurrency", type=count, default=16, help="requests in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are written to this file")
    args = parser.parse_args()
    environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=device_flags())
    asked = [args.smg.with_name("python"), "-c", "import importlib.metadata; print(importlib.metadata.version('smg'))"]
    environment["versions"]["smg"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder, open(args.out, "w", encoding="utf-8") as out:
        args.models = Path(folder)
        print(json.dumps({"environment": environment}), file=out, flush=True)
        for row in rows(args, Path(folder)):
            print(json.dumps(row), file=out, flush=True)
            print(row, flush=True)


if __name__ == "__main__":
    main()
