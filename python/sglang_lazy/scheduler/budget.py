"""The memory budget: how many KV slots waiting requests may claim, and how many each of them needs."""

import math
from collections.abc import Sequence

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.fills import chunks_of
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.scheduler.facts import Facts
from sglang_lazy.scheduler.producer import Producer


class Budget:
    """Memory of the KV pools, in tokens.

    max_growth: the most tokens of an answer to reserve, as SGLang does.
    """

    def __init__(self, facts: Facts, rows: RowCache, producer: Producer, max_growth: int):
        self.facts, self.rows, self.producer = facts, rows, producer
        self.max_growth = max_growth

    def for_answers(self, running: Sequence[Request]) -> float:
        """The expected growth of running requests, in tokens."""
        growth = sum(self.growth(req) for req in running)
        return growth * self.facts.growth_ratio

    def for_waiting(self, for_answers: float) -> float:
        """Tokens that waiting requests may claim: what is free or evictable, minus the expected growth of running
        requests and the rest of the chunked one."""
        return self.num_free() - self.num_left() - for_answers

    def num_free(self) -> int:
        """How many tokens are free or evictable in the pool of text."""
        return self.rows.device.available_size() + self.rows.device.evictable_size()

    def num_free_for_chunks(self) -> int:
        """How many tokens are free or evictable in the pool of chunks."""
        return self.rows.store.device.available_size() + self.rows.store.device.evictable_size()

    def num_free_now(self) -> int:
        """How many tokens the next step may compute."""
        memory = self.rows.device.windows
        return self.num_free() if memory is None else min(self.num_free(), memory.free)

    def windows_for_waiting(self, running: Sequence[Request]) -> float:
        """Window KV that waiting requests may claim, in tokens; infinite without a pool of its own."""
        if (memory := self.rows.device.windows) is None:
            return math.inf
        growth = sum(min(self.growth(req), memory.window) for req in running)
        return memory.free - self.num_left() - growth * self.facts.growth_ratio

    def states_for_waiting(self) -> float:
        """States of recurrent layers that waiting requests may claim; infinite without such layers."""
        states = self.rows.store.states
        return math.inf if states is None else states.pool.available_size() + states.num_evictable

    def has_spare_states(self) -> bool:
        """Whether there are more of them than chunks claim for which memory has yet to be allocated."""
        claimed = sum(key.most_states for key in self.rows.store.pending if not self.producer.started(key))
        return self.states_for_waiting() > claimed

    def num_text_states(self) -> int:
        """How many states of text may be locked when requests are matched, each by the first that reads it."""
        states = self.rows.store.states
        return 0 if states is None else states.num_texts

    def num_left(self) -> int:
        """How many tokens of the request in chunked prefill have no slots yet."""
        req = self.facts.chunked
        return 0 if req is None else self.facts.num_left(req)

    def growth(self, req: Request) -> int:
        """How many tokens to reserve for the rest of the answer to `req`, with those drafted beyond it."""
        left = min(self.facts.max_new_tokens(req) - len(self.facts.output(req)), self.max_growth)
        return left + self.facts.num_ahead

    def own_need(self, req: Request, state: LinkedRequest | None) -> int:
        """The most tokens that `req` itself will allocate: its text, its answer, and its policy's own slots."""
        shared = 0 if state is None else state.prompt.num_chunk_tokens - state.num_own_slots
        return len(self.facts.prompt(req)) - shared + len(self.facts.output(req)) + self.growth(req) + 1

    def chunk_need(self, state: LinkedRequest, nodes: list[Node | None]) -> int:
        """Free or evictable tokens that the chunks of a parent, cached at `nodes`, still need: missing chunks without
        memory, and cached chunks that are not locked.
        """
        locked = self.rows.store.unlocked_size(node for node in nodes if node is not None)
        return self._num_to_start(state, nodes) + locked

    def window_need(self, state: LinkedRequest, nodes: list[Node | None], own_need: int) -> int:
        """The same for window KV, including that of the parent's own text, which is evictable once it is computed, and
        of its answer.

        A node that several chunks read counts for each.
        """
        memory, windows = self.rows.device.windows, self.rows.windows
        if memory is None or windows is None:
            return 0
        pairs = zip(nodes, state.prompt.chunks, strict=True)
        read = sum(windows.num_unlocked(node, chunk.spread) for node, chunk in pairs if node is not None)
        return self._num_to_start(state, nodes) + read + memory.of_row(state.prompt.span_lens, own_need)

    def states_to_lock(self, nodes: list[Node | None]) -> int:
        """Free or evictable states of recurrent layers that cached chunks still need."""
        states = self.rows.store.states
        return 0 if states is None else states.num_unlocked(node for node in nodes if node is not None)

    def states_to_start(self, state: LinkedRequest, nodes: list[Node | None]) -> set[ChunkKey]:
        """The chunks whose states the fills that a parent waits for will reserve: its own and those of others."""
        if self.rows.store.states is None:
            return set()
        pending, keys = self.rows.store.pending, set[ChunkKey]()
        for key in self._to_start(state, nodes):
            keys.add(key)
            if key in pending:
                keys.update(chunk.key for chunk in chunks_of(pending[key]))
        return keys

    def _to_start(self, state: LinkedRequest, nodes: list[Node | None]) -> dict[ChunkKey, ChunkSlice]:
        """The missing chunks for which no memory has been allocated."""
        return {
            chunk.key: chunk
            for chunk, node in zip(state.prompt.chunks, nodes, strict=True)
            if node is None and not (chunk.key in self.rows.store.pending and self.producer.started(chunk.key))
        }

    def _num_to_start(self, state: LinkedRequest, nodes: list[Node | None]) -> int:
        """Their tokens."""
        to_start = self._to_start(state, nodes)
        num_missing = sum(chunk.num_tokens + 1 for chunk in to_start.values())
        if to_start:  # once, since fills are few
            num_missing += len(state.prompt.chunks[0].preamble)
        return num_missing
