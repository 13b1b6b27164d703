"""Admission of linked requests: what is filled, who waits for it, and which locks waiting requests hold.

The missing chunks of a linked request (*parent*) are computed by *fill* requests: prefill-only, each for as many chunks
as SGLang computes of a prompt at once, batched and cut like any other. The parent stands right behind them in the queue
that batch formation sees, so that it shares their last batch where there is room: in each layer all keys and values are
written before any are read.

Parents are admitted in queue order, all or nothing: an admitted parent has its resident chunks locked and the others
under way. These locks are revocable, newest first, so that waiting never takes memory from running requests. All
decisions depend on the order of requests alone, so that every tensor-parallel rank takes the same ones.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.core.prompt import ChunkRef, LinkedPrompt
from sglang_lazy.core.state import Fill, Link, check_request, requested_layout
from sglang_lazy.port.radix import ChunkNodes, LazyRadixCache


class ChunkAdmission:
    """Bookkeeping of parents and fills beside one SGLang scheduler.

    holders: the admitted parents, in order of admission.
    fills: the requests that compute the chunks under way, by chunk key.
    max_fill_tokens: how many tokens a fill of several chunks may have. More would not be computed at once, nor be of
        use before its end.
    materialize: whether requests get copies of their chunks.
    linked_waiting: whether the waiting queue may have a linked request: none joins it but by the hook that sets this.
    forming, late: whether SGLang is forming a batch, and the parents that arrived meanwhile, when their grammar became
        ready; they join the queue after that.
    """

    def __init__(self, scheduler: Any, cache: LazyRadixCache, max_chunks: int, materialize: bool = False):
        self.scheduler = scheduler
        self.cache = cache
        self.max_chunks = max_chunks
        self.materialize = materialize
        self.holders: list[Req] = []
        self.fills: dict[tuple, Req] = {}
        self.max_fill_tokens = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self._fill_ids = itertools.count()
        self._fill_params = SamplingParams(max_new_tokens=0, temperature=0)
        self._fill_params.normalize(None)
        self.linked_waiting = False
        self.forming = False
        self.late: list[Req] = []
        cache.release_waiting_lock = self.revoke_newest

    # Arrival

    def arrive(self, req: Req) -> None:
        """Attach a `Link` to a request that has chunks; a bad one is set up to be answered with a 400."""
        if getattr(req, "link", None) is not None or req.to_finish is not None or req.finished_reason is not None:
            return
        try:
            layout = requested_layout(req)
            if layout is None:
                return
            check_request(req, layout, self.max_chunks)
            prompt = LinkedPrompt.build(req.origin_input_ids, layout, req.extra_key)
            if self.materialize:
                self._check_copy_fits(prompt)
        except ValueError as error:
            req.set_finish_with_abort(str(error))
            return
        if prompt.chunks:
            found = [self.cache.find_chunk(chunk) for chunk in prompt.chunks]
            req.link = Link(prompt, found, self.materialize)

    def _check_copy_fits(self, prompt: LinkedPrompt) -> None:
        """Raise ValueError unless the pool holds the prompt beside the chunks that are copied into it."""
        in_prompt = prompt.spans[-1].end
        copied = sum(chunk.num_tokens for chunk in {chunk.key: chunk for chunk in prompt.chunks}.values())
        size = self.cache.token_to_kv_pool_allocator.size
        if in_prompt + copied + 1 > size:
            raise ValueError(
                f"the prompt's {in_prompt} tokens and the {copied} tokens of its chunks, which are copied, do not fit "
                f"together into the KV pool of {size} tokens"
            )

    # Batch formation

    def visible_queue(self, running_batch: ScheduleBatch) -> list[Req]:
        """The waiting queue as batch formation may see it: before each parent, the fills that it waits for.

        Admits parents while memory lasts. Where one does not fit, what is behind it waits as well, as on stock SGLang.
        Batch formation takes requests in this order and stops at the first that it cannot take whole, so no parent runs
        before its chunks. One that gets copies is left out until they are resident: copying is the first thing in a
        forward pass.
        """
        self.reconcile()
        waiting = self.scheduler.waiting_queue
        self.linked_waiting = self.linked_waiting and any(is_linked(req) for req in waiting)
        if not self.linked_waiting:
            return waiting
        budget = self._budget(running_batch)
        idle = running_batch.is_empty() and self.scheduler.chunked_req is None
        visible: dict[Req, None] = {}
        for req in waiting:
            need = self._own_need(req)
            if is_linked(req) and not req.link.ready:
                link: Link = req.link
                nodes = self._resident(link)
                need += self._chunk_need(link, nodes)
                alone = idle and not visible and not self.holders
                if not link.admitted and need > budget and not alone:
                    break
                fills = self._admit(req, link, nodes)
                visible.update((fill, None) for fill in fills if not is_launched(fill))
                if link.materialize and not link.ready:
                    budget -= need
                    continue
            budget -= need
            visible[req] = None
        return list(visible)

    def _budget(self, running_batch: ScheduleBatch) -> float:
        """Tokens that waiting requests may still claim: what is free or evictable, less the growth of running ones."""
        growth = sum(
            min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
            for req in running_batch.reqs
        )
        free = self.cache.token_to_kv_pool_allocator.available_size() + self.cache.evictable_size()
        return free - growth * self.scheduler.new_token_ratio_tracker.current

    @staticmethod
    def _own_need(req: Req) -> int:
        """Tokens that `req` itself will allocate, at most: its text, its answer and its copy of chunks."""
        link: Link | None = getattr(req, "link", None)
        in_chunks = 0 if link is None or link.materialize else link.prompt.num_chunk_tokens
        new = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        return len(req.origin_input_ids) - in_chunks + len(req.output_ids) + new + 1

    def _resident(self, link: Link) -> list[Any]:
        """Per chunk of a parent, the node at which it is resident, None where it is missing or under way."""
        if link.admitted:
            nodes = link.chunks.nodes
        else:
            nodes = [None if node is None or node.evicted else node for node in link.found]
        return [
            self.cache.find_chunk(chunk) if node is None and chunk.key not in self.fills else node
            for chunk, node in zip(link.prompt.chunks, nodes, strict=True)
        ]

    def _chunk_need(self, link: Link, nodes: list[Any]) -> int:
        """Tokens that the chunks of a parent, resident at `nodes`, still take from what is free or evictable.

        Missing chunks, unless their fill has started, and resident ones that nobody has locked yet.
        """
        missing = {chunk.key: chunk for chunk, node in zip(link.prompt.chunks, nodes, strict=True) if node is None}
        to_start = [
            chunk for key, chunk in missing.items() if key not in self.fills or not is_launched(self.fills[key])
        ]
        to_fill = sum(chunk.num_tokens + 1 for chunk in to_start)
        return to_fill + self.cache.unlocked_size(node for node in nodes if node is not None)

    def _admit(self, req: Req, link: Link, nodes: list[Any]) -> list[Req]:
        """Lock the chunks of a parent resident at `nodes` and have the others computed; returns the fills it awaits."""
        if not link.admitted:
            link.chunks = ChunkNodes([None] * len(nodes), num_locks=1)
            self.holders.append(req)
        missing: dict[tuple, ChunkRef] = {}
        for i, (chunk, node) in enumerate(zip(link.prompt.chunks, nodes, strict=True)):
            if node is None:
                missing[chunk.key] = chunk
            elif link.chunks.nodes[i] is None:
                self.cache.enter_chunk(link.chunks, i, node)
        for chunks in self._shares([chunk for key, chunk in missing.items() if key not in self.fills]):
            self.fills.update(dict.fromkeys((chunk.key for chunk in chunks), self._fill_request(req, chunks)))
        awaited = list(dict.fromkeys(self.fills[key] for key in missing))
        for fill in awaited:
            if req not in fill.fill.parents:
                fill.fill.parents.append(req)
        link.reused = [reused and node is not None for reused, node in zip(link.reused, nodes, strict=True)]
        return awaited

    def _shares(self, chunks: Iterable[ChunkRef]) -> Iterator[list[ChunkRef]]:
        """The chunks of each fill that is to compute `chunks`."""
        share, num_tokens = [], 0
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            if share and num_tokens > self.max_fill_tokens:
                yield share
                share, num_tokens = [], chunk.num_tokens
            share.append(chunk)
        if share:
            yield share

    def _fill_request(self, parent: Req, chunks: list[ChunkRef]) -> Req:
        """A request that computes `chunks` and answers nobody. Its id is no prefix of a user's, nor the reverse."""
        scheduler = self.scheduler
        tokens = array("q")
        for chunk in chunks:
            tokens += chunk.tokens
        req = Req(
            f"\0fill-{next(self._fill_ids)}",
            "",
            tokens,
            self._fill_params,
            vocab_size=scheduler.model_config.vocab_size,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
        )
        req.tokenizer = scheduler.tokenizer
        req.logprob_start_len = len(tokens)
        req.finished_output = True  # nothing of it is ever streamed
        req.fill = Fill(chunks, parent)
        return req

    # Launch

    def launch(self, batch: ScheduleBatch) -> None:
        """The rows of a prefill batch are assigned: publish the chunks that it completes, for parents in it and others.

        Whatever reads their KV is launched on the same stream, in the same forward pass or later.
        """
        published, parents = {}, {}
        ends = itertools.accumulate(batch.extend_lens)
        for req, end, extend_len in zip(batch.reqs, ends, batch.extend_lens, strict=True):
            if is_fill(req) and req is not batch.chunked_req:
                nodes = self.cache.publish_fill(req, batch.out_cache_loc[end - extend_len : end])
                published.update(zip((chunk.key for chunk in req.fill.chunks), nodes, strict=True))
                parents.update(dict.fromkeys(req.fill.parents))
                self._forget(req)
        for req in batch.reqs:
            if is_linked(req):
                self.cache.complete_row(req, published)
                parents.pop(req, None)
        for parent in parents:
            self.cache.enter_published(parent.link.chunks, parent.link.prompt.chunks, published)

    # Locks

    def reconcile(self) -> None:
        """Compare lock holders with the requests that wait; drop fills that were aborted, and unwanted ones.

        One that is not started goes with the request it was made for: who else waits for its chunks has others made.
        """
        if self.holders:
            waiting = set(self.scheduler.waiting_queue)
            for req in [req for req in self.holders if req not in waiting]:
                self._release(req)
        for req in dict.fromkeys(self.fills.values()):
            if req.finished() or (not is_launched(req) and req.fill.owner not in req.fill.parents):
                self._forget(req)

    def revoke_newest(self) -> bool:
        """Take back the locks of the parent admitted last; it will be admitted again. False if nobody holds any."""
        if not self.holders:
            return False
        self._release(self.holders[-1])
        return True

    def _release(self, req: Req) -> None:
        self.holders.remove(req)
        chunks, req.link.chunks = req.link.chunks, None
        self.cache.unlock_chunks(chunks)
        for chunk, node in zip(req.link.prompt.chunks, chunks.nodes, strict=True):
            if node is None and chunk.key in self.fills and req in self.fills[chunk.key].fill.parents:
                self.fills[chunk.key].fill.parents.remove(req)

    def requeue_fill(self, req: Req) -> None:
        """A fill came back (retracted): its parents' next admission starts it again."""
        self._forget(req)

    def _forget(self, fill: Req) -> None:
        """Its chunks are not under way any more."""
        for chunk in fill.fill.chunks:
            if self.fills.get(chunk.key) is fill:
                del self.fills[chunk.key]

    def check_idle(self) -> None:
        """Raise RuntimeError if anything is held while the scheduler is idle: SGLang's own check cannot see that."""
        locked = self.cache.protected_size()
        if locked or self.holders or self.fills:
            held = f"{locked} tokens locked, {len(self.holders)} holders, {len(self.fills)} fills"
            raise RuntimeError(f"idle, but {held}")


def is_linked(req: Req) -> bool:
    """Whether `req` has chunks."""
    return getattr(req, "link", None) is not None


def is_fill(req: Req) -> bool:
    """Whether `req` is internal."""
    return getattr(req, "fill", None) is not None


def is_launched(fill: Req) -> bool:
    """Whether a batch has taken it."""
    return fill.req_pool_idx is not None
