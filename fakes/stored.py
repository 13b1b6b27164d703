"""Schedulers over one storage, as servers that start one after the other."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from fakes.loop import QUESTION, Loop
from fakes.storage import Storage
from sglang_lazy.core.state import linked
from sglang_lazy.port.scheduler import steps as hooks


def new_server(storage: Storage, **options: Any) -> Loop:
    return Loop(**{"pool_size": 60, "host_size": 120, "storage": storage, **options})


def storage_with(*chunks: tuple, storage: Storage | None = None) -> Storage:
    """Storage, an empty one unless given, that an earlier server has left these chunks in."""
    storage = storage or Storage()
    server = new_server(storage)
    server.warm(*chunks)
    server.step()
    server.pools.flush()
    return storage


def served(server: Loop, *parts: tuple, **options: Any) -> Req:
    """A request for these parts and a question, answered."""
    req = server.submit([*parts, QUESTION], "r", **options)
    server.run()
    return req


def details(req: Req) -> tuple[int, int, int, int]:
    """Tokens that the device, the host and storage had, and how many of them were in chunks."""
    reported = hooks.cached_tokens_details(req, linked(req))
    return reported["device"], reported["host"], reported.get("storage", 0), reported["chunk"]
