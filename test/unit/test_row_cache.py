"""Rows of single requests: the slots that they allocate, share, and leave behind."""

import itertools
from array import array

import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.phases import Phases
from fakes.pools import Pools
from fakes.requests import CHUNK, TEXT, new_request
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.keys import ChunkKey, Namespace
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import linked

pytestmark = pytest.mark.usefixtures("sglang_context")


def run(pools, req):
    """Run one request to its end; returns how many tokens were computed for it, not counting its chunks."""
    pools.arrive(req)
    assert pools.begin(req)
    num_computed = req.extend_len
    pools.end_prefill(req)
    while len(req.output_ids) < req.sampling_params.max_new_tokens:
        assert pools.decode(req)
    pools.check()
    pools.release(req)
    pools.check()
    return num_computed


def num_used(pools):
    return pools.slots.size - pools.slots.available_size()


def test_cached_chunks_take_no_slots_at_new_offsets():
    """Zero copy: a warm prompt in a new order allocates slots for its text and answer only, and computes its text in
    one pass."""
    pools = Phases(200)
    documents = [(CHUNK, (i, i + 1, i + 2)) for i in range(1, 9)]
    separators = [(TEXT, (15,))] * 8
    run(pools, new_request([*itertools.chain(*zip(documents, separators, strict=True))], max_new_tokens=1))
    used = num_used(pools)
    assert used == 8 * 3 + 8
    reordered = [*itertools.chain(*zip(documents[::-1], separators, strict=True))]
    assert run(pools, new_request(reordered, max_new_tokens=1)) == 8
    assert num_used(pools) == used + 8
    assert run(pools, new_request(reordered, max_new_tokens=1)) == 1, "only the last token of a cached prompt"


def test_copies_last_as_long_as_their_request():
    """A copied chunk has slots of the request's own, leaves the shared ones evictable, and is freed with the
    request."""
    pools = Phases(30)
    parts = [(TEXT, (9,)), (CHUNK, (1, 2, 3)), (CHUNK, (4, 5)), (TEXT, (7,))]
    req = new_request(parts, link="copy", max_new_tokens=2)
    pools.arrive(req)
    assert pools.begin(req)
    assert num_used(pools) == 5 + 5 + 2
    assert pools.cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 5
    pools.check()
    pools.end_prefill(req)
    assert pools.decode(req)
    pools.check()
    pools.release(req)
    pools.check()
    assert num_used(pools) == 3 and linked(req).own is None


def test_duplicate_text_is_kept_once():
    """Two requests that compute the same text side by side end up with one copy, in both rows."""
    pools = Phases(40)
    parts = [(TEXT, (9,)), (CHUNK, (1, 2, 3)), (TEXT, (5, 6)), (CHUNK, (4,)), (TEXT, (7, 8))]
    twins = [new_request(parts), new_request(parts)]
    for req in twins:
        pools.arrive(req)
        assert pools.begin(req)
    before = num_used(pools)
    for req in twins:
        pools.end_prefill(req)
        pools.check()
    rows = [pools.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len].tolist() for req in twins]
    assert rows[0] == rows[1]
    assert num_used(pools) == before - 5


@pytest.mark.parametrize("forge", [repr, str, lambda namespace: namespace[0], lambda namespace: str(namespace[-1])])
def test_client_keys_reach_no_private_namespace(forge):
    """Whatever extra_key a client sends, it must not match a chunk's namespace or that of text after one."""
    pools = Phases(60)
    req = new_request([(CHUNK, (1, 2, 3)), (TEXT, (4, 5))], extra_key="a", cache_salt="s")
    run(pools, req)
    chunk, span = linked(req).prompt.chunks[0], linked(req).prompt.spans[0]
    for namespace, tokens in ((chunk.key.namespace, (1, 2, 3, 4)), (span.namespace, (4, 5, 1))):
        client = new_request([(TEXT, tokens)], extra_key=forge(namespace))
        client.init_next_round_input(pools.cache)
        assert client.prefix_len == 0
        other = new_request([(CHUNK, tokens[:3]), (TEXT, (4,))], extra_key=forge(namespace))
        pools.arrive(other)
        assert linked(other).hit_mask == 0


def test_an_image_is_found_whole_or_not_at_all():
    """An aborted prompt computed two of its first image's three tokens. The next one computes all three, but keeps the
    slots of those two, since SGLang embeds an image from one range of the row."""
    pools, parts = Phases(60), [(TEXT, (1, 9, 9, 9, 4)), (CHUNK, (5, 6)), (TEXT, (9, 9, 9, 7))]

    def with_images():
        req = new_request(parts)
        places = torch.arange(len(req.origin_input_ids)).expand(3, -1)
        items = [MultimodalDataItem(modality=Modality.IMAGE, hash=3, offsets=[offset]) for offset in ((1, 3), (7, 9))]
        req.multimodal_inputs = MultimodalInputs(mm_items=items, mrope_positions=places)
        return req

    aborted, req, again = with_images(), with_images(), with_images()
    pools.arrive(aborted)
    assert pools.begin(aborted, 3)
    pools.end_piece(aborted)
    pools.release(aborted, checkpoint=False)
    assert run(pools, req) == 8
    assert linked(req).row.cached == [1, 0, 0]
    assert [item.offsets for item in req.multimodal_inputs.mm_items] == [[(3, 5)], [(7, 9)]]
    assert run(pools, again) == 1


def test_segment_table_rows_follow_their_requests():
    """A row shows the slices of the latest request it was assigned to, or none; all other rows stay bit-identical."""
    table = SegmentTable(num_rows=6, max_segments=5, device="cpu", model=Pools(1).new_model("cpu"))
    tensors = table.num_segments, table.ends, table.offsets, table.ids
    for tensor in tensors[1:]:
        tensor.fill_(-7)

    def chunk(start, *kept):
        key = ChunkKey(b"", Namespace("chunk", None, None), b"")
        return ChunkSlice(key, 0, array("q"), start, kept[-1][1], kept)

    def assign(rows):
        before = [tensor.clone() for tensor in tensors]
        table.assign(rows, {row: [100 + chunk.start for chunk in chunks] for row, chunks in rows.items()}, {})
        untouched = [row for row in range(6) if row not in rows]
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[untouched], old[untouched])

    def segments(row):
        count = table.num_segments[row]
        columns = (tensor[row, :count].tolist() for tensor in tensors[1:])
        return list(zip(*columns, strict=True))

    assign({1: [chunk(0, (0, 3)), chunk(10, (0, 2))], 2: [chunk(4, (0, 1))], 3: []})
    first = [(3, 0, 100), (5, 10, 110)]
    assert [segments(row) for row in range(6)] == [[], first, [(1, 4, 104)], [], [], []]
    assign({2: [chunk(7, (0, 2)), chunk(9, (3, 4)), chunk(20, (1, 3), (5, 7))], 4: [chunk(5, (0, 5))]})
    third = [(2, 7, 107), (3, 9, 109), (7, 20, 120)]
    assert [segments(row) for row in (1, 2, 4)] == [first, third, [(5, 5, 105)]]
    assign({1: [], 2: [chunk(1, (0, 1))], 5: []})
    assert [segments(row) for row in range(6)] == [[], [], [(1, 1, 101)], [], [(5, 5, 105)], []]
    assign({2: [], 4: []})
    assert not table.num_segments.any()
