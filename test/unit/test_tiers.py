"""Chunks in host memory: when they are copied there, who has them loaded, and that transfers lose nothing."""

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, D, Loop, fill_tokens
from fakes.requests import CHUNK, TEXT
from sglang_lazy.cache.host_copy import HostWatcher
from sglang_lazy.chunks.store import ChunkState
from sglang_lazy.core.state import linked
from sglang_lazy.port.scheduler import upkeep

pytestmark = pytest.mark.usefixtures("sglang_context")

HOST, LOADING, MISSING, RESIDENT = ChunkState.HOST, ChunkState.LOADING, ChunkState.MISSING, ChunkState.RESIDENT


def demote(scheduler):
    """Evict everything from the device."""
    scheduler.tree_cache.evict(EvictParams(num_tokens=scheduler.tree_cache.evictable_size()))


def with_chunks_on_host(*chunks, **options):
    """A scheduler with these chunks on the host and nothing on the device."""
    scheduler = Loop(**{"pool_size": 40, "host_size": 80, **options})
    scheduler.warm(*chunks)
    demote(scheduler)
    return scheduler


def details(req):
    reported = upkeep.cached_tokens_details(req, linked(req))
    return reported["device"], reported["host"], reported["chunk"]


def host_used(scheduler):
    slots = scheduler.tree_cache.tiers.host.memory.slots
    return slots.size - slots.num_free


def noted(scheduler, what):
    """What `what` says of each chunk that is copied to the host, when its copy begins."""
    notes, stored = [], HostWatcher()
    stored.stored = lambda node: notes.append(what(node))
    scheduler.tree_cache.tiers.host.watchers.append(stored)
    return notes


@pytest.mark.parametrize("overlap", [False, True])
def test_an_evicted_chunk_is_loaded_rather_than_computed(overlap):
    scheduler = with_chunks_on_host(A, B, overlap=overlap)
    req = scheduler.submit([B, A, C, QUESTION], "r")
    assert scheduler.states(req) == [HOST, HOST, MISSING]
    scheduler.visible()
    assert scheduler.states(req) == [LOADING, LOADING, ChunkState.PENDING]
    assert fill_tokens(scheduler.fills()) == [[C[1]]]
    scheduler.run()
    assert scheduler.states(req) == [RESIDENT] * 3
    assert details(req) == (0, 8, 8) and scheduler.counts(req)[2] == 0b011


def test_a_second_request_finds_them_on_the_device():
    scheduler = with_chunks_on_host(A)
    first, second = (scheduler.submit([A, QUESTION, (TEXT, (i,))], f"r{i}") for i in range(2))
    scheduler.run()
    assert details(first) == (0, 4, 4) and details(second)[1:] == (0, 4)


def test_the_beginning_of_a_chunk_is_loaded_alone():
    """A prompt that ends in a chunk needs all but the chunk's last token."""
    scheduler = with_chunks_on_host(A)
    req = scheduler.submit([QUESTION, A], "r")
    scheduler.run()
    assert details(req) == (0, 3, 3)
    assert scheduler.states(scheduler.submit([A, QUESTION], "whole")) == [HOST], "its last token is left on the host"
    scheduler.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_copied_before_it_is_computed(overlap):
    """A fill publishes its chunks when its batch is formed; `RecordingCopier` would notice a copy made that early."""
    scheduler = Loop(40, host_size=80, overlap=overlap)
    scheduler.submit([A, QUESTION], "r")
    copied = noted(scheduler, lambda node: (len(scheduler.log), tuple(node.tokens)))
    scheduler.run()
    launched = next(step for step, rids in enumerate(scheduler.log, 1) if any("fill" in rid for rid in rids))
    assert [step for step, tokens in copied if tokens == A[1]] == [launched + overlap]


def test_chunks_of_one_fill_are_copied_together():
    scheduler, lens = Loop(40, host_size=80), []
    transfers = scheduler.tree_cache.tiers.transfers
    back_up = transfers.back_up
    transfers.back_up = lambda pieces, _: lens.append(sum(len(piece.host) for piece in pieces)) or back_up(pieces)
    scheduler.submit([A, B, C, QUESTION], "r", max_new_tokens=1)
    scheduler.run()
    assert lens == [12]


def test_text_is_not_copied():
    scheduler = Loop(60, host_size=80)
    scheduler.submit([(TEXT, (9, 9)), A, (TEXT, (8, 8)), QUESTION], "r")
    scheduler.run()
    scheduler.submit([(TEXT, (1, 2, 3, 4, 5, 6))], "without chunks", max_new_tokens=1)
    scheduler.run()
    assert host_used(scheduler) == 4, "the chunk"


def test_write_through_selective_copies_what_is_used_twice():
    scheduler = Loop(60, host_size=80, write_policy="write_through_selective")
    scheduler.warm(A, B)
    assert host_used(scheduler) == 0
    scheduler.warm(B)
    assert host_used(scheduler) == 4
    demote(scheduler)
    assert scheduler.states(scheduler.submit([A, B, QUESTION], "r")) == [MISSING, HOST]
    scheduler.run()


def test_an_abort_while_loading_loses_nothing():
    """The request is aborted before a batch is formed, and nothing else arrives."""
    scheduler = with_chunks_on_host(A, B)
    req = scheduler.submit([A, B, QUESTION], "r")
    scheduler.visible()
    assert scheduler.states(req) == [LOADING, LOADING]
    scheduler.abort(req)
    scheduler.run()
    assert scheduler.states(req) == [RESIDENT, RESIDENT] and scheduler.tree_cache.protected_size() == 0


def test_a_revoked_request_finds_what_was_loaded_for_it():
    scheduler = with_chunks_on_host(A)
    req = scheduler.submit([A, QUESTION], "r")
    scheduler.visible()
    assert scheduler.admission.revoke_newest() and not scheduler.admission.holders
    scheduler.pools.check()
    scheduler.run()
    assert details(req) == (0, 4, 4)


def test_no_flush_while_loading():
    scheduler = with_chunks_on_host(A)
    req = scheduler.submit([A, QUESTION], "r")
    scheduler.visible()
    scheduler.abort(req)
    assert not scheduler.is_fully_idle()
    scheduler.run()
    scheduler.tree_cache.reset()
    assert host_used(scheduler) == 0 and scheduler.states(req) == [MISSING]


def test_a_full_host_gives_up_what_was_used_least_recently():
    """With room for three chunks, copies leave in the order of eviction, and chunks that have left are computed
    again."""
    scheduler = Loop(40, host_size=12)
    scheduler.warm(A, B, C)
    demote(scheduler)
    scheduler.warm(A)
    demote(scheduler)
    scheduler.warm(D)
    demote(scheduler)
    req = scheduler.submit([A, B, C, D, QUESTION], "r")
    assert scheduler.states(req) == [HOST, MISSING, HOST, HOST]
    scheduler.run()
    assert details(req) == (0, 12, 12)


def test_without_room_on_the_host_chunks_are_computed_again():
    """All copies belong to chunks on the device, so the host cannot give any of them up."""
    scheduler = Loop(40, host_size=4)
    scheduler.warm(A)
    scheduler.warm(B)
    demote(scheduler)
    req = scheduler.submit([A, B, QUESTION], "r")
    assert scheduler.states(req) == [HOST, MISSING]
    scheduler.run()
    assert details(req) == (0, 4, 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_device_and_host_hold_different_chunks(overlap):
    """Cycling through more chunks than either tier holds: all are found every time. If the host also held what the
    device holds, the chunk asked for next would always be gone."""
    chunks = [(True, (i, i // 6, i % 6, 3)) for i in range(1, 37)]
    scheduler = Loop(24 * 4 + 6, host_size=24 * 4, overlap=overlap, vocab_size=100)
    reqs = []
    for turn in range(4):
        for i, chunk in enumerate(chunks):
            reqs.append(scheduler.submit([chunk, QUESTION], f"{turn}-{i}", max_new_tokens=1))
            scheduler.run()
            scheduler.pools.check()
    assert {details(req)[1:] for req in reqs[72:]} == {(4, 4)}, "each comes from the host"


def test_a_copy_is_not_given_up_while_it_is_made_or_read():
    """The host is full of copies of chunks that the device has."""
    scheduler = Loop(60, host_size=8)
    host = scheduler.tree_cache.tiers.host
    scheduler.submit([A, B, QUESTION], "copied", max_new_tokens=1)
    while not host.is_copying:
        scheduler.step()
    host.evict(8)
    assert host_used(scheduler) == 8, "they are being made"
    scheduler.run()
    demote(scheduler)
    req = scheduler.submit([A, B, QUESTION], "loads", max_new_tokens=1)
    scheduler.visible()
    assert scheduler.states(req) == [LOADING, LOADING]
    host.evict(8)
    assert host_used(scheduler) == 8, "they are being read"
    scheduler.run()
    host.evict(8)
    assert host_used(scheduler) == 0 and scheduler.states(req) == [RESIDENT, RESIDENT]


def test_loads_wait_for_memory_like_fills():
    """A running request fills the pool: a request whose chunks are on the host waits in the queue, then is served."""
    scheduler = with_chunks_on_host(A, B, pool_size=24)
    scheduler.submit([(TEXT, tuple(range(1, 9)))], "running", max_new_tokens=8)
    scheduler.step()
    req = scheduler.submit([A, B, QUESTION], "r", max_new_tokens=2)
    scheduler.step()
    assert req in scheduler.waiting_queue and scheduler.states(req) == [HOST, HOST]
    scheduler.run()
    assert details(req) == (0, 8, 8)


def test_a_load_never_takes_what_waiting_requests_hold():
    """The pool is full of locked chunks: the load gives up and revokes no lock."""
    scheduler = with_chunks_on_host(A, B, pool_size=12)
    device = scheduler.store.device
    req = scheduler.submit([B, QUESTION], "holds", max_new_tokens=1)
    scheduler.visible()
    node = scheduler.store.find(linked(scheduler.submit([A, QUESTION], "r", max_new_tokens=1)).prompt.chunks[0])
    taken = device.allocate(device.available_size() - 3)
    assert not scheduler.store.load([node]) and node.slots is None and req in scheduler.admission.holders
    device.free(taken)
    scheduler.run()


def test_eviction_that_falls_short_waits_for_copies():
    """KV being copied to the host cannot be evicted yet; instead of waiting, SGLang's scheduler would raise and end the
    server."""
    scheduler = Loop(20, host_size=80)
    cache = scheduler.tree_cache
    scheduler.submit([A, B, QUESTION], "r", max_new_tokens=1)
    while not cache.is_copying or scheduler.running_batch.reqs:
        scheduler.step()
    assert cache.evictable_size() < 8
    assert cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted >= 8 and not cache.is_copying
    scheduler.run()


def test_a_load_evicts_no_more_than_it_lacks():
    """Three slots are free and two evictable, for a chunk of four: waiting requests keep their locks."""
    scheduler = with_chunks_on_host(A, B, pool_size=20)
    cache, device = scheduler.tree_cache, scheduler.store.device
    scheduler.submit([(TEXT, (7, 7))], "text", max_new_tokens=1)
    scheduler.run()
    req = scheduler.submit([B, QUESTION], "holds", max_new_tokens=1)
    scheduler.visible()
    node = scheduler.store.find(linked(scheduler.submit([A, QUESTION], "r", max_new_tokens=1)).prompt.chunks[0])
    taken = device.allocate(device.available_size() - 3)
    assert cache.evictable_size() == 2
    assert scheduler.store.load([node]) and node.slots is not None and req in scheduler.admission.holders
    device.free(taken)
    scheduler.run()


def test_room_for_all_chunks_of_a_prompt_is_made_at_once(monkeypatch):
    """The pool is full of other chunks."""
    scheduler = with_chunks_on_host(A, B, C, pool_size=20)
    device, asked = scheduler.store.device, []
    scheduler.warm(*((CHUNK, (n, n, n, n)) for n in (31, 32, 33)))
    lacking, take = 12 - device.available_size(), device.take
    monkeypatch.setattr(device, "take", lambda num_tokens: asked.append(num_tokens) or take(num_tokens))
    req = scheduler.submit([A, B, C, QUESTION], "loads", max_new_tokens=1)
    scheduler.visible()
    assert asked == [lacking] and lacking > 4 and scheduler.states(req) == [LOADING] * 3
    scheduler.run()
    assert details(req) == (0, 12, 12)


@pytest.mark.parametrize(
    "link", ["copy", "query:ratio=0.5", "blend:ratio=0.5", "static:ratio=0.5", "base", "epic:tokens=2"]
)
def test_chunks_are_loaded_under_every_policy(link):
    scheduler = Loop(100, host_size=200, link=link)
    for rid in ("cold", "loads"):
        req = scheduler.submit([(TEXT, (9,)), A, B, QUESTION], rid)
        scheduler.run()
        demote(scheduler)
    assert details(req)[1] == details(req)[2] > 0


def test_device_leaves_with_children_on_the_host():
    """Chunks with a common prefix are evicted one by one, then the prefix; `check` searches children, the cache counts
    them."""
    chunks = [(True, (1, 2, i, i)) for i in range(3, 9)]
    scheduler = with_chunks_on_host(*chunks, pool_size=60)
    req = scheduler.submit([*chunks, QUESTION], "r")
    scheduler.run()
    assert details(req) == (0, 24, 24)
    while scheduler.tree_cache.evictable_size():
        scheduler.tree_cache.evict(EvictParams(num_tokens=1))
        scheduler.pools.check()
    assert scheduler.states(req) == [HOST] * 6
