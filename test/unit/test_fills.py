"""Fills, which compute the missing chunks of linked requests: what they contain, and when they run."""

import pytest
from sglang.srt.managers import schedule_batch

from fakes.loop import QUESTION, A, B, C, D, Loop, fill_tokens
from fakes.requests import CHUNK, TEXT
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.state import fill_of

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@both_loops
@pytest.mark.parametrize("link", ["block", "copy"])
def test_fills_come_once_and_before_their_parents(overlap, link):
    """Each missing chunk is computed once for all parents, in one batch; the parents join it unless their policy copies
    chunks."""
    scheduler = Loop(overlap=overlap, link=link)
    parents = [
        scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1),
        scheduler.submit([B, (TEXT, (14,)), C, B, QUESTION], "p1", max_new_tokens=1),
    ]
    assert fill_tokens(scheduler.visible()) == [[A[1], B[1]], [C[1]]]
    scheduler.step()
    if link == "copy":
        assert scheduler.log == [["\0fill-0", "\0fill-1"]]
        assert scheduler.waiting_queue == parents, "parents wait where SGLang's abort and timeouts look for them"
        assert all(parent.lazy.ready for parent in parents), "computed chunks are locked for them from now on"
        scheduler.run()
        assert scheduler.log[1] == ["p0", "p1"]
    else:
        assert scheduler.log == [["\0fill-0", "p0", "\0fill-1", "p1"]]
        scheduler.run()


@both_loops
def test_parent_joins_the_last_of_its_fills(overlap):
    """When its fills take several batches, the parent joins the last of them, no earlier one."""
    scheduler = Loop(overlap=overlap, chunked_prefill_size=7)
    parent = scheduler.submit([A, (TEXT, (14,)), B, A, QUESTION], "p0", max_new_tokens=2)
    scheduler.step()
    assert scheduler.log == [["\0fill-0", "\0fill-1"]] and scheduler.chunked_req.rid == "\0fill-1"
    scheduler.step()
    assert scheduler.log[1:] == [["\0fill-1", "p0"]]
    scheduler.run()
    assert len(parent.output_ids) == 2


def test_a_fill_computes_as_much_as_a_batch():
    """Missing chunks share a fill up to that size; a larger one has its own; cached ones are left out."""
    scheduler = Loop(chunked_prefill_size=9)
    scheduler.warm(D)
    long = (CHUNK, tuple(range(1, 11)))
    parent = scheduler.submit([A, B, D, A, C, long, (CHUNK, (9,)), QUESTION], "p0", max_new_tokens=1)
    shares = [[A[1], B[1]], [C[1]], [long[1]], [(9,)]]
    assert fill_tokens(scheduler.visible()) == shares
    scheduler.run()
    assert scheduler.counts(parent) == (4, 4, 0b100)
    assert all(scheduler.resident(parent))


@both_loops
def test_a_fill_in_pieces_publishes_its_chunks_at_the_end(overlap):
    """No chunk is found before that. A chunk that shares a prefix with a cached one is computed from there on."""
    scheduler = Loop(chunked_prefill_size=3, overlap=overlap, max_fill_tokens=64)
    scheduler.warm((CHUNK, (5, 6, 1)))
    parent = scheduler.submit([A, B, C, QUESTION], "p0", max_new_tokens=1)
    for _ in range(3):
        scheduler.step()
        assert scheduler.resident(parent) == [False] * 3
    scheduler.step()
    assert scheduler.resident(parent) == [True] * 3
    assert [batch[0] for batch in scheduler.log] == ["\0fill-1"] * 4, "10 tokens, 2 of them B's cached prefix"
    scheduler.run()


@both_loops
def test_a_chunk_cached_before_its_fill_begins(overlap):
    """A longer chunk that starts with it was computed first; its last token is computed all the same."""
    scheduler = Loop(chunked_prefill_size=4, overlap=overlap)
    scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    late = scheduler.submit([(CHUNK, A[1][:3]), QUESTION], "p1", max_new_tokens=1)
    scheduler.step()
    fill = next(req for req in scheduler.visible() if fill_of(req) is not None)
    assert fill_tokens([fill]) == [[A[1][:3]]] and all(scheduler.resident(late))
    scheduler.run()
    assert fill.extend_len == 1
    assert scheduler.counts(late) == (0, 0, 0)


def test_finished_fills_free_their_rows():
    """Fills that took all rows free them for their parent, though no other request ended."""
    scheduler = Loop(max_fill_tokens=2)
    other = scheduler.submit([QUESTION], "other", max_new_tokens=30)
    scheduler.step()
    parent = scheduler.submit([*((CHUNK, (i, i)) for i in range(8)), QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    assert len(scheduler.log[-1]) == 7 and scheduler.running_batch.batch_is_full
    scheduler.step()
    assert scheduler.log[-1] == ["\0fill-7", "p0"]
    scheduler.run()
    assert len(parent.output_ids) == 1 and len(other.output_ids) == 30


def test_a_row_is_completed_though_its_locks_were_revoked(monkeypatch):
    """A parent in the batch may lose its waiting locks when SGLang makes room for that same batch."""
    scheduler = Loop(pool_size=16)
    scheduler.warm(A)
    parent = scheduler.submit([A, B, (TEXT, (14, 13, 12)), QUESTION], "p0", max_new_tokens=1)
    fill, _ = scheduler.visible()
    alloc = schedule_batch.alloc_for_extend

    def alloc_and_evict(batch):
        assert scheduler.store.tree.release_lock()
        return alloc(batch)

    monkeypatch.setattr(schedule_batch, "alloc_for_extend", alloc_and_evict)
    scheduler.step()
    assert scheduler.log == [[fill.rid, "p0"]]
    monkeypatch.undo()
    scheduler.run()
    assert scheduler.counts(parent) == (4, 4, 0b01)


def test_a_chunk_under_way_is_not_started_twice():
    """A chunk that is prefilled in pieces is awaited, even by a later parent, and never computed twice."""
    scheduler = Loop(chunked_prefill_size=2)
    scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    assert scheduler.chunked_req is not None and fill_of(scheduler.chunked_req) is not None
    scheduler.submit([A, QUESTION], "p1", max_new_tokens=1)
    assert [req.rid for req in scheduler.visible()] == ["p0", "p1"]
    (fill,) = scheduler.fills()
    assert [parent.rid for parent in fill.lazy.parents] == ["p0", "p1"]
    scheduler.run()
    assert [rid for batch in scheduler.log for rid in batch if rid.startswith("\0fill")] == [fill.rid] * 2
    assert scheduler.log[2:] == [["p0", "p1"]], "the chunk's last two tokens filled the batch"


def test_fill_is_no_user_request():
    """A fill ends by itself, streams nothing, samples nothing, and its id neither starts a user's id nor starts with
    one."""
    scheduler = Loop()
    scheduler.submit([A, QUESTION], "p0", extra_key="tenant")
    fill, _ = scheduler.visible()
    assert fill.rid.startswith("\0") and fill.finished_output
    assert fill.sampling_params.max_new_tokens == 0
    # Greedy, since one request that samples makes SGLang's whole batch sample.
    assert fill.sampling_params.top_k == 1
    assert [chunk.key.namespace for chunk in fill.lazy.chunks] == [Namespace("chunk", "tenant", None)]
    assert list(fill.origin_input_ids) == list(A[1])


@both_loops
@pytest.mark.parametrize("max_fill_tokens, num_fills", [(2, 3), (64, 2)], ids=["of one chunk", "of two"])
def test_aborted_fill_is_started_again(overlap, max_fill_tokens, num_fills):
    """When SGLang aborts a fill between two of its pieces, its parents get a new one."""
    scheduler = Loop(chunked_prefill_size=2, overlap=overlap, max_fill_tokens=max_fill_tokens)
    scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    first = scheduler.abort_chunked().rid
    scheduler.run()
    fills = [rid for batch in scheduler.log for rid in batch if rid.startswith("\0fill")]
    assert fills[0] == first and len(set(fills)) == num_fills
    assert scheduler.log[-1] == ["p0"]


def test_retracted_fill_is_started_again():
    """A retracted fill is dropped from the queue, and its parents' next admission starts a new one."""
    scheduler = Loop()
    parent = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    fill, _ = scheduler.visible()
    scheduler._add_request_to_queue(fill)
    assert scheduler.waiting_queue == [parent]
    again, _ = scheduler.visible()
    assert again is not fill and again.lazy.chunks == fill.lazy.chunks
    scheduler.run()
