"""Drives requests through their phases by hand, in any order, with any chunked prefill; admission is immediate."""

from array import array
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from fakes.recorder import RecordingPools
from fakes.requests import NEUTRAL_PREAMBLE
from fakes.scheduler import Batch
from fakes.tiers import ObjectsOnDemand
from sglang_lazy.chunks.store import ChunkState
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import ChunkNodes, linked
from sglang_lazy.port.scheduler import steps as hooks

ALL = 1 << 20


class Phases(RecordingPools):
    """Prefills, decodes and releases one request at a time. Each method returns False if memory does not suffice."""

    objects_class = ObjectsOnDemand

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tree_cache, self.tokenizer, self.chunked_prefill_size = self.cache, None, 64
        self.store = self.cache.store
        self.schedule_low_priority_values_first, self.spec_algorithm = False, SpeculativeAlgorithm.NONE
        self.cache.admission = hooks.new_admission(
            self, self.rows.segment_table.max_segments, preamble=array("q", NEUTRAL_PREAMBLE)
        )
        self.cache.tree.release_lock = self.revoke
        self.batches: dict[Req, ScheduleBatch] = {}

    @property
    def waiting_queue(self) -> list[Req]:
        """The requests whose probes run."""
        probes = [state.probe for state in map(linked, self.running) if state is not None]
        return [probe.parent for probe in probes if probe is not None]

    def revoke(self) -> bool:
        if self.waiting_locks:
            self.cache.tree.unlock(self.waiting_locks.pop())
            return True
        return False

    def fits(self, num_tokens: int) -> bool:
        if self.window and self.slots.swa_available_size() + self.cache.swa_evictable_size() < num_tokens:
            return False
        return self.num_free + self.cache.evictable_size() >= num_tokens

    def arrive(self, req: Req) -> None:
        self.cache.admission.arrival.receive(req)
        if self.store.fetching:
            self.take_acknowledgements()

    def begin(self, req: Req, num_tokens: int = ALL) -> bool:
        """Make the chunks of a new request resident, match it, and compute up to `num_tokens`."""
        if (state := linked(req)) is None:
            return self._match(req, num_tokens)
        slices = state.prompt.chunks
        state.chunks = chunks = ChunkNodes.missing(slices)
        self._enter(chunks, slices)
        missing = {chunk.key: chunk for chunk, node in zip(slices, chunks.nodes, strict=True) if node is None}
        begun = False
        if not missing or self._fill(req, list(missing.values()), num_tokens):
            self._enter(chunks, slices)
            assert chunks.complete
            begun = self._match(req, num_tokens)
        state.chunks = None
        self.store.unlock_chunks(chunks)
        return begun

    def _enter(self, chunks: ChunkNodes, slices: Sequence[ChunkSlice]) -> None:
        self.store.enter_cached(chunks, [self.store.find(chunk) for chunk in slices])

    def _match(self, req: Req, num_tokens: int) -> bool:
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        begun = self.extend(req, num_tokens)
        if not begun:
            self.cache.unlock(req.lock)
            req.last_node = req.lock = None
        return begun

    def _fill(self, parent: Req, chunks: list[ChunkSlice], num_tokens: int) -> bool:
        """Compute chunks of a request, `num_tokens` at a time."""
        fill, tokens = Fill(chunks, parent), array("q")
        for part in fill.parts:
            tokens += part.tokens
        req = hooks.internal_requests(self)("fill", tokens, parent)
        req.lazy = fill
        if not self._match(req, num_tokens):
            return False
        while req.extend_end < len(tokens):
            self.check([parent])
            self.end_piece(req)
            if not self.next_piece(req, num_tokens):
                self.release(req, checkpoint=False)
                return False
        assert all(self.store.state(chunk) is ChunkState.RESIDENT for chunk in chunks)
        self.check([parent])
        self.release(req)
        return True

    def extend(self, req: Req, num_tokens: int) -> bool:
        """Compute up to `num_tokens` after the prefix."""
        start = req.prefix_len
        end = min(start + num_tokens, len(req.full_untruncated_fill_ids))
        state = linked(req)
        begins = state is not None and state.own is None
        if not self.fits(end - start + (state.policy.num_own_slots(state.prompt) if begins else 0)):
            return False
        req.extend_end = end
        in_pieces = end < len(req.full_untruncated_fill_ids)
        self.batches[req] = batch = Batch.init_new(
            [req],
            self.rows,
            self.slots,
            self.cache,
            self.model_config,
            False,
            SpeculativeAlgorithm.NONE,
            chunked_req=req if in_pieces else None,
        )
        batch.prepare_for_extend()
        self.launch(batch)
        return True

    def end_piece(self, req: Req) -> None:
        """Process the result of a piece that does not complete the prompt."""
        checkpoint_kv_cache(req, self.cache)

    def next_piece(self, req: Req, num_tokens: int) -> bool:
        """Compute the next piece of a prompt."""
        req.inflight_middle_chunks = 1
        req.init_next_round_input()
        return self.extend(req, num_tokens)

    def end_prefill(self, req: Req) -> None:
        """Process the result of the last piece."""
        self.generate(req)
        req.inflight_middle_chunks = 0
        checkpoint_kv_cache(req, self.cache)

    def generate(self, req: Req) -> None:
        req.output_ids.append(req.future[len(req.output_ids)])

    def decode(self, req: Req) -> bool:
        """Compute the last token and generate another."""
        if not self.fits(1):
            return False
        self.batches[req].prepare_for_decode()
        self.launch(self.batches[req])
        self.generate(req)
        return True

    def release(self, req: Req, checkpoint: bool = True) -> None:
        release_kv_cache(req, self.cache, checkpoint=checkpoint)
        del self.batches[req]
