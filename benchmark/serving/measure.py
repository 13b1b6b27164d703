"""Measures a run of a contender against a server that is up."""

import collections
import gc
import math

import examples_path  # noqa: F401 - puts examples on the path
import requests
from case import Run
from contenders import CONTENDERS
from load import send
from metrics import ServerGauges, is_saturated, summarise
from serving import Client

WARM_UP_CONVERSATIONS = 2


def freeze_objects(url: str) -> None:
    """Leave what the server and this process hold by now out of all garbage collections to come.

    A full one stops a process of SGLang's for half a second, once in some minutes: whom it meets while it is measured
    would be luck. SGLang recommends this after warm-up.
    """
    requests.post(f"{url}/freeze_gc", timeout=60).raise_for_status()
    gc.freeze()


def measure(url: str, name: str, run: Run, seed: int, kv_bytes: int) -> list[dict]:
    """A row for each phase of a run, which starts from an empty cache.

    kv_bytes: bytes of KV of one token.
    """
    how = dict(form=CONTENDERS[name].form, max_concurrency=run.case.max_concurrency, seed=seed)
    # The first requests of a kind are slower: kernels are compiled, buffers are allocated.
    send(url, run.stages[0].conversations[:WARM_UP_CONVERSATIONS], request_rate=math.inf, **how)
    freeze_objects(url)
    Client(url).flush_cache()
    gauges = ServerGauges(url)
    timelines, facts, tokens = {}, {}, collections.defaultdict(collections.Counter)
    for stage in run.stages:
        sent = send(url, stage.conversations, request_rate=run.request_rate, **how)
        timelines.setdefault(stage.phase, []).append(sent)
        tokens[stage.phase] += gauges.new_tokens()
        facts[stage.phase] = {
            "server_hit_rate": round(tokens[stage.phase]["cached"] / tokens[stage.phase]["prompt"], 4),
            "kv_resident_bytes": gauges.resident_tokens() * kv_bytes,
            "kv_pool_bytes": gauges.pool_tokens * kv_bytes,
            "saturated": is_saturated(sent),
        }
    return [
        {**run.describe(), "phase": phase, **summarise(stages), **facts[phase]} for phase, stages in timelines.items()
    ]
