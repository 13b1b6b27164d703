"""Policies that keep parts of chunks, and the states that chunks pass through."""

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.chunks.store import ChunkState
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.state import linked
from sglang_lazy.policies import POLICIES, register

pytestmark = pytest.mark.usefixtures("sglang_context")

LONG = (CHUNK, (1, 2, 3, 4, 5, 6, 7))
BEGIN, END = (TEXT, (10, 11)), (TEXT, (12, 13))


class Slicing(Policy):
    """Keeps the same ranges of every chunk."""

    ranges: tuple

    def kept(self, layout, input_ids):
        return [self.ranges] * len(layout.chunks)


class Parts(Slicing):
    name, ranges = "parts", ((1, 3), (4, 6))


class OtherParts(Slicing):
    name, ranges = "other parts", ((1, 3), (5, 6))


class Beginning(Slicing):
    name, ranges = "beginning", ((0, 3),)


@pytest.fixture(autouse=True)
def slicing():
    for policy in (Parts, OtherParts, Beginning):
        register(policy)
    yield
    for policy in (Parts, OtherParts, Beginning):
        del POLICIES[policy.name]


def row_of(scheduler, req):
    """The slots and positions of a running request's row, and its segments as (end, offset, id)."""
    table, index = scheduler.pools.rows.segment_table, req.kv.req_pool_idx
    count = int(table.num_segments[index])
    columns = (column[index, :count].tolist() for column in (table.ends, table.offsets, table.ids))
    slots = scheduler.pools.rows.req_to_token[index, : req.kv.kv_committed_len].tolist()
    return slots, linked(req).row.positions.tolist(), list(zip(*columns, strict=True))


def begin(scheduler, link, rid, parts=(BEGIN, LONG, END)):
    """A request that has its first token and will generate more."""
    req = scheduler.submit(parts, rid, link=link, max_new_tokens=9)
    while not req.output_ids:
        scheduler.step()
    return req


def test_a_row_of_slices():
    """Kept tokens come first, as one segment, in the chunk's slots; then all text by position, holes included."""
    scheduler = Loop()
    slots, positions, ((end, offset, segment_id),) = row_of(scheduler, begin(scheduler, "parts", "p0"))
    assert positions == [3, 4, 6, 7, 0, 1, 2, 5, 8, 9, 10]
    assert (end, offset) == (4, 2)
    chunk_slots = torch.cat(scheduler.tree_cache.tree.slots_to(chunk_node(scheduler))).tolist()
    assert slots[:4] == [chunk_slots[i] for i in (1, 2, 4, 5)]

    whole_slots, _, ((end, offset, whole_id),) = row_of(scheduler, begin(scheduler, "block", "p1"))
    assert (end, offset) == (7, 2) and whole_slots[:7] == chunk_slots
    other_slots, _, ((end, offset, other_id),) = row_of(scheduler, begin(scheduler, "other parts", "p2"))
    assert (end, offset) == (3, 2) and other_slots[:3] == [chunk_slots[i] for i in (1, 2, 5)]
    again = begin(scheduler, "parts", "p3", [QUESTION, LONG, END])
    same_slots, _, ((end, offset, same_id),) = row_of(scheduler, again)
    assert (end, offset) == (4, 1) and same_slots[:4] == slots[:4]
    assert len({segment_id, whole_id, other_id}) == 3 and same_id == segment_id


def chunk_node(scheduler):
    """The node where the only chunk in the tree ends."""
    (resident,) = scheduler.store._cached.values()
    return resident.node


def test_text_of_holes_is_found_again_under_the_same_path():
    """A second request computes only its last token; one that keeps other tokens shares no text from there on."""
    scheduler = Loop()
    counts = {}
    for rid, link in (("cold", "parts"), ("warm", "parts"), ("other", "other parts"), ("whole", "block")):
        req = scheduler.submit([BEGIN, LONG, END], rid, link=link, max_new_tokens=1)
        scheduler.run()
        counts[rid] = scheduler.counts(req)
    text_before = 2 + 1  # the leading text, continued by the chunk's first token, which is text
    assert counts == {
        "cold": (0, 0, 0),
        "warm": (4 + text_before + 1 + 2, 4, 1),
        "other": (3 + text_before, 3, 1),
        "whole": (7 + 2, 7, 1),
    }


def test_only_what_a_slice_needs_has_to_be_resident():
    """A chunk's beginning is taken from another chunk with the same prefix; nothing is computed for it."""
    scheduler = Loop()
    scheduler.warm((CHUNK, (1, 2, 3)))
    req = scheduler.submit([LONG, END], "p0", link="beginning", max_new_tokens=1)
    scheduler.run()
    assert scheduler.log == [["p0"]]
    assert scheduler.counts(req) == (3, 3, 1)


def test_states_of_a_chunk():
    """Missing; pending while requests wait for it or it is computed; resident; missing again."""
    scheduler = Loop(chunked_prefill_size=2)
    req = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    (chunk,) = linked(req).prompt.chunks
    states = [scheduler.store.state(chunk)]
    scheduler.visible()
    states.append(scheduler.store.state(chunk))
    scheduler.step()
    states.append(scheduler.store.state(chunk))
    scheduler.run()
    states.append(scheduler.store.state(chunk))
    assert scheduler.tree_cache.protected_size() == 0
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    states.append(scheduler.store.state(chunk))
    missing, pending, resident = ChunkState.MISSING, ChunkState.PENDING, ChunkState.RESIDENT
    assert states == [missing, pending, pending, resident, missing]


def test_a_chunk_that_nobody_waits_for_is_missing():
    """The only request was aborted before its fill started."""
    scheduler = Loop()
    scheduler.warm(B)
    req = scheduler.submit([A, B, QUESTION], "aborted")
    scheduler.visible()
    states = [scheduler.store.state(chunk) for chunk in linked(req).prompt.chunks]
    assert states == [ChunkState.PENDING, ChunkState.RESIDENT]
    scheduler.abort(req)
    scheduler.run()
    assert scheduler.store.state(linked(req).prompt.chunks[0]) is ChunkState.MISSING
