"""Admission of linked requests: which chunks are produced, who waits for them, and what waiting requests lock.

The missing chunks of a linked request (*parent*) are computed by fills. The parent stands right behind them in the
queue that batch formation sees, so that it shares their last batch where there is room: in each layer all keys and
values are written before any are read. Chunks in the host's memory are loaded: the batch that SGLang forms next waits
for them, layer by layer.

Parents are admitted in queue order, all or nothing: an admitted parent has its resident chunks locked and the others
under way. These locks are revocable, newest first, so that waiting never takes memory from running requests. All
decisions depend on the order of requests alone, so that every tensor-parallel rank takes the same ones.
"""

import time
from typing import Any

from sglang_lazy.chunks.pins import Pins
from sglang_lazy.chunks.rows import RowCache
from sglang_lazy.chunks.tree import Node
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import (
    ChunkNodes,
    LinkedRequest,
    Undecided,
    as_linked,
    lazy_state,
    linked,
    stand_in,
)
from sglang_lazy.scheduler.advice import Advice
from sglang_lazy.scheduler.arrival import Arrival
from sglang_lazy.scheduler.budget import Budget
from sglang_lazy.scheduler.control import ChunkControl
from sglang_lazy.scheduler.producer import Producer


class ChunkAdmission:
    """Bookkeeping of parents beside one SGLang scheduler.

    holders: the admitted parents, in order of admission.
    linked_waiting: whether the waiting queue may hold a linked request; whoever adds one sets it.
    shown: while SGLang forms a batch, what it sees of the queue; None where that is all of it.
    keeps_locks: whether no lock may be taken back now.
    left_out_adapters: LoRA adapters that a fill needs, but SGLang could not load for the batch that it is forming.
    max_growth: as in `Budget`.  max_pinned: how many tokens may be pinned.
    """

    def __init__(
        self,
        scheduler: Any,
        rows: RowCache,
        arrival: Arrival,
        producer: Producer,
        max_growth: int,
        max_pinned: int,
    ):
        self.scheduler = scheduler
        self.rows, self.store = rows, rows.store
        self.arrival, self.producer = arrival, producer
        self.budget = Budget(scheduler, rows, producer, max_growth)
        self.pins = Pins(self.store.tree, max_pinned)
        self.control = ChunkControl(rows, self.pins)
        self.advice = Advice(self.store.counts)
        self.holders: list[Any] = []
        self.linked_waiting = False
        self.shown: list[Any] | None = None
        self.keeps_locks = False
        self._waiting: list[Any] = []
        self.left_out_adapters: set[str | None] = set()
        self.store.release_waiting_lock = self.revoke_newest

    def reset(self) -> None:
        """The cache has been emptied."""
        self.arrival.reset()
        self.pins.reset()

    # Batch formation

    def show(self, waiting_queue: list[Any], running_batch: Any) -> None:
        """Leave in the scheduler's queue, which is in order, what batch formation may see."""
        visible = self.visible_queue(running_batch)
        if visible is not waiting_queue:
            self.shown, self._waiting = visible, waiting_queue.copy()
            waiting_queue[:] = visible

    def put_back(self, left: list[Any]) -> list[Any]:
        """The waiting queue behind a formed batch.  left: what that has left of what was shown, and what came since."""
        assert self.shown is not None
        shown, remains = set(self.shown), set(left)
        self.shown = None
        added = [req for req in left if req not in shown]
        return [req for req in self._waiting if req not in shown or req in remains] + added

    def visible_queue(self, running_batch: Any) -> list[Any]:
        """The waiting queue as batch formation may see it: before each parent, the fills that it waits for. A request
        whose policy chooses by a probe is represented by that, and left out while it runs.

        Admits parents while memory lasts. Where one does not fit, what is behind it waits as well, as on stock SGLang;
        so does what would take the memory of one that is left out. Batch formation takes requests in this order and
        stops at the first that it cannot take whole, so no parent runs before its chunks. One whose policy needs
        resident chunks is left out until they are.
        """
        self.reconcile()
        waiting = self.scheduler.waiting_queue
        self.linked_waiting = self.linked_waiting and any(lazy_state(req) is not None for req in waiting)
        if not self.linked_waiting and lazy_state(self.scheduler.chunked_req) is None:
            return waiting
        budget = self.budget.for_waiting(running_batch)
        windows = self.budget.windows_for_waiting(running_batch)
        for_answers = self.budget.num_free() - self.budget.num_left() - budget
        idle = running_batch.is_empty() and self.scheduler.chunked_req is None
        visible: dict[Any, None] = {}
        left_out = takes_more = False
        for waiting_req in waiting:
            undecided = lazy_state(waiting_req)
            req = undecided.probe if isinstance(undecided, Undecided) else waiting_req
            state = linked(req)
            need = self.budget.own_need(waiting_req, state)  # of a probe: that of its parent, which comes next
            if left_out and need > budget:
                break
            left_out |= req is not waiting_req
            if stand_in(waiting_req) is None:
                budget -= need
                continue
            if state is not None and not state.admitted and self.store.fetching and self._awaits_storage(state):
                state.waits_since = state.waits_since or time.perf_counter()
                budget -= need
                left_out = True
                continue
            if state is not None and not state.ready:
                nodes = self.cached(state)
                chunk_need, short = self.budget.chunk_need(state, nodes), 0.0
                window_need = self.budget.window_need(state, nodes, need)
                if self.rows.shares_pool:
                    need += chunk_need
                else:
                    short = chunk_need - self.budget.num_free_for_chunks()
                if short <= 0 and not (idle and not visible and not self.holders):  # it is not alone
                    short = max(need - budget, window_need - windows)
                if not state.admitted and short > 0:
                    self.advice.blocked(req, short, self.pins.num_tokens.total())
                    break
                if takes_more and need - self.budget.growth(waiting_req) > budget + for_answers:
                    break
                windows -= window_need
                first = self._admit(req, state, nodes)
                visible.update(dict.fromkeys(first or ()))
                if first is None or (state.needs_resident and not state.ready):
                    budget -= need
                    left_out = True
                    continue
            # SGLang takes what has memory for its text. It knows nothing of slots that a policy takes besides, so these
            # must be free when the batch is formed, whatever is in it; what admission had found may have been pinned.
            takes_more |= state is not None and state.num_own_slots > 0
            if takes_more and need - self.budget.growth(waiting_req) > budget + for_answers:
                break
            budget -= need
            visible[req] = None
        first = self.scheduler.chunked_req or next(iter(visible), None)
        return [req for req in visible if self._kind(req) == self._kind(first)]

    def _kind(self, req: Any) -> tuple[bool, bool]:
        """Requests of a batch have the same. Probes of the deviation run the first layers only; a mask that lets image
        tokens see what follows is SGLang's, and fits no rows but its own."""
        state, images = linked(req), req.multimodal_inputs is not None
        return state is not None and state.recomputes, images and self.arrival.limits.traits.masks_images

    def _awaits_storage(self, state: LinkedRequest) -> bool:
        return any(chunk.key in self.store.fetching for chunk in state.prompt.chunks)

    def cached(self, state: LinkedRequest) -> list[Node | None]:
        """Per slice of a parent, the node at which it is cached, None where it is missing or pending."""
        if state.chunks is not None:
            nodes = state.chunks.nodes
        else:
            found = zip(state.prompt.chunks, state.found, strict=True)
            nodes = [node if node is not None and self.store.is_at(chunk, node) else None for chunk, node in found]
        return [
            self.store.find(chunk) if node is None and chunk.key not in self.store.pending else node
            for chunk, node in zip(state.prompt.chunks, nodes, strict=True)
        ]

    def _admit(self, req: Any, state: LinkedRequest, nodes: list[Node | None]) -> list[Any] | None:
        """Lock the chunks of a parent cached at `nodes`, have those on the host loaded and the others produced; returns
        what must run first, None if the next batch has enough to compute already.
        """
        if state.chunks is None:
            state.chunks = ChunkNodes.missing(state.prompt.chunks)
            self.holders.append(req)
        for i in self.store.enter_cached(state.chunks, nodes):
            state.loaded[i] = True
        nodes = state.chunks.nodes
        if state.policy.preamble == "lead" and None in nodes and None not in state.found_text:
            # Fills compute the leading text, too; in a later batch the request would find it in the cache.
            lead, extra_key = state.prompt.chunks[0].preamble, state.prompt.chunks[0].key.namespace.extra_key
            state.found_text[None] = len(self.store.tree.find(lead, extra_key)[0])
        slices = zip(state.prompt.chunks, nodes, strict=True)
        missing: dict[ChunkKey, ChunkSlice] = {chunk.key: chunk for chunk, node in slices if node is None}
        if missing:
            state.waits_since = state.waits_since or time.perf_counter()
        self.producer.produce(req, [chunk for key, chunk in missing.items() if key not in self.store.pending])
        state.reused = [reused and node is not None for reused, node in zip(state.reused, nodes, strict=True)]
        return self.producer.wait(req, missing)

    # Launch

    def launch(self, batch: Any) -> None:
        """The rows of a prefill batch are assigned: publish the chunks that it completes, for parents in it and others.

        Whatever reads their KV is launched on the same stream, in the same forward pass or later.
        """
        published: dict[ChunkKey, Node] = {}
        parents: dict[Any, None] = {}
        for work, ends in self.producer.publish(batch, self.rows):
            published |= ends
            parents.update(dict.fromkeys(work.parents))
            self.advice.computed(work)
        rows = [req for req in batch.reqs if linked(req) is not None]
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

    # Locks

    def reconcile(self) -> None:
        """Take locks back from requests that left the queue, which SGLang does on many paths without telling."""
        if self.holders:
            waiting = set(map(stand_in, self.scheduler.waiting_queue))
            for req in [req for req in self.holders if req not in waiting]:
                self._release(req)
        self.producer.reconcile()
        self.rows.sweep()

    def revoke_newest(self) -> bool:
        """Take back the locks of the parent admitted last; it will be admitted again. False if nobody holds any."""
        if not self.holders or self.keeps_locks:
            return False
        self._release(self.holders[-1])
        return True

    def make_room(self) -> None:
        """Nothing runs, and the head of the queue does not fit: another parent loses its locks, or, where nothing else
        is locked but pins and what the head itself has, a pin ends.
        """
        held = [state.chunks.nodes for state in map(as_linked, self.holders) if state.chunks is not None]
        num_own = sum(node is not None for nodes in held for node in nodes)
        if len(self.pins) and len(self.holders) < 2 and self.store.tree.num_locks == len(self.pins) + num_own:
            self.pins.give_up()
        else:
            self.revoke_newest()

    def make_room_to_go_on(self, running_batch: Any) -> None:
        """Before the next step: SGLang aborts the last request of a batch that has no slot for another token, and takes
        the next piece of a prompt whether there is room for it or not.
        """
        if not self.rows.shares_pool:
            return  # neither locks nor pins hold memory that these take
        needed = min(self.budget.num_left(), self.scheduler.chunked_prefill_size or 0)
        if len(running_batch.reqs) == 1:
            needed += 1
        while self.budget.num_free_now() < needed and (self.holders or len(self.pins)):
            if not self.revoke_newest():
                self.pins.give_up()

    def _release(self, req: Any) -> None:
        self.holders.remove(req)
        state = as_linked(req)
        chunks, state.chunks = state.chunks, None
        assert chunks is not None
        self.store.unlock_chunks(chunks)
        slices = zip(state.prompt.chunks, chunks.nodes, strict=True)
        self.producer.leave(req, [chunk.key for chunk, node in slices if node is None])

    def check_idle(self) -> None:
        """Raise RuntimeError if anything is held while the scheduler is idle: SGLang's own check cannot see that."""
        num_locks, num_pending = self.store.tree.num_locks - len(self.pins), len(self.store.pending)
        num_lost = 0
        if not self.rows.shares_pool:
            num_locks += self.rows.tree.num_locks
            tree, pool = self.store.tree, self.rows.chunk_allocator
            num_lost = pool.size - pool.available_size() - tree.evictable_size() - tree.protected_size()
        if num_locks or num_pending or num_lost or self.holders:
            raise RuntimeError(
                f"idle, but {len(self.holders)} requests hold chunks, {num_locks} locks are held, {num_pending} chunks "
                f"are pending and {num_lost} slots of chunks lost"
            )
