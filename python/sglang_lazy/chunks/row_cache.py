"""Rows of linked requests: laid out over cached KV, and published to the tree when computed."""

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_lazy.cache.device import Device
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import TextSpan, tokens_at
from sglang_lazy.core.request import Request
from sglang_lazy.core.requests import Requests
from sglang_lazy.core.row_order import Row
from sglang_lazy.core.state import ChunkNodes, LinkedRequest, RowNodes, as_linked, unused_hits


class RowCache:
    """Maps rows of `req_to_token` to the tree. Rows alias slots of tree nodes, which only the tree frees.

    pool: SGLang's `ReqToTokenPool`.  requests: reads SGLang's requests.
    tree, device, windows: of text: those of `store`, unless chunks have a pool of their own.
    no_slots: an empty tensor of slots, int64.
    """

    def __init__(self, store: ChunkStore, pool: Any, requests: Requests, tree: RadixTree, device: Device):
        self.store, self.pool, self.requests, self.tree, self.device = store, pool, requests, tree, device
        self.windows = store.windows if self.tree is store.tree else None
        self.no_slots = self._placeholders = torch.empty(0, dtype=torch.int64, device=self.device.device)

    # Rows

    def read(self, req: Request, start: int, end: int) -> torch.Tensor:
        """Copy slots [start, end) of a request's row, int64."""
        return self.pool.req_to_token[self.requests.row(req), start:end].to(torch.int64, copy=True)

    def write(self, req: Request, start: int, slots: torch.Tensor) -> None:
        """Write `slots` into a request's row from `start` on."""
        self.pool.write((self.requests.row(req), slice(start, start + len(slots))), slots)

    @property
    def shares_pool(self) -> bool:
        """Whether chunks and text are in the same pool."""
        return self.tree is self.store.tree

    def lock(self, row: RowNodes) -> int:
        """Lock all that a row depends on; returns the change in evictable tokens of the pool that text is in."""
        row.num_locks += 1
        if row.num_locks > 1:
            return 0
        of_chunks = self.store.lock_chunks(row.chunks)
        return sum(map(self.tree.lock, row.spans, _spreads(row)), of_chunks if self.shares_pool else 0)

    def unlock(self, row: RowNodes) -> int:
        """Release one lock on a row; returns the same."""
        row.num_locks -= 1
        if row.num_locks > 0:
            return 0
        of_chunks = self.store.unlock_chunks(row.chunks)
        return sum(map(self.tree.unlock, row.spans, _spreads(row)), of_chunks if self.shares_pool else 0)

    def take_lent(self, slots: torch.Tensor) -> None:
        """The tree has taken the window KV of these slots, and no pass launched from now on uses them."""
        if self.windows is not None and len(slots):
            self.windows.take(slots)

    # Linked requests

    def match(self, req: Request, state: LinkedRequest, limit: int) -> tuple[torch.Tensor, RowNodes]:
        """Lay out the request's row over what is cached; returns the slots of its cached part and its nodes.

        Sets `state.row` and puts the request's tokens into its order. The request must be admitted. If
        chunks are still missing, `complete` enters all of them into the row later.

        limit: how many tokens of the prompt and its answer may be taken from the cache.
        """
        assert state.chunks is not None, f"request {self.requests.rid(req)} was scheduled before its chunks"
        if state.recomputes:
            return self.no_slots, RowNodes(state.chunks, [])
        # Without output yet no copy is needed: SGLang never appends to the prompt's array.
        ids, output = self.requests.prompt(req), self.requests.output(req)
        if output:
            ids = ids + output
        ready = state.ready
        if ready:
            pieces = [] if state.prompt.cross else self.chunk_slots(state, state.chunks)
        else:
            pieces = [self._placeholder_slots(state.prompt.num_chunk_tokens)]
        if state.probe is not None:  # it must compute the text whose attention it measures
            limit = min(limit, state.probe.query_start)
        slots, nodes = zip(*self._cached_text(state, ids, limit), strict=True)
        pieces += slots
        cached = [len(piece) for piece in slots]
        state.row = Row(state.prompt, cached, len(ids))
        self.requests.lay_out(req, state.row.permuted(ids))
        self.requests.count_computed(req, state.num_computed_tokens(cached))
        return torch.cat(pieces) if ready or any(cached) else pieces[0], RowNodes(state.chunks, list(nodes))

    def _cached_text(self, state: LinkedRequest, ids: array, limit: int) -> Iterator[tuple[torch.Tensor, Node]]:
        """Per text span, the slots of its cached beginning and the node where it ends. Part of an image does not count
        as cached: SGLang embeds an image's tokens from one range of the row."""
        if self.store.states is not None:
            yield from self._text_to_a_state(state, ids, limit)
            return
        for span, tokens in self._text(state, ids, limit):
            slots, node = self.tree.find(tokens, span.namespace)
            yield slots if len(slots) >= span.image_len else slots[:0], node

    def _text_to_a_state(self, state: LinkedRequest, ids: array, limit: int) -> Iterator[tuple[torch.Tensor, Node]]:
        """The same with recurrent layers: all text up to the last state that is cached, and none without one."""
        whole: list[tuple[torch.Tensor, Node]] = []
        covered: list[tuple[torch.Tensor, Node]] = []
        for span, tokens in self._text(state, ids, limit):
            slots, node = self.tree.find(tokens, span.namespace)
            if len(slots):
                covered = [*whole, (slots, node)]
            end = self.tree.end_of(tokens, span.namespace)
            if end is None or end.slots is None or end.is_root:
                break
            whole.append((torch.cat(self.tree.slots_to(end)), end))
        yield from covered
        for _ in range(len(state.prompt.spans) - len(covered)):
            yield self.no_slots, self.tree.root

    @staticmethod
    def _text(state: LinkedRequest, ids: array, limit: int) -> Iterator[tuple[TextSpan, array]]:
        """Each text span and its tokens, up to `limit`."""
        last = state.prompt.spans[-1]
        for span in state.prompt.spans:
            yield span, tokens_at(ids, span.first(span.count_before(limit)) if span is last else span.positions)

    def rank(self, req: Request, state: LinkedRequest, nodes: Sequence[Node | None]) -> tuple[int, int]:
        """How many tokens a waiting request would find cached on the device, and on the host, for ordering the queue.

        nodes: per slice, the node where it is cached, or None.
        """
        found = [(chunk, node) for chunk, node in zip(state.prompt.chunks, nodes, strict=True) if node is not None]
        on_host = sum(chunk.num_kept for chunk, node in found if node.slots is None)
        of_chunks = sum(chunk.num_kept for chunk, _ in found)
        ids = self.requests.prompt(req)
        of_text = sum(len(slots) for slots, _ in self._cached_text(state, ids, len(ids)))
        return of_chunks - on_host + of_text, on_host

    def chunk_slots(self, state: LinkedRequest, chunks: ChunkNodes) -> list[torch.Tensor]:
        """The slots of all chunk tokens that a linked request keeps, int64, in pieces."""
        return [
            piece
            for chunk, node in zip(state.prompt.chunks, chunks.nodes, strict=True)
            for piece in self.store.slots_of(chunk, node)
        ]

    def _placeholder_slots(self, num_tokens: int) -> torch.Tensor:
        """Read-only placeholders, int64 [num_tokens], for the slots of chunks that are not computed yet."""
        if len(self._placeholders) < num_tokens:
            self._placeholders = torch.zeros(num_tokens, dtype=torch.int64, device=self._placeholders.device)
        return self._placeholders[:num_tokens]

    def complete(self, req: Request, published: Mapping[ChunkKey, Node]) -> None:
        """Enter the chunks that were missing when a row was laid out; called when SGLang has assigned the row.

        Counts a use of all that the row depends on. From here on SGLang needs only the length of the cached part.

        published: by key, the nodes where the chunks that the same batch computes end.
        """
        state, row = as_linked(req), self.requests.nodes(req)
        if state.waits_since is not None:
            self.store.counts.wait_seconds.observe(time.perf_counter() - state.waits_since)
            state.waits_since = None
        if not row.chunks.complete:
            self.store.enter_published(row.chunks, state.prompt.chunks, published)
            assert row.chunks.complete, f"request {self.requests.rid(req)} was scheduled before its chunks"
            if not state.prompt.cross:
                self.write(req, 0, torch.cat(self.chunk_slots(state, row.chunks)))
        if not row.used:  # chunked prefill counts as one use
            row.used = True
            if state.prompt.cross:
                state.cross_slots = torch.cat(self.chunk_slots(state, row.chunks)).to(torch.int32)
            priority = self.requests.priority(req)
            for node, spread in zip(row.chunks.nodes, row.chunks.spreads, strict=True):
                self.store.tree.use(node, priority, spread)
            for node in row.spans:
                self.tree.use(node, priority)
            if state.probe is None:
                self.store.count_use(state.prompt, state.reused, unused_hits(req))

    def publish(self, req: Request, row_len: int, chunked: bool, num_lost: int) -> None:
        """Give the text in the first `row_len` tokens of a linked request's row to the tree, and lock it there.

        Text that the tree has got from another request in the meantime is freed, and the row takes the tree's slots
        instead. Afterwards the tree owns all `row_len` slots.

        chunked: whether the request is between two pieces of its prompt, the last of which may still be running.
            Otherwise the passes that computed its chunks and its text have ended.
        num_lost: how many of the row's first tokens, of those that no node owns, have lost their window KV.
        """
        row, nodes, priority = as_linked(req).row, self.requests.nodes(req), self.requests.priority(req)
        counts = [row.available(i, row_len) for i in range(len(row.published))]
        text_start = row.prompt.num_chunk_tokens
        text_slots = self.read(req, text_start, row_len) if counts != row.published else self.no_slots
        for i, (span, count) in enumerate(zip(row.prompt.spans, counts, strict=True)):
            published = row.published[i]
            if count == published:
                continue
            cached, computed_start = row.cached[i], row.computed_start[i]
            start = computed_start - text_start
            slots = text_slots[start : start + count - cached]
            if cached:
                slots = torch.cat([text_slots[row.cached_start[i] - text_start :][:cached], slots])
            tokens, namespace = self._tokens(req, span.first(count)), span.namespace
            windows_start = max(published, cached + num_lost - computed_start)
            num_present, node, lent = self.tree.add(tokens, namespace, slots, priority, windows_start)
            self.take_lent(lent)
            if num_present > published:
                self.device.free(slots[published:num_present])
                kept = torch.cat(self.tree.slots_to(node))[published:num_present]
                self.write(req, computed_start + published - cached, kept)
            row.published[i] = count
            self._hold(req, i, node)
        self.requests.own(req, row_len)
        if not chunked:
            self.store.back_up(nodes.chunks.nodes)

    def keep_end(self, req: Request, row_len: int, save: Callable[[Request, int], None]) -> None:
        """With recurrent layers, publish the text of a request that ends and the state after it, without which nobody
        could read the text, if there is room for that.  save: copies a request's state to a slot."""
        states = self.store.states
        if states is None or (slot := states.for_text()) is None:
            return
        save(req, slot)
        self.publish(req, row_len, chunked=False, num_lost=0)
        if not states.give(self.requests.nodes(req).spans[-1], slot):
            states.pool.free([slot])

    def keep_leading(self, req: Request, num_tokens: int) -> None:
        """With recurrent layers, let the tree keep the text before a request's chunks and the state at its end, if the
        pass about to run computes all of it: a system message, with which other prompts begin, too.

        num_tokens: how many tokens of the row the pass computes, from the end of its cached part on.
        """
        state, states = as_linked(req), self.store.states
        if states is None or state.ahead or state.probe is not None:
            return
        row, span, num_leading = state.row, state.prompt.spans[0], state.prompt.num_leading_tokens
        if not 0 < num_leading <= num_tokens or num_leading != state.prompt.chunks[0].start:  # as with an image in it
            return
        if row.cached[0] or self.requests.num_cached(req) != row.computed_start[0]:
            return
        tokens = self._tokens(req, span.positions)
        node = self.tree.end_of(tokens, span.namespace)
        if node is None and self.tree.end_of(tokens[:1], span.namespace) is not None:
            return  # publishing would free slots that the pass writes; at the request's end it does not
        if node is not None and (node.slots is None or states.has(node)):  # another request of the batch came first
            return
        if (slot := states.for_text(read=True)) is None:
            return
        if node is None:
            self.publish(req, row.computed_start[0] + num_leading, chunked=True, num_lost=0)
        else:  # the pass writes to slots of its own
            self._hold(req, 0, node)
        states.give(self.requests.nodes(req).spans[0], slot)

    def _hold(self, req: Request, i: int, node: Node) -> None:
        """Have a row depend on `node` for text span `i`."""
        nodes = self.requests.nodes(req)
        self.tree.lock(node)
        self.tree.unlock(nodes.spans[i])
        nodes.spans[i] = node

    def let_go_of_chunks(self, req: Request) -> None:
        """Unlock the chunks of a row that does not depend on them any more."""
        row = self.requests.nodes(req)
        self.store.unlock_chunks(row.chunks)
        row.chunks = ChunkNodes([], [], num_locks=1)

    def move_lock(self, req: Request, nodes: RowNodes) -> None:
        """Replace the nodes that SGLang has locked for a request."""
        self.lock(nodes)
        self.unlock(self.requests.hold(req, nodes))

    def _tokens(self, req: Request, positions: np.ndarray) -> array:
        """The tokens at `positions` of prompt and answer, which have no gaps within the answer."""
        prompt = self.requests.prompt(req)
        if not len(positions) or positions[-1] < len(prompt):
            return tokens_at(prompt, positions)
        count = int(np.searchsorted(positions, len(prompt)))
        return tokens_at(prompt, positions[:count]) + self.requests.output(req)[: len(positions) - count]


def _spreads(row: RowNodes) -> Iterable[int]:
    return row.spreads or itertools.repeat(0)
