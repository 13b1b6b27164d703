"""Admission of linked requests: which chunks are produced, who waits for them, and what waiting requests lock.

The missing chunks of a linked request (*parent*) are computed by fills. In the queue that batch formation sees, a
parent directly follows its fills, so that it can share their last batch: in each layer all keys and values are written
before any are read. Chunks in host memory are loaded; the next batch waits for them layer by layer.

Parents are admitted in queue order, all or nothing: the resident chunks of an admitted parent are locked, the others
are loaded or produced. These locks can be revoked, newest first, so that waiting requests never take memory from
running ones. All decisions depend only on the order of requests, so every tensor-parallel rank makes the same ones.
"""

import time
from collections.abc import Sequence
from typing import Any

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.pins import Pins
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import (
    ChunkNodes,
    LinkedRequest,
    Undecided,
    as_linked,
    fill_of,
    is_ahead,
    is_internal,
    lazy_state,
    linked,
    stand_in,
)
from sglang_lazy.scheduler.arrival import Arrival
from sglang_lazy.scheduler.budget import Budget
from sglang_lazy.scheduler.candidates import Candidates, Nodes
from sglang_lazy.scheduler.control import ChunkControl
from sglang_lazy.scheduler.facts import Facts
from sglang_lazy.scheduler.producer import Producer
from sglang_lazy.scheduler.warnings import Warnings


class ChunkAdmission:
    """Admits parents for one SGLang scheduler.

    holders: the admitted parents, in order of admission.
    shown: the part of the queue that SGLang sees while it forms a batch; None if that is all of it.
    internal: the fills and probes that have rows, in which they keep a place for their parents.
    gave_back: whether internal or waiting requests have given back rows or locks since the last batch was formed.
    keeps_locks: whether locks must not be revoked now.
    left_out_adapters: LoRA adapters that a fill needs but that SGLang could not load for the batch being formed.
    max_growth: as in `Budget`.
    max_pinned: the share of the pools of tokens and states that may be pinned.
    """

    def __init__(
        self,
        facts: Facts,
        rows: RowCache,
        arrival: Arrival,
        producer: Producer,
        max_growth: int,
        max_pinned: float,
    ):
        self.facts = facts
        self.rows, self.store = rows, rows.store
        self.arrival, self.producer = arrival, producer
        self.budget = Budget(facts, rows, producer, max_growth)
        self.pins = Pins(self.store, int(max_pinned * self.store.device.size))
        if self.store.states is not None:
            self.pins.max_states = int(max_pinned * self.store.states.pool.size)
        self.control = ChunkControl(rows, self.pins)
        self.warnings = Warnings(self.store.counts)
        self.holders: list[Request] = []
        self.shown: list[Request] | None = None
        self.internal: set[Request] = set()
        self.gave_back = False
        self.keeps_locks = False
        self._waiting: list[Request] = []
        self.left_out_adapters: set[str | None] = set()
        self.store.tree.release_lock = self.revoke_newest

    def reset(self) -> None:
        """Forget what depends on cached KV: the cache has been emptied."""
        self.arrival.reset()
        self.pins.reset()

    # Batch formation

    def show(self, waiting_queue: list[Request], running: Sequence[Request]) -> None:
        """Reduce the scheduler's sorted queue to what batch formation may see."""
        candidates = self.candidates(running)
        if candidates is not waiting_queue:
            self.shown, self._waiting = candidates, waiting_queue.copy()
            waiting_queue[:] = candidates

    def put_back(self) -> None:
        """Restore the scheduler's queue, of which only the shown part was there: it lacks what the batch has taken, and
        may have new requests at its end."""
        if self.shown is None:
            return
        left = self.facts.waiting
        shown, remains = set(self.shown), set(left)
        self.shown = None
        added = [req for req in left if req not in shown]
        self.facts.waiting = [req for req in self._waiting if req not in shown or req in remains] + added

    def formed(self, starving: bool) -> None:
        """Restore the queue once a batch has been formed.  starving: whether there is none, and nothing runs."""
        shown = self.shown or self.facts.waiting
        self.put_back()
        self.reconcile()
        # With one pool for text and chunks, the head of the queue is admitted by now; with two, or where chunks have
        # states as well, chunks may lack room, which pins hold.
        has_own_pool = not self.rows.shares_pool or self.store.states is not None
        if starving and (shown or self.holders or (self.facts.waiting and has_own_pool)):
            self.make_room()

    @property
    def num_waiting(self) -> int:
        """How many requests of users wait, also while only part of them is in the scheduler's queue."""
        return len(self.facts.waiting if self.shown is None else self._waiting)

    def candidates(self, running: Sequence[Request]) -> list[Request]:
        """The waiting queue as batch formation may see it; admits parents while memory lasts."""
        self.reconcile()
        waiting, chunked = self.facts.waiting, self.facts.chunked
        arrival = self.arrival
        arrival.linked_waiting = arrival.linked_waiting and any(lazy_state(req) is not None for req in waiting)
        if not arrival.linked_waiting and lazy_state(chunked) is None:
            return waiting
        alone = not running and chunked is None and not self.holders
        max_pieces, act = arrival.limits.max_pieces, (self.cached, self._admit, self._blocked)
        candidates = Candidates(self.store, self.budget, running, max_pieces, chunked, alone, *act)

        def serving() -> bool:
            others = [*running, *([] if chunked is None else [chunked])]
            return bool(candidates.requests) or not all(map(is_ahead, others))

        for req in arrival.ahead.behind(waiting, serving) if arrival.ahead.waiting else waiting:
            if not candidates.add(req):
                break
        return candidates.of_one_kind(chunked, arrival.limits.traits.masks_images)

    def _blocked(self, req: Request, num_short: float) -> None:
        self.warnings.blocked(self.facts.rid(req), num_short, self.pins.num_tokens.total())

    def cached(self, state: LinkedRequest) -> Nodes:
        """Per slice of a parent, the node where it is cached, None if it is missing or pending."""
        if state.chunks is not None:
            nodes = state.chunks.nodes
        else:
            found = zip(state.prompt.chunks, state.found, strict=True)
            nodes = [node if node is not None and self.store.is_at(chunk, node) else None for chunk, node in found]
        return [
            self.store.find(chunk) if node is None and chunk.key not in self.store.pending else node
            for chunk, node in zip(state.prompt.chunks, nodes, strict=True)
        ]

    def _admit(self, req: Request, state: LinkedRequest, nodes: Nodes) -> list[Request] | None:
        """Lock the chunks of a parent that are cached at `nodes`, load those on the host, and produce the others.

        Returns the requests that must run first, None if the next batch has enough to compute already.
        """
        if state.chunks is None:
            state.chunks = ChunkNodes.missing(state.prompt.chunks)
            self.holders.append(req)
        for i in self.store.enter_cached(state.chunks, nodes):
            state.loaded[i] = True
        nodes = state.chunks.nodes
        if state.policy.preamble == "lead" and None in nodes:
            # Fills compute the leading text, too, and a later batch would take it for a cache hit.
            first = state.prompt.chunks[0]
            leading = first.key.namespace.leading
            if leading not in state.found_text:
                state.found_text[leading] = len(self.store.tree.find(first.preamble, leading)[0])
        slices = zip(state.prompt.chunks, nodes, strict=True)
        missing: dict[ChunkKey, ChunkSlice] = {chunk.key: chunk for chunk, node in slices if node is None}
        if missing:
            state.waits_since = state.waits_since or time.perf_counter()
        self.producer.produce(req, [chunk for key, chunk in missing.items() if key not in self.store.pending])
        state.reused = [reused and node is not None for reused, node in zip(state.reused, nodes, strict=True)]
        return self.producer.wait(req, missing)

    # Launch

    def launch(self, batch: Any) -> None:
        """Publish the chunks that a prefill batch completes, once its rows are assigned, for all parents.

        Whatever reads their KV is launched on the same stream, in the same forward pass or later.
        """
        taken = self.facts.taken(batch)
        published: dict[ChunkKey, Node] = {}
        parents: dict[Request, None] = {}
        for work, ends in self.producer.publish(taken, self.facts.slots(batch), self.rows):
            published |= ends
            parents.update(dict.fromkeys(work.parents))
            self.warnings.computed(work)
        self.internal.update(one.req for one in taken if is_internal(one.req))
        linked_rows = [one for one in taken if linked(one.req) is not None]
        rows = [one.req for one in linked_rows]
        for req in rows:
            self.rows.complete(req, published)
            parents.pop(req, None)
            if (probe := as_linked(req).probe) is not None:
                undecided = lazy_state(probe.parent)
                if isinstance(undecided, Undecided):
                    undecided.launched = True
        for parent in parents:
            state = as_linked(parent)
            assert state.chunks is not None
            self.store.enter_published(state.chunks, state.prompt.chunks, published)
        for req in rows:
            as_linked(req).policy.begin(req, self.rows)
        for one in linked_rows:
            if self.budget.has_spare_states():
                self.rows.keep_leading(one.req, one.end - one.start)

    # The end of internal requests

    def is_abandoned(self, req: Request | None) -> bool:
        """Whether an internal request computes for nobody. A parent without locks wants its chunks, too: one that has
        not been admitted, or whose locks were revoked."""
        if req is None or not is_internal(req):
            return False
        self.reconcile()
        waiting = self.facts.waiting
        if (fill := fill_of(req)) is None:
            return self._parent_of(req) not in waiting
        if fill.parents:
            return False
        keys = {chunk.key for chunk in fill.chunks}
        states = (linked(stand_in(other)) for other in waiting)
        return not any(chunk.key in keys for state in states if state is not None for chunk in state.prompt.chunks)

    def end(self, req: Request, done: bool) -> None:
        """An internal request has given back its row.  done: whether it has computed all."""
        self.internal.discard(req)
        self.gave_back = True
        if fill_of(req) is None and (done or self._parent_of(req) in self.facts.waiting):
            self.arrival.end_probe(req, done)

    @staticmethod
    def _parent_of(probe_req: Request) -> Request:
        probe = as_linked(probe_req).probe
        assert probe is not None
        return probe.parent

    # Locks

    def reconcile(self) -> None:
        """Release the locks of requests that have left the queue, which happens on many paths in SGLang."""
        self._keep_locks_of(set(map(stand_in, self.facts.waiting)) if self.holders else set())

    def let_go(self) -> None:
        """Release the locks of all requests, those that wait as well: the cache is emptied next."""
        self._keep_locks_of(set())

    def _keep_locks_of(self, waiting: set[Any]) -> None:
        for req in [req for req in self.holders if req not in waiting]:
            self._release(req)
        self.producer.reconcile()
        self.store.deletions.sweep()

    def revoke_newest(self, other_than: Request | None = None) -> bool:
        """Release the locks of the parent admitted last; it will be admitted again. False if there is none."""
        if not self.holders or self.keeps_locks:
            return False
        self._release(next(req for req in reversed(self.holders) if req is not other_than))
        return True

    def make_room(self) -> None:
        """Free memory for the head of the queue, which does not fit although nothing runs.

        Another parent loses its locks, also one that was admitted before the head. A pin ends if only pins and the
        head's own chunks are locked.
        """
        held = [state.chunks.nodes for state in map(as_linked, self.holders) if state.chunks is not None]
        num_own = sum(node is not None for nodes in held for node in nodes)
        if len(self.pins) and len(self.holders) < 2 and self.store.tree.num_locks == len(self.pins) + num_own:
            self.pins.give_up()
            return
        head = stand_in(self.facts.waiting[0]) if self.facts.waiting else None
        self.revoke_newest(other_than=head if len(self.holders) > 1 else None)

    def make_room_to_go_on(self, running: Sequence[Request]) -> None:
        """Free memory for the next step: SGLang aborts the last request of a batch that has no slot for another token,
        and computes the next piece of a prompt whether or not there is room for it.
        """
        if not self.rows.shares_pool:
            return  # neither locks nor pins hold memory that these take
        needed = min(self.budget.num_left(), self.facts.max_prefill)
        if len(running) == 1:
            needed += max(1, self.facts.num_ahead)
        while (self.holders or len(self.pins)) and self.budget.num_free_now() < needed:
            if not self.revoke_newest():
                self.pins.give_up()

    def may_lack_slots(self, num_running: int) -> bool:
        """Whether the next step of so many requests may lack slots, while pins or a request in chunked prefill hold
        some."""
        held, num_tokens = len(self.pins) or self.facts.chunked is not None, num_running * max(1, self.facts.num_ahead)
        return bool(held) and self.rows.shares_pool and self.budget.num_free_now() < num_tokens

    def give_up_pins(self) -> bool:
        """End a pin, since nothing else can make room; returns False if there is none."""
        if not len(self.pins):
            return False
        self.pins.give_up()
        return True

    def _release(self, req: Request) -> None:
        self.holders.remove(req)
        self.gave_back = True
        state = as_linked(req)
        chunks, state.chunks = state.chunks, None
        assert chunks is not None
        self.store.unlock_chunks(chunks)
        slices = zip(state.prompt.chunks, chunks.nodes, strict=True)
        self.producer.leave(req, [chunk.key for chunk, node in slices if node is None])

    def check_idle(self) -> None:
        """Raise RuntimeError if anything is held while the scheduler is idle, which SGLang's own check does not see."""
        num_locks, num_pending = self.store.tree.num_locks - len(self.pins), len(self.store.pending)
        num_lost = num_states = 0
        if (states := self.store.states) is not None:
            num_states = states.pool.size - states.pool.available_size() - states.num_evictable - states.num_locked
        if not self.rows.shares_pool:
            num_locks += self.rows.tree.num_locks
            tree, pool = self.store.tree, self.store.device
            num_lost = pool.size - pool.available_size() - tree.num_evictable - tree.num_locked
        if num_locks or num_pending or num_lost or num_states or self.holders:
            raise RuntimeError(
                f"idle, but {len(self.holders)} requests hold chunks, {num_locks} locks are held, {num_pending} chunks "
                f"are pending, {num_lost} slots of chunks and {num_states} states lost"
            )
