"""What operators ask of storage: it is done, or refused."""

from types import SimpleNamespace

import pytest
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

from fakes.loop import QUESTION, A, B
from fakes.storage import Storage
from fakes.stored import details, new_server, served, storage_with
from sglang_lazy.port.cache.backends import TensorBackend
from sglang_lazy.port.cache.tier_report import StorageReport
from sglang_lazy.port.repairs.operators import OperationError
from sglang_lazy.port.scheduler import storage as hooks

pytestmark = pytest.mark.usefixtures("sglang_context")


class Clearable(Storage):
    """Storage that can be emptied, if at the `tries`-th attempt."""

    tries = 1

    def clear(self):
        self.tries -= 1
        if self.tries > 0:
            return False
        self.objects.clear()
        return None


def server_over(storage, **options):
    server = new_server(storage, **options)
    server.enable_hicache_storage = storage is not None
    return server


def clear(server):
    return hooks.clear_storage(None, server, None).success


def test_clearing_empties_storage():
    """Reads in progress find nothing."""
    storage = storage_with(A, B, storage=Clearable())
    server = server_over(storage)
    server.pools.slow = True
    storage.open.clear()
    req = server.submit([A, B, QUESTION], "r")
    assert clear(server) and not storage.objects
    storage.open.set()
    server.pools.slow = False
    server.run()
    assert details(req) == (0, 0, 0, 0)


def test_messages_reach_the_tree_of_chunks():
    """If text has its own, of which alone SGLang knows."""
    storage = storage_with(A, storage=Clearable())
    server = server_over(storage, chunk_size=60)
    assert clear(server) and not storage.objects
    assert server.tree_cache.detach_storage_backend()[0] and server.store.tree.objects is None


def test_another_rank_has_deleted_a_file_meanwhile():
    storage = storage_with(A, storage=Clearable())
    storage.tries = 2
    assert clear(server_over(storage)) and not storage.objects


@pytest.mark.parametrize("storage", [None, Storage(), Clearable()], ids=["none", "cannot", "fails"])
def test_clearing_is_refused(storage):
    if isinstance(storage, Clearable):
        storage.tries = 9
    server = server_over(storage)
    with pytest.raises(OperationError, match="storage"):
        clear(server)


def test_chunks_of_other_tiers_are_stored_again():
    storage = Clearable()
    server = server_over(storage)
    server.warm(A)
    server.step()
    assert clear(server) and not storage.objects
    served(server, A)
    server.step()
    assert len(storage.objects) == 1


def test_detached_storage_is_asked_nothing():
    storage = storage_with(A)
    server = server_over(storage)
    assert server.tree_cache.detach_storage_backend()[0]
    storage.open.clear()
    assert details(served(server, A, B)) == (0, 0, 0, 0) and len(storage.objects) == 1
    server.pools.flush()
    assert server.tree_cache.detach_storage_backend()[0]


@pytest.mark.parametrize("released", [False, True])
def test_a_flush_hashes_the_model_again(released):
    """So that the next request does not wait for it; but not while the weights are not there."""
    server, asked = server_over(Storage()), []
    server.tree_cache.connect(TensorBackend(Storage()), lambda weights: asked.append(weights) or b"m", StorageReport(1))
    server.weight_updater = SimpleNamespace(offload_tags={GPU_MEMORY_TYPE_WEIGHTS} if released else set())
    assert asked == [None]
    server.pools.flush()
    assert hooks.identify(True, server) and asked == [None] * (1 if released else 2)
    served(server, A)
    assert asked == [None] * 2


def test_a_weight_update_without_a_flush_names_nothing():
    """The cache has KV of both: it is neither stored nor are other servers' objects taken for it, until a flush."""
    storage = storage_with(A)
    server = server_over(storage)
    server.weight_updater = SimpleNamespace(offload_tags=set())
    updater = SimpleNamespace(scheduler=server)
    for flushes, result in ((True, "updated"), (False, None)):  # None: it is postponed
        hooks.update_weights(result, updater, SimpleNamespace(flush_cache=flushes))
    assert details(served(server, A)) == (0, 0, 4, 4)
    hooks.update_weights("updated", updater, SimpleNamespace(flush_cache=False))
    hooks.identify(False, server)
    served(server, B)
    server.step()
    assert len(storage.objects) == 1
    server.pools.flush()
    assert hooks.identify(True, server) and details(served(server, A)) == (0, 0, 4, 4)
