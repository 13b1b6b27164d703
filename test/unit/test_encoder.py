"""Chunks computed by an encoder, in a pool of their own: what each request reads and who owns each slot, after every
step."""

import random
from array import array
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.pools import Pools
from fakes.requests import CHUNK, TEXT, new_request
from fakes.scheduler import Scheduler
from fakes.storage import Storage
from sglang_lazy.chunks.store import ChunkState
from sglang_lazy.core.fills import Encoding
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.core.state import ChunkNodes, RowNodes, linked
from sglang_lazy.port.scheduler import upkeep

pytestmark = pytest.mark.usefixtures("sglang_context")

DOCS = [tuple(random.Random(i).choices(range(1, 16), k=i % 7 + 1)) for i in range(12)]
QUESTION = (TEXT, (15, 3))


class RecordingPools(Pools):
    """contents: of each token that was encoded, its chunk's tokens and its place there. Its number here is the key that
    the pool of chunks has of it.  encoded: chunks, in this order.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.contents, self.encoded, self.read, self.batches = [], [], {}, []

    def encode(self, encodings: list[Encoding]) -> None:
        self.batches.append(sum(encoding.chunk.num_tokens for encoding in encodings))
        for encoding in encodings:
            tokens = tuple(encoding.chunk.tokens)
            self.encoded.append(tokens)
            numbers = torch.arange(len(tokens)) + len(self.contents)
            self.chunk_kv.k_buffer[0][encoding.slots] = numbers.float()[:, None, None]
            self.contents += [(tokens, i) for i in range(len(tokens))]

    def forward(self, batch) -> None:
        """Check that each request reads the chunks it asked for, in the same order for the same chunks."""
        table, current = self.rows.segment_table, self.rows.segment_table.current
        linked_reqs = [req if req.layout.link == "block" else None for req in batch.reqs]
        wanted = [sorted(t for is_chunk, t in req.parts if is_chunk) if req else [] for req in linked_reqs]
        assert (current is not None) == any(wanted)
        keys = self.chunk_kv.k_buffer[0]
        for i, (req, chunks) in enumerate(zip(batch.reqs, wanted, strict=True)):
            row = req.kv.req_pool_idx
            if not chunks:
                assert not int(table.num_segments[row])
                assert current is None or current.slots[i] is None
                continue
            contents = [self.contents[int(number)] for number in keys[current.slots[i].long(), 0, 0]]
            ends = table.ends[row, : len(chunks)].tolist()
            starts = [0, *ends[:-1]]
            found = [contents[start:end] for start, end in zip(starts, ends, strict=True)]
            assert sorted(found) == sorted([(tokens, n) for n in range(len(tokens))] for tokens in chunks)
            order = [part[0][0] for part in found]
            assert self.read.setdefault(tuple(chunks), order) == order
            assert ends[-1] == len(contents)


class Loop(Scheduler):
    def __init__(self, pool_size=100, chunk_size=60, host_size=0, storage=None, **options):
        pools = RecordingPools(pool_size, chunk_size=chunk_size, host_size=host_size, storage=storage)
        super().__init__(pools, **options)
        self.store = self.tree_cache.store

    def step(self):
        super().step()
        chunk_tree, cache = self.store.tree, self.tree_cache
        own = [encoding.slots for encoding in self.store.pending.values()]
        resident = [chunk.node for chunk in self.store.catalog if chunk.node.slots is not None]
        held = [piece for node in resident for piece in chunk_tree.slots_to(node)]
        places = torch.cat([self.pools.chunk_slots.free_pages, *own, *held])
        assert sorted(places.tolist()) == list(range(1, self.pools.chunk_slots.size + 1)), (
            "every slot is accounted for exactly once"
        )
        assert chunk_tree.num_evictable + chunk_tree.num_locked == sum(map(len, held))
        running = sum(req.kv.kv_committed_len - req.kv.cache_protected_len for req in self.in_rows())
        in_trees = cache.evictable_size() + cache.protected_size()
        assert self.pools.slots.available_size() + in_trees + running == self.pools.slots.size

    def in_rows(self):
        reqs = {*self.running_batch.reqs, *(self.last_batch.reqs if self.last_batch else ())}
        reqs |= {self.chunked_req} if self.chunked_req else set()
        return [req for req in reqs if req.kv.req_pool_idx is not None]

    def submit(self, *docs, text=QUESTION, rid="request", **kwargs):
        req = new_request([text, *((CHUNK, doc) for doc in docs)], rid=rid, **kwargs)
        self._add_request_to_queue(req)
        return req


def test_a_chunk_is_encoded_once_for_all_waiting():
    loop = Loop()
    for i in range(4):
        loop.submit(DOCS[5], DOCS[i], rid=f"r{i}")
    loop.run()
    assert sorted(loop.pools.encoded) == sorted([DOCS[5], *DOCS[:4]])
    again = loop.submit(DOCS[0], DOCS[5])
    loop.run()
    assert len(loop.pools.encoded) == 5
    assert linked(again).hit_mask == 0b11 and linked(again).num_reused_tokens == len(DOCS[0]) + len(DOCS[5])


def test_a_batch_encodes_no_more_than_its_share():
    """Except for one longer chunk. A request that misses little joins the batch although one before it must wait."""
    loop = Loop(chunked_prefill_size=8)
    long = tuple(range(1, 13))
    for i, docs in enumerate([(DOCS[3],), (DOCS[4],), (long,), (DOCS[2], DOCS[3])]):
        loop.submit(*docs, rid=f"r{i}", max_new_tokens=1)
    loop.run()
    assert loop.pools.batches == [4 + 3, 5, 12]


def test_text_is_found_only_behind_the_same_chunks_in_any_order():
    loop = Loop()
    text = (TEXT, (1, 2, 3, 4))
    loop.submit(DOCS[1], DOCS[2], text=text)
    loop.run()
    for docs, found in [((DOCS[2], DOCS[1]), 3), ((DOCS[1],), 0), ((DOCS[1], DOCS[2], DOCS[2]), 0)]:
        req = loop.submit(*docs, text=text)
        loop.run()
        assert req.cached_tokens - linked(req).num_reused_tokens == found
    tenants = [loop.submit(DOCS[1], DOCS[2], text=text, cache_salt=salt) for salt in ("a", "b")]
    loop.run()
    assert [req.cached_tokens for req in tenants] == [0, 0]


def test_an_aborted_request_gives_its_slots_back():
    loop = Loop(chunk_size=10)
    blocking = loop.submit(DOCS[6], rid="running", max_new_tokens=8)
    loop.step()
    waiting = loop.submit(DOCS[1], rid="waiting")
    loop.admission.candidates(loop.running_batch.reqs)
    assert [*loop.store.pending] == [chunk.key for chunk in linked(waiting).prompt.chunks]
    loop.abort(waiting)
    loop.run()
    assert not loop.store.pending and DOCS[1] not in loop.pools.encoded and blocking.finished()


def test_requests_that_do_not_fit_wait_and_pins_yield_last():
    loop = Loop(chunk_size=12)
    first = loop.submit(DOCS[6], rid="first", max_new_tokens=6)
    loop.step()
    second = loop.submit(DOCS[5], rid="second")  # 7 + 6 tokens
    loop.step()
    assert not second.output_ids and not linked(second).admitted
    loop.run()
    assert first.finished() and second.finished()
    (chunk,) = loop.store.catalog
    loop.admission.pins.budget = 12
    loop.admission.pins.add([chunk], None, 0.0)
    third = loop.submit(DOCS[6], rid="third")
    loop.run()
    assert third.finished() and not len(loop.admission.pins)


def test_refusals():
    loop = Loop(chunk_size=12)
    for docs, link, reason in [
        ((DOCS[5], DOCS[6]), "block", "13 tokens of chunks do not fit into their pool of 12 tokens"),
        ((DOCS[0],), "copy", "whole chunks"),
        ((DOCS[0],), "base", "whole chunks"),
        ((DOCS[0],), "epic:tokens=1", "whole chunks"),
    ]:
        assert reason in loop.submit(*docs, link=link).to_finish.message
    assert loop.submit(DOCS[0], link="full").to_finish is None
    loop.waiting_queue = [req for req in loop.waiting_queue if req.to_finish is None]
    loop.run()


def test_a_flush_empties_both_pools():
    loop = Loop()
    loop.submit(DOCS[4])
    loop.run()
    loop.pools.flush()
    assert loop.pools.chunk_slots.available_size() == 60 and not list(loop.store.catalog)
    loop.submit(DOCS[4])
    loop.run()
    assert loop.pools.encoded == [DOCS[4]] * 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("host_size", [0, 24])
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed, host_size, overlap):
    """With both pools short: waiting, eviction, retraction, chunked prefill, aborts and plain prompts. A host tier,
    also too small, may hold what was evicted."""
    dice = random.Random(seed)
    loop = Loop(40, 22, host_size, overlap=overlap, chunked_prefill_size=dice.choice([4, 9, 64]))
    loop.new_token_ratio_tracker.current = dice.choice([0.0, 1.0])
    reqs = []
    for number in range(60):
        for _ in range(dice.choice([0, 0, 1, 2])):
            text = (TEXT, tuple(dice.choices(range(1, 16), k=dice.randint(1, 9))))
            docs = dice.choices(DOCS, k=dice.randint(0, 3))
            reqs.append(loop.submit(*docs, text=text, rid=f"r{number}", max_new_tokens=dice.randint(1, 9)))
        if loop.waiting_queue and dice.random() < 0.2:
            reqs.remove(gone := dice.choice(loop.waiting_queue))
            loop.abort(gone)
        loop.step()
    loop.run(1000)
    assert all(req.finished() for req in reqs)
    assert len(loop.pools.encoded) > len(set(loop.pools.encoded)), "some chunk must be evicted and encoded again"
    assert any(linked(req) and any(linked(req).loaded) for req in reqs) == (host_size > 0)


def demote(loop):
    """Evict everything from the device, in both pools."""
    loop.tree_cache.evict(EvictParams(num_tokens=loop.tree_cache.evictable_size()))
    loop.store.tree.evict(loop.store.tree.num_evictable)


def asking_nobody(loop):
    """A context in which transfers advance only when somebody waits for them."""
    return mock.patch.object(loop.pools, "take_acknowledgements", lambda: None)


@pytest.mark.parametrize("overlap", [False, True])
def test_evicted_chunks_are_loaded_rather_than_encoded(overlap):
    loop = Loop(host_size=80, overlap=overlap)
    loop.submit(DOCS[4], DOCS[5])
    loop.run()
    demote(loop)
    req = loop.submit(DOCS[5], DOCS[2], DOCS[4])
    assert [loop.store.state(chunk) for chunk in linked(req).prompt.chunks].count(ChunkState.HOST) == 2
    loop.run()
    assert sorted(loop.pools.encoded) == sorted([DOCS[4], DOCS[5], DOCS[2]])
    loaded = len(DOCS[4]) + len(DOCS[5])
    details = upkeep.cached_tokens_details(req, linked(req))
    assert (req.cached_tokens, details["host"], details["device"], details["chunk"]) == (loaded, loaded, 0, loaded)


def test_a_load_started_by_a_plain_batch_is_awaited():
    """A plain prompt fills the batch that starts the load; its pass reads no chunks, so it need not wait."""
    loop = Loop(host_size=80, chunked_prefill_size=8)
    loop.submit(DOCS[6], DOCS[5])
    loop.run()
    demote(loop)
    loop.submit(text=(TEXT, tuple(range(1, 9))), max_new_tokens=1)
    req = loop.submit(DOCS[5], DOCS[6])
    with asking_nobody(loop):
        loop.step()
        assert loop.tree_cache.is_copying and linked(req).ready and req in loop.waiting_queue
        loop.step()
        assert req not in loop.waiting_queue
    loop.run()


def test_pins_load_while_passes_read_no_chunks():
    """Many loads may be under way."""
    loop = Loop(host_size=80)
    for doc in DOCS[:6]:
        loop.submit(doc)
        loop.run()
    demote(loop)
    loop.admission.pins.budget = 60
    with asking_nobody(loop):
        for chunk in list(loop.store.catalog):
            loop.admission.pins.add([chunk], None, 0.0)
            loop.submit(max_new_tokens=1)
            loop.step()
    loop.run()


def test_a_full_host_keeps_what_the_device_evicted():
    """It gives up copies of chunks that are still on the device."""
    docs = [(i, 1, 2, 3) for i in range(4, 8)]
    loop = Loop(chunk_size=12, host_size=12)
    for doc in (*docs, docs[0]):
        loop.submit(doc, max_new_tokens=1)
        loop.run()
    assert loop.pools.encoded == docs


def test_a_server_that_copies_chunks_is_not_idle():
    loop = Loop(host_size=80)
    loop.submit(DOCS[4])
    loop.run()
    demote(loop)
    req = loop.submit(DOCS[4])
    loop.admission.candidates(loop.running_batch.reqs)
    loop.abort(req)
    assert not loop.is_fully_idle()
    loop.run()
    loop.pools.flush()
    slots = loop.store.host.memory.slots
    assert slots.num_free == slots.size


def test_a_server_finds_what_another_stored():
    storage = Storage()
    first = Loop(host_size=80, storage=storage)
    first.submit(DOCS[4], DOCS[5])
    first.run()
    first.step()
    first.pools.flush()
    assert len(storage.objects) == 2, "chunks are stored, text is not"
    second = Loop(host_size=80, storage=storage)
    second.pools.contents = first.pools.contents
    req = second.submit(DOCS[5], DOCS[4])
    second.run()
    details = upkeep.cached_tokens_details(req, linked(req))
    assert not second.pools.encoded and details["storage"] == req.cached_tokens == len(DOCS[4]) + len(DOCS[5])


def test_lost_slots_are_reported():
    loop = Loop()
    loop.submit(DOCS[4])
    loop.run()
    loop.pools.chunk_slots.alloc(2)
    with pytest.raises(RuntimeError, match="2 slots of chunks and 0 states lost"):
        loop.step()


def test_sorting_the_queue_by_the_text_tree_loses_nobody():
    loop = Loop(policy="dfs-weight")
    loop.submit(DOCS[4])
    loop.run()
    reqs = [loop.submit(DOCS[4], text=(TEXT, (i,))) for i in range(1, 4)]
    loop.run()
    assert all(req.finished() for req in reqs)


def test_identity():
    """A whole chunk matches no prefix of another, and text depends on the multiset of its prompt's chunks."""

    def build(*parts, extra_key=None, adapter=None):
        ids = [token for _, tokens in parts for token in tokens]
        ends = [sum(len(tokens) for _, tokens in parts[: i + 1]) for i in range(len(parts))]
        chunks = [(end - len(t), end) for (is_chunk, t), end in zip(parts, ends, strict=True) if is_chunk]

        return LinkedPrompt.build_cross(array("q", ids), PromptLayout(tuple(chunks)), extra_key, adapter)

    one, text = build((CHUNK, (1, 2, 3)), (TEXT, (4, 5)), (CHUNK, (1, 2)), (TEXT, (6,)))
    other, _ = build((TEXT, (4, 5, 6)), (CHUNK, (1, 2)), (CHUNK, (1, 2, 3)))
    assert text.tolist() == [4, 5, 6]
    assert [chunk.key for chunk in one.chunks] == [chunk.key for chunk in other.chunks]
    assert one.spans[0].namespace == other.spans[0].namespace
    assert len({chunk.key.namespace for chunk in one.chunks}) == 2
    assert sorted(chunk.index for chunk in one.chunks) == [0, 1]
    twice, _ = build((TEXT, (4, 5, 6)), (CHUNK, (1, 2)), (CHUNK, (1, 2, 3)), (CHUNK, (1, 2, 3)))
    assert twice.spans[0].namespace != one.spans[0].namespace
    adapted, _ = build((CHUNK, (1, 2)), (CHUNK, (1, 2, 3)), (TEXT, (4, 5, 6)), extra_key="x", adapter="x")
    assert [chunk.key for chunk in adapted.chunks] == [chunk.key for chunk in one.chunks]
    assert adapted.spans[0].namespace != one.spans[0].namespace
    own, _ = build((CHUNK, (1, 2)), extra_key="mine x", adapter="x")
    assert own.chunks[0].key.namespace.extra_key == "mine " and own.spans[0].namespace.extra_key == "mine x"
    alone, text = build((CHUNK, (1, 2)))
    assert text.tolist() == [2] and alone.chunks[0].num_tokens == 2


def test_locking_chunks_takes_nothing_from_the_pool_of_text():
    """SGLang forms batches by the change that a lock reports; locking chunks must report none."""
    loop = Loop()
    req = loop.submit(DOCS[5])
    loop.run()
    chunks = [loop.store.find(chunk) for chunk in linked(req).prompt.chunks]
    row = RowNodes(ChunkNodes(chunks, [0] * len(chunks)), [])
    assert loop.tree_cache.inc_lock_ref(row).delta == 0 and loop.store.tree.num_locked == len(DOCS[5])
    assert loop.tree_cache.dec_lock_ref(row).delta == 0 and loop.store.tree.num_locked == 0
