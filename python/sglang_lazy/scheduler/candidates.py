"""Which waiting requests one batch may take."""

import itertools
import time
from collections.abc import Callable, Sequence

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import LinkedRequest, Undecided, lazy_state, linked, num_pieces, stand_in
from sglang_lazy.scheduler.budget import Budget

Nodes = list[Node | None]
"""Per slice of a prompt, the node where it is cached; None if it is missing or pending."""


class Candidates:
    """The waiting requests that one batch may take, in order, with each parent's fills before it. A request whose
    policy chooses by a probe is represented by the probe, and left out while that runs.

    Parents are admitted while memory lasts. If one does not fit, all after it wait, as on stock SGLang; so do requests
    that would take the memory of one that is left out. Batch formation takes requests in this order and stops at the
    first that it cannot take whole, so no parent runs before its chunks. A parent whose policy needs resident chunks is
    left out until they are.

    max_pieces: the most pieces of a batch, as far as they are known; see `num_pieces`.
    chunked: the request in chunked prefill, which any batch has.
    alone: whether nothing runs and no parent is admitted, so that the first one may take all memory.
    cached: where the chunks of a parent are.
    admit: admits a parent. Returns the requests that must run first, None if the next batch has enough to compute.
    blocked: called with a parent that does not fit, and the tokens that it lacks.
    requests: what has been collected.
    """

    def __init__(
        self,
        store: ChunkStore,
        budget: Budget,
        running: Sequence[Request],
        max_pieces: float,
        chunked: Request | None,
        alone: bool,
        cached: Callable[[LinkedRequest], Nodes],
        admit: Callable[[Request, LinkedRequest, Nodes], list[Request] | None],
        blocked: Callable[[Request, float], None],
    ):
        self.store, self.budget, self.alone = store, budget, alone
        self.cached, self.admit, self.blocked = cached, admit, blocked
        self.requests: dict[Request, None] = {}
        self._free_pieces = max_pieces - (0 if chunked is None else num_pieces(chunked))
        # In tokens: what the answers of running requests will take, and what further requests may claim.
        self._for_answers = budget.for_answers(running)
        self._free = budget.for_waiting(self._for_answers)
        self._free_windows = budget.windows_for_waiting(running)
        self._free_states = budget.states_for_waiting()
        self._starting = set[ChunkKey]()  # chunks of fills, whose states are claimed
        self._num_text_states = budget.num_text_states()
        self._leaves_out = self._takes_more = False

    def add(self, waiting: Request) -> bool:
        """Add the next waiting request, or leave it out. Returns False if it and all after it must wait."""
        undecided = lazy_state(waiting)
        req = undecided.probe if isinstance(undecided, Undecided) else waiting
        state = linked(req)
        need = self.budget.own_need(waiting, state)  # a probe's need is its parent's, which runs next
        if self._leaves_out and need > self._free:
            return False
        self._leaves_out |= req is not waiting
        if stand_in(waiting) is None:
            return self._leave_out(need)
        assert req is not None, "its probe is made when it arrives"
        if state is None or state.ready:
            return self._take(waiting, req, state, need)
        if not state.admitted and self._awaits_storage(state):
            state.waits_since = state.waits_since or time.perf_counter()
            return self._leave_out(need)
        return self._add_parent(waiting, req, state, need)

    def _add_parent(self, waiting: Request, req: Request, state: LinkedRequest, need: int) -> bool:
        """Add a parent some of whose chunks are not locked yet."""
        nodes = self.cached(state)
        chunk_need, short = self.budget.chunk_need(state, nodes), 0.0
        window_need = self.budget.window_need(state, nodes, need)
        starting = self.budget.states_to_start(state, nodes) - self._starting
        state_need = self.budget.states_to_lock(nodes) + sum(key.most_states for key in starting)
        if self.budget.rows.shares_pool:
            need += chunk_need
        else:
            short = chunk_need - self.budget.num_free_for_chunks()
        if short <= 0 and (self.requests or not self.alone):
            short = max(need - self._free, window_need - self._free_windows)
        if not state.admitted and short > 0:
            self.blocked(req, short)
            return False
        if state_need > self._free_states:  # whatever else is free: SGLang does not count them
            return False
        if self._exceeds(waiting, need):
            return False
        self._free_windows -= window_need
        self._free_states -= state_need
        self._starting |= starting
        first = self.admit(req, state, nodes)
        self.alone = False
        if not all(map(self._append, first or ())):
            return False
        if first is None or (state.needs_resident and not state.ready):
            return self._leave_out(need)
        return self._take(waiting, req, state, need)

    def _take(self, waiting: Request, req: Request, state: LinkedRequest | None, need: int) -> bool:
        self._takes_more |= state is not None and state.num_own_slots > 0
        if self._exceeds(waiting, need):
            return False
        if state is not None and self._num_text_states:  # states that fills of the same batch may count on
            num_locked = min(self._num_text_states, num_pieces(req))
            if self._free_states < num_locked:
                return False
            self._free_states -= num_locked
        if not self._append(req):
            return False
        self._free -= need
        return True

    def _append(self, req: Request) -> bool:
        """Have the batch take a request, unless its pieces would be too many."""
        if req in self.requests:
            return True
        if num_pieces(req) > self._free_pieces:
            return False
        self._free_pieces -= num_pieces(req)
        self.requests[req] = None
        return True

    def _leave_out(self, need: int) -> bool:
        self._free -= need
        self._leaves_out = True
        return True

    def _exceeds(self, waiting: Request, need: int) -> bool:
        """Whether there might be no slots for it when the batch is formed. SGLang budgets for text only: slots that a
        policy takes in addition must be free, whatever else is in the batch; memory that admission had counted on may
        have been pinned since."""
        return self._takes_more and need - self.budget.growth(waiting) > self._free + self._for_answers

    def _awaits_storage(self, state: LinkedRequest) -> bool:
        return bool(self.store.fetching) and any(chunk.key in self.store.fetching for chunk in state.prompt.chunks)

    def of_one_kind(self, chunked: Request | None, masks_images: bool) -> list[Request]:
        """The collected requests of the first one's kind, or of that of the request in chunked prefill.

        A batch has one kind: deviation probes run only the first layers, and SGLang's mask that lets image tokens see
        later ones (`masks_images`) does not fit linked rows.
        """

        def kind(req: Request) -> tuple[bool, bool]:
            state, images = linked(req), self.budget.facts.has_media(req)
            return state is not None and state.recomputes, images and masks_images

        if not self.requests:
            return []
        first = kind(chunked or next(iter(self.requests)))
        select = filter if chunked is None else itertools.takewhile  # prefills cut in turn would pass others for ever
        return list(select(lambda req: kind(req) == first, self.requests))
