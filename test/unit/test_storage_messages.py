"""What operators ask of storage: it is done, or refused."""

from types import SimpleNamespace

import pytest
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

from fakes.chunk_server import A, B, Server, storage_with
from fakes.storage import Storage
from sglang_lazy.port.repairs.scheduler import OperationError
from sglang_lazy.port.scheduler import control as hooks

pytestmark = pytest.mark.usefixtures("sglang_context")


class Clearable(Storage):
    """Storage that can be emptied, if at the `tries`-th attempt."""

    tries, closed = 1, False

    def clear(self):
        self.tries -= 1
        if self.tries > 0:
            return False
        self.objects.clear()
        return None

    def close(self):
        self.closed = True


def scheduler_of(server, *, has_weights=True, reuses=True):
    """The scheduler of a server, as far as messages about storage go.  server: None if it has no storage of ours."""
    cache = SimpleNamespace(admission="some" if reuses else None, tiers=None)
    if server is not None:
        cache.tiers, cache.clear_storage_backend = SimpleNamespace(storage=server.storage), server.storage.clear
    offloaded = set() if has_weights else {GPU_MEMORY_TYPE_WEIGHTS}
    return SimpleNamespace(
        tree_cache=cache,
        enable_hicache_storage=server is not None,
        weight_updater=SimpleNamespace(offload_tags=offloaded),
        waiting_queue=[],
        _engine_paused=False,
        is_fully_idle=lambda: False,
    )


def flush(scheduler, succeeds=True):
    return hooks.flush_cache(lambda _scheduler: succeeds, scheduler)


def clear(server):
    return hooks.clear_storage(None, scheduler_of(server), None).success


def test_clearing_empties_storage():
    """Reads in progress find nothing."""
    storage = storage_with(A, B, storage=Clearable())
    server = Server(storage)
    server.slow = True
    storage.open.clear()
    prompt = server.ask(A, B)
    assert clear(server) and not storage.objects
    storage.open.set()
    server.slow = False
    assert server.answer(prompt) == [None, None]


def test_another_rank_has_deleted_a_file_meanwhile():
    storage = storage_with(A, storage=Clearable())
    storage.tries = 2
    assert clear(Server(storage)) and not storage.objects


@pytest.mark.parametrize("storage", [None, Storage(), Clearable()], ids=["none", "cannot", "fails"])
def test_clearing_is_refused(storage):
    if isinstance(storage, Clearable):
        storage.tries = 9
    with pytest.raises(OperationError, match="storage"):
        clear(None if storage is None else Server(storage))


def test_chunks_of_other_tiers_are_stored_again():
    storage = Clearable()
    server = Server(storage)
    server.warm(A)
    assert clear(server) and not storage.objects
    server.warm(A)
    assert len(storage.objects) == 1


def test_detached_storage_is_asked_nothing():
    storage = storage_with(A, storage=Clearable())
    server = Server(storage)
    server.slow = True
    server.warm(B)
    server.storage.detach()
    assert len(storage.objects) == 2 and storage.closed, "what was being written is there"
    storage.open.clear()
    server.flush()
    assert server.served(A, range(20, 25)) == [None, None] and len(storage.objects) == 2
    server.flush()
    server.storage.detach()
    with pytest.raises(OperationError, match="storage"):
        clear(server)


def test_detaching_forgets_what_is_being_read():
    storage = storage_with(A)
    server = Server(storage)
    server.slow = True
    storage.open.clear()
    prompt = server.ask(A)
    server.storage.detach()
    server.check()
    assert server.answer(prompt) == [None] and not server.storage.fetches
    storage.open.set()


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_flush_hashes_the_model_again(has_weights):
    """So that the next request does not wait for it; but not while the weights are not there."""
    server = Server(Storage())
    assert server.identified == [None]
    server.flush()
    assert flush(scheduler_of(server, has_weights=has_weights))
    assert server.identified == [None] * (2 if has_weights else 1)
    server.served(A)
    assert server.identified == [None] * 2


def test_a_weight_update_without_a_flush_names_nothing():
    """The cache has KV of both: it is neither stored nor are other servers' objects taken for it, until a flush."""
    storage = storage_with(A)
    server = Server(storage)
    scheduler = scheduler_of(server)
    updater = SimpleNamespace(scheduler=scheduler)
    for flushes, result in ((True, "updated"), (False, None)):  # None: it is postponed
        hooks.update_weights(result, updater, SimpleNamespace(flush_cache=flushes))
    assert server.served(A) == ["storage"]
    hooks.update_weights("updated", updater, SimpleNamespace(flush_cache=False))
    assert not flush(scheduler, succeeds=False)
    server.warm(B)
    assert len(storage.objects) == 1
    server.flush()
    assert flush(scheduler) and server.served(A) == ["storage"]


@pytest.mark.parametrize("reuses", [True, False])
def test_servers_without_storage_of_ours(reuses):
    """Nothing happens to them."""
    scheduler = scheduler_of(None, reuses=reuses)
    assert flush(scheduler)
    hooks.update_weights("updated", SimpleNamespace(scheduler=scheduler), SimpleNamespace(flush_cache=False))
