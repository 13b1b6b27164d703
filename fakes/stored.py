"""Schedulers that share a storage, like servers started one after the other."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from fakes.loop import Loop
from fakes.storage import Storage
from sglang_lazy.core.state import linked
from sglang_lazy.port.scheduler import upkeep


def new_server(storage: Storage, **options: Any) -> Loop:
    return Loop(**{"pool_size": 60, "host_size": 120, "storage": storage, **options})


def storage_with(*chunks: tuple, storage: Storage | None = None) -> Storage:
    """Storage (a new one by default) in which an earlier server has left these chunks."""
    storage = storage or Storage()
    server = new_server(storage)
    server.warm(*chunks)
    server.step()
    server.pools.flush()
    return storage


def details(req: Req) -> tuple[int, int, int, int]:
    """Cached tokens of a request on the device, on the host and in storage, and how many of them were in chunks."""
    reported = upkeep.cached_tokens_details(req, linked(req))
    return reported["device"], reported["host"], reported.get("storage", 0), reported["chunk"]
