"""Measures one contender's run against a running server."""

import collections
import gc
import math
from collections.abc import Iterator

import requests

from benchmark.serving.case import Run
from benchmark.serving.contenders import contender
from benchmark.serving.load import send
from benchmark.serving.metrics import ServerGauges, is_saturated, summarise
from sglang_lazy.testing import Client

WARM_UP_CONVERSATIONS = 2


def freeze_objects(url: str) -> None:
    """Exclude existing objects of the server and of this process from garbage collection.

    Every few minutes a full collection stops an SGLang process for half a second, and which contender it hits is
    chance. SGLang recommends freezing after warm-up.
    """
    requests.post(f"{url}/freeze_gc", timeout=60).raise_for_status()
    gc.freeze()


def measure(url: str, name: str, run: Run, seed: int, kv_bytes: int) -> Iterator[list[dict]]:
    """Measure a run from an empty cache, stage by stage; yields the rows of phases as stages complete them.

    kv_bytes: bytes of KV per token.
    """
    how = dict(form=contender(name).form, max_concurrency=run.case.max_concurrency)
    # The first requests of a kind are slower: they compile kernels and allocate buffers.
    send(url, run.stages[0].conversations[:WARM_UP_CONVERSATIONS], request_rate=math.inf, seed=seed, **how)
    freeze_objects(url)
    Client(url).flush_cache()
    gauges = ServerGauges(url)
    left = collections.Counter(stage.phase for stage in run.stages)
    sent, tokens = collections.defaultdict(list), collections.defaultdict(collections.Counter)
    for number, stage in enumerate(run.stages):
        phase = stage.phase
        sent[phase].append(send(url, stage.conversations, request_rate=run.request_rate, seed=seed + number, **how))
        tokens[phase] += gauges.new_tokens()
        left[phase] -= 1
        if left[phase]:
            yield []
            continue
        facts = {
            "server_hit_rate": round(tokens[phase]["cached"] / tokens[phase]["prompt"], 4),
            "kv_resident_bytes": gauges.resident_tokens() * kv_bytes,
            "kv_pool_bytes": gauges.pool_tokens * kv_bytes,
            "saturated": any(map(is_saturated, sent[phase])),
        }
        yield [{**run.describe(), "phase": phase, **summarise(sent[phase]), **facts}]
