"""Storage that hangs, is slow, fails or lies: all requests are answered, and no slot of device or host is lost."""

import errno

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import PrefetchTimeoutConfig

from fakes.loop import QUESTION, A, B, C, D
from fakes.requests import CHUNK
from fakes.storage import Storage
from fakes.stored import details, new_server, served, storage_with
from sglang_lazy.chunks.tree import ChunkState
from sglang_lazy.core.state import linked
from sglang_lazy.port.cache import chunk_objects
from sglang_lazy.port.cache.calls import MAX_STUCK
from sglang_lazy.port.cache.chunk_objects import NUM_READERS
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.usefixtures("sglang_context")

FETCHING, HOST, MISSING, RESIDENT = ChunkState.FETCHING, ChunkState.HOST, ChunkState.MISSING, ChunkState.RESIDENT


@pytest.fixture
def two_pieces(monkeypatch):
    """Store chunks of three or four tokens in two pieces."""
    size = new_server(Storage()).tree_cache.token_to_kv_pool_host.get_size_per_token()
    monkeypatch.setattr(chunk_objects, "PIECE_BYTES", 2 * size)


@pytest.fixture
def storage():
    return storage_with(A, B)


@pytest.fixture
def hanging(storage):
    """A server whose storage has A and B but does not answer. Its clock stands still."""
    server = new_server(storage)
    server.tree_cache.clock = lambda: server.now
    server.now = 0.0
    hang(server, storage)
    yield server
    storage.open.set()


def hang(server, storage):
    server.pools.slow = True
    storage.open.clear()


def answer(server, storage):
    """Storage answers what it was asked so far."""
    storage.open.set()
    server.pools.slow = False
    server.pools.take_acknowledgements()
    server.pools.check(server.admission.holders)


def asked(server, *parts):
    """Submit a request for these parts and a question; returns it once storage has been asked for all of them."""
    req = server.submit([*parts, QUESTION], "r")
    assert wait_for(lambda: server.tree_cache.objects.read.num_running == len(parts))
    return req


def evict(server):
    server.tree_cache.evict(EvictParams(num_tokens=server.tree_cache.evictable_size()))


def report(server):
    return server.tree_cache.report.numbers()


def test_requests_wait_until_the_deadline_and_no_longer(hanging):
    """SGLang's default is two seconds, plus a tenth for every 1,024 tokens."""
    req = hanging.submit([A, B, QUESTION], "r")
    for now in (0.0, 1.99):
        hanging.now = now
        hanging.step()
        assert hanging.states(req) == [FETCHING, FETCHING] and not hanging.fills()
    hanging.now = 2.01
    hanging.run()
    assert details(req) == (0, 0, 0, 0) and hanging.counts(req)[2] == 0 and report(hanging)["late"] == 2


def test_the_deadline_counts_all_tokens_being_fetched(hanging):
    hanging.tree_cache.prefetch_timeout_config = PrefetchTimeoutConfig(base=0.0, per_ki_token=1024.0, max=20.0)
    long = (CHUNK, (*A[1], 7, 7, 7, 7))
    short, both = hanging.submit([A, QUESTION], "short"), hanging.submit([long, QUESTION], "long")
    for now, states in ((3.9, [FETCHING, FETCHING]), (11.9, [MISSING, FETCHING]), (12.1, [MISSING, MISSING])):
        hanging.now = now
        hanging.tree_cache.check_hicache_events()
        assert hanging.states(short) + hanging.states(both) == states, now
    hanging.run()


def test_nobody_waits_once_all_threads_hang(two_pieces, hanging, storage):
    """Later requests compute their chunks at once, until storage answers. That reads of which no piece was asked for
    have ended means nothing."""
    chunks = [(CHUNK, (first, 7, 7)) for first in range(10, 10 + NUM_READERS + MAX_STUCK)]
    for part in (chunks[:NUM_READERS], chunks[NUM_READERS:]):
        assert hanging.states(asked(hanging, *part)) == [FETCHING] * len(part), "threads are left"
        hanging.now += 10.0
        hanging.run()
    for chunk in (B, C):
        assert details(served(hanging, chunk)) == (0, 0, 0, 0) and report(hanging)["late"] == len(chunks)
    answer(hanging, storage)
    hanging.pools.flush()
    assert details(served(hanging, A, B)) == (0, 0, 8, 8)


@pytest.mark.parametrize("moment", ["computing", "resident", "on the host", "gone"])
def test_late_answers_are_harmless(hanging, storage, moment):
    """Whatever became of the chunk meanwhile. `answer` and `step` check all slots and their contents."""
    req = asked(hanging, A)
    hanging.now = 10.0
    if moment == "computing":
        hanging.chunked_prefill_size = hanging.producer.max_tokens = 3
        hanging.step()
        assert hanging.states(req) == [ChunkState.PENDING]
    else:
        hanging.run()
    if moment in ("on the host", "gone"):
        evict(hanging)
    if moment == "gone":
        hanging.tree_cache.evict_host(4)
    answer(hanging, storage)
    assert report(hanging)["fetched"] == 1 and not hanging.tree_cache.fetches
    hanging.run()
    evict(hanging)
    assert hanging.states(req) == [HOST]
    assert details(served(hanging, A)) == (0, 4, 0, 4)


def test_policy_best_effort_never_waits(hanging, storage):
    hanging.tree_cache.prefetch_stop_policy = "best_effort"
    assert details(served(hanging, A)) == (0, 0, 0, 0)
    assert details(served(hanging, B)) == (0, 0, 0, 0)
    answer(hanging, storage)
    assert report(hanging)["fetched"] == 2


def test_policy_wait_complete_waits_forever(hanging, storage):
    hanging.tree_cache.prefetch_stop_policy = "wait_complete"
    req = hanging.submit([A, QUESTION], "r")
    hanging.now = 1e9
    hanging.step()
    assert hanging.states(req) == [FETCHING] and not hanging.fills()
    answer(hanging, storage)
    hanging.run()
    assert details(req) == (0, 0, 4, 4)


def test_hanging_storage_holds_at_most_half_of_the_host(storage):
    server = new_server(storage, host_size=16)
    server.warm(C)
    hang(server, storage)
    req = server.submit([A, B, D, QUESTION], "r")
    assert server.states(req) == [FETCHING, FETCHING, MISSING]
    assert sum(len(fetch.slots) for fetch in server.tree_cache.fetches) == 8
    server.abort(req)
    answer(server, storage)


def test_a_flush_abandons_storage_that_hangs(hanging, storage):
    """While it reads and while it writes. Its late answers touch no slot, though all slots have new owners."""
    hanging.tree_cache.prefetch_timeout_config = PrefetchTimeoutConfig(base=0.0, per_ki_token=0.0, max=2.0)
    ended, objects = [], hanging.tree_cache.objects
    for act in ("_read", "_write"):
        setattr(objects, act, noting(ended, getattr(objects, act)))
    asked(hanging, A, C)
    hanging.run()
    assert wait_for(lambda: objects.written.num_running == 1)
    hanging.pools.flush()
    assert report(hanging)["unstored"] == 2 and not hanging.tree_cache.fetches
    host = hanging.tree_cache.token_to_kv_pool_host
    taken = host.alloc(host.available_size())
    for layer in (*host.k_data_refs, *host.v_data_refs):
        layer.fill_(7)
    storage.open.set()
    assert wait_for(lambda: len(ended) == 3), "two reads, and the first of two writes"
    assert all((layer == 7).all() for layer in (*host.k_data_refs, *host.v_data_refs))
    host.free(taken)
    hanging.pools.slow = False
    assert details(served(hanging, A, B)) == (0, 0, 8, 8)


def noting(ended, act):
    def noted(*args):
        try:
            return act(*args)
        finally:
            ended.append(act)

    return noted


def raising(error):
    def fail(*_args):
        raise error

    return fail


def half(storage, then=None):
    """A `batch_get` that fills half of an object, then fails or claims success."""

    def batch_get(keys, targets):
        for key, target in zip(keys, targets, strict=True):
            data = storage.objects[key][: len(target) // 2]
            target.fill_(255)
            target[: len(data)] = data
        if then is not None:
            raise then
        return targets

    return batch_get


@pytest.mark.parametrize("fault", ["refused", "killed", "half", "nothing", "none"])
def test_storage_that_fails_while_it_reads(storage, fault):
    """Chunks are computed; once storage works again, they are found."""
    faults = {
        "refused": raising(ConnectionRefusedError()),
        "killed": half(storage, then=ConnectionResetError()),
        "half": half(storage),
        "nothing": lambda keys, targets: targets,
        "none": lambda keys, targets: None,
    }
    server = new_server(storage)
    batch_get, storage.batch_get = storage.batch_get, faults[fault]
    assert details(served(server, A, B)) == (0, 0, 0, 0)
    assert report(server)["missed"] == 2
    storage.batch_get = batch_get
    server.pools.flush()
    assert details(served(server, A, B)) == (0, 0, 8, 8)


@pytest.mark.parametrize("fault", ["full", "read-only", "refuses"])
def test_storage_that_takes_nothing(fault):
    """Chunks stay on the host, unprotected; nothing stays held."""
    storage = Storage()
    errors = {"full": OSError(errno.ENOSPC, "full"), "read-only": OSError(errno.EROFS, "read-only")}
    storage.batch_set = raising(errors[fault]) if fault in errors else lambda *_: False
    server = new_server(storage)
    server.warm(A, B)
    server.step()
    assert report(server) == {"stored": 0, "unstored": 2, "fetched": 0, "missed": 2, "late": 0}
    assert all(not node.host_ref_counter for node, _, _ in server.pools.nodes())
    evict(server)
    assert details(served(server, A, B)) == (0, 8, 0, 8)


def test_slow_writes_hold_at_most_half_of_the_host(storage):
    """Storage holds at most half of the host, so that the other half can be reused."""
    server = new_server(storage, host_size=20)
    storage.exists = lambda _key: False
    hang(server, storage)
    for chunk in (C, D, *((CHUNK, (first, 7, 7, 7)) for first in (6, 7, 8))):
        served(server, chunk)
    held = sum(len(node.key) for node, _, _ in server.pools.nodes() if node.host_ref_counter)
    assert held == 8 and report(server)["unstored"] == 3
    answer(server, storage)
    assert report(server)["stored"] == 2


def test_an_abort_while_storage_hangs(hanging, storage):
    req = hanging.submit([A, QUESTION], "r")
    hanging.step()
    hanging.abort(req)
    hanging.step()
    assert not hanging.admission.holders and hanging.tree_cache.protected_size() == 0
    answer(hanging, storage)
    assert linked(req).chunks is None and hanging.states(req) == [HOST]
