"""Arrival of requests with chunks: checks the layout and applies the policy."""

import hashlib
import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sglang_lazy.cache.device import WindowMemory
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.core.policy import Measure, Policy, ServerTraits, refusal
from sglang_lazy.core.prompt import Images, LinkedPrompt, Ranges
from sglang_lazy.core.refusal import Refusal, reason_of
from sglang_lazy.core.request import Request
from sglang_lazy.core.segments import ChunkLimit, PromptLayout
from sglang_lazy.core.state import LinkedRequest, Probe, Undecided, as_linked, lazy_state
from sglang_lazy.scheduler.ahead import Ahead
from sglang_lazy.scheduler.choices import Choices
from sglang_lazy.scheduler.facts import Facts, GivenImages
from sglang_lazy.scheduler.producer import NewRequest


class Limits(NamedTuple):
    """The limits of a server.

    pool_size: slots of the KV pool.
    chunk_pool_size: slots of the pool that chunks are in, a pool of their own if the model has cross-attention.
    context_len: number of positions of the model.
    max_chunks: per prompt.
    traits: the server's properties that policies depend on.
    neutral_preamble: int64, the tokens of the "neutral" preamble.
    windows: the pool of window KV, if there is one.
    max_fill_tokens: the most chunk tokens computed at once, except for a longer single chunk.
    num_states: how many chunks can have states of recurrent layers at a time.
    max_pieces: how many pieces recurrent layers can compute in one pass; see `num_pieces`.
    """

    pool_size: int
    chunk_pool_size: int
    context_len: int
    max_chunks: int
    traits: ServerTraits = ServerTraits()
    neutral_preamble: array = array("q")
    windows: WindowMemory | None = None
    max_fill_tokens: int = 0
    num_states: float = math.inf
    max_pieces: float = math.inf


class Arrival:
    """Gives arriving requests their state, `req.lazy`.

    linked_waiting: whether the waiting queue may have a linked request.
    ahead: has the requests that compute chunks ahead of use give way.
    """

    def __init__(self, store: ChunkStore, facts: Facts, limits: Limits, new_request: NewRequest):
        self.store, self.facts, self.limits, self.new_request = store, facts, limits, new_request
        self.linked_waiting, self.ahead = False, Ahead()
        self.reset()
        self._probe_ids = itertools.count()

    def reset(self) -> None:
        """Forget what policies chose for earlier prompts: the cache has been emptied."""
        self._choices = Choices()

    def receive(self, req: Request) -> None:
        """Set the state of a request with chunks that enters the queue, unless it has been there; an invalid one will
        be answered with a 400."""
        state = lazy_state(req)
        if state is None and not self.facts.is_refused(req):
            try:
                req.lazy = state = self._state(req)
            except ValueError as error:
                self.store.counts.refused[reason_of(error)] += 1
                self.facts.refuse(req, str(error))
        if state is not None:
            self.linked_waiting = True
            self.ahead.waiting |= isinstance(state, LinkedRequest) and state.ahead
            self.facts.drop_layout(req)

    def _state(self, req: Request) -> LinkedRequest | Undecided | None:
        plan = self.facts.plan(req)
        if plan is None:
            return None
        layout, policy = plan
        if not policy.reuses or not layout.chunks:
            return None
        if reason := refusal(policy, self.limits.traits):
            raise Refusal("policy", reason)
        check_request(self.facts, req, layout, self.limits.max_chunks)
        if self.limits.traits.cross_attention:
            return self._cross(req, layout, policy)
        kept = policy.kept(layout, self.facts.prompt(req))
        if self.limits.traits.recurrent:
            kept = self._with_states(kept, layout, len(self.facts.prompt(req)))
        if not policy.probes:
            return self._linked(req, layout, policy, kept)
        chosen = self._choices.recall(self._chooser(req, layout, policy), self.facts.prompt(req), layout.chunks)
        if len(chosen) == len(layout.chunks):
            return self._linked(req, layout, policy, chosen)
        return self._undecided(req, Undecided(layout, policy, [*chosen, *kept[len(chosen) :]], len(chosen)))

    def _with_states(self, kept: Sequence[Ranges], layout: PromptLayout, prompt_len: int) -> list[Ranges]:
        """`kept`, where chunks that recurrent layers cannot use as such are text: those that are too short, and one
        that the prompt ends with, since its state before its last token is not known."""
        least = self.limits.traits.min_chunk
        return [
            ranges if end - start >= least and end < prompt_len else ()
            for ranges, (start, end) in zip(kept, layout.chunks, strict=True)
        ]

    def _linked(
        self,
        req: Request,
        layout: PromptLayout,
        policy: Policy,
        kept: Sequence[Ranges],
        extra_text: int = 0,
        hits: int | None = None,
    ) -> LinkedRequest | None:
        """The state of a request that keeps these ranges.

        extra_text: how many chunk tokens may become text later.
        hits: a bit mask of the chunks that its probe found cached, which has had the others computed.
        """
        ids, preamble = self.facts.prompt(req), None
        if policy.preamble == "lead":
            preamble = ids[: layout.chunks[0][0]]
        elif policy.preamble == "neutral":
            preamble = self.limits.neutral_preamble
        if policy.preamble == "neutral" and not preamble:
            name = f"link {str(policy)!r}"
            raise Refusal("policy", f"{name}: this server has no preamble (--lazy-preamble, or no tokenizer)")
        images = images_of(self.facts.images(req), layout, policy)
        prompt = LinkedPrompt.build(
            ids, layout, kept, self.facts.extra_key(req), preamble, self.facts.adapter(req), images
        )
        unused = sum(1 << c.index for c in prompt.unkept if hits is not None or self.store.find(c) is not None)
        unused = unused if hits is None else unused & hits
        if prompt.unkept:
            req.lazy_unused_hits = unused
        if not prompt.chunks:
            self.store.count_use(prompt, (), unused)
            return None
        self._check_states_fit(prompt, undecided=extra_text > 0)
        self.facts.limit_answer(req, self._fitting_answer(req, prompt, policy.num_own_slots(prompt), extra_text))
        return self._found(prompt, policy, layout.ahead)

    def _cross(self, req: Request, layout: PromptLayout, policy: Policy) -> LinkedRequest:
        """The state for a model with cross-attention. Reduces the request's prompt to its text."""
        facts = self.facts
        prompt, text = LinkedPrompt.build_cross(facts.prompt(req), layout, facts.extra_key(req), facts.adapter(req))
        self._check_fits_cross(prompt)
        facts.keep_text(req, text)
        return self._found(prompt, policy, layout.ahead)

    def _check_fits_cross(self, prompt: LinkedPrompt) -> None:
        """Raise Refusal unless the prompt's chunks fit into their pool, and each into the encoder's positions. SGLang
        has checked that the text fits into the other pool."""
        lens = {chunk.key: chunk.num_tokens for chunk in prompt.chunks}
        if sum(lens.values()) > self.limits.chunk_pool_size:
            size = self.limits.chunk_pool_size
            raise Refusal("pool", f"{sum(lens.values())} tokens of chunks do not fit into their pool of {size} tokens")
        if (longest := max(lens.values())) > self.limits.context_len:
            raise Refusal("positions", f"a chunk of {longest} tokens exceeds {self.limits.context_len} positions")

    def _found(self, prompt: LinkedPrompt, policy: Policy, ahead: bool) -> LinkedRequest:
        found = [self.store.find(chunk) for chunk in prompt.chunks]
        pending, tree = self.store.pending, self.store.tree
        for chunk, node in zip(prompt.chunks, found, strict=True):
            if node is not None:
                tree.use(node, spread=chunk.spread)
        prefetched = [  # last, since fetching evicts
            node is None and chunk.key not in pending and self.store.fetch(chunk)
            for chunk, node in zip(prompt.chunks, found, strict=True)
        ]
        recurrent = self.limits.traits.recurrent
        return LinkedRequest(prompt, policy, found, prefetched, ahead=ahead, recurrent=recurrent)

    def _check_states_fit(self, prompt: LinkedPrompt, undecided: bool) -> None:
        """Raise Refusal unless recurrent layers have room for the states of the prompt's chunks, and for its pieces.

        undecided: whether chunks may become text later.
        """
        keys = {chunk.key for chunk in prompt.chunks}
        num_states = sum(key.most_states for key in keys)
        if num_states > self.limits.num_states:
            raise Refusal(
                "pool",
                f"{len(keys)} chunks take up to {num_states} states, but {self.limits.num_states} fit into memory "
                "(--lazy-state-share)",
            )
        num_pieces = len(prompt.spans)
        if undecided:  # every second chunk of those without text in between
            num_pieces = max(num_pieces, (num_pieces + len(prompt.chunks) + 1) // 2)
        if num_pieces > self.limits.max_pieces:
            raise Refusal(
                "pool",
                f"{num_pieces} pieces of text, but a pass takes {self.limits.max_pieces} (--lazy-state-share, "
                "with MLA also --max-running-requests)",
            )

    def _fitting_answer(self, req: Request, prompt: LinkedPrompt, num_own_slots: int, extra_text: int) -> int:
        """The most tokens of the answer: those that the request asks for, cut to what fits into the pool with its
        prompt, as SGLang does without chunks.

        Raises Refusal unless the prompt's text, its chunks and its policy's own slots fit into the pool together, and
        each chunk into the model's positions.
        """
        preamble_len, most_new = len(prompt.chunks[0].preamble), self.facts.max_new_tokens(req)
        text = prompt.spans[-1].end - prompt.num_chunk_tokens + extra_text
        lens = {chunk.key: chunk.num_tokens for chunk in prompt.chunks}
        chunks, longest = sum(lens.values()), max(lens.values())
        # SGLang counts one more, and leaves one
        room = self.limits.pool_size - chunks - text - self.facts.num_ahead - 2
        if text + preamble_len + chunks + num_own_slots + 1 > self.limits.pool_size or room < min(1, most_new):
            raise Refusal(
                "pool",
                f"{text} tokens of text, {preamble_len + chunks} of chunks and {num_own_slots} of copies do not fit "
                f"together into the KV pool of {self.limits.pool_size} tokens",
            )
        most_new = min(most_new, room)
        if self.limits.windows is not None:
            self._check_windows_fit(prompt, self.limits.windows, most_new, spread_out=extra_text > 0)
        if preamble_len + longest > self.limits.context_len:
            raise Refusal(
                "positions",
                f"a chunk of {longest} tokens after a preamble of {preamble_len} exceeds the model's "
                f"{self.limits.context_len} positions",
            )
        return most_new

    def _check_windows_fit(
        self, prompt: LinkedPrompt, windows: WindowMemory, max_new_tokens: int, spread_out: bool
    ) -> None:
        """Raise Refusal unless the window KV that the prompt reads of its chunks fits into its pool together with that
        of its text and answer, and with the largest fill, whose chunks have that of all their tokens until it ends.

        spread_out: whether tokens anywhere in the chunks may become text later, so that all of the chunks may be read.
        """
        chunks = {chunk.key: chunk for chunk in prompt.chunks}.values()
        lens, preamble_len = [chunk.num_tokens for chunk in chunks], len(prompt.chunks[0].preamble)
        read = sum(
            chunk.num_tokens if spread_out else min(chunk.num_needed, windows.window + chunk.spread)
            for chunk in prompt.chunks
        )
        fill = preamble_len + min(sum(lens), max(self.limits.max_fill_tokens, *lens))
        own = windows.of_row(prompt.span_lens, sum(prompt.span_lens) + max_new_tokens)
        if read + max(fill, own) + 3 > windows.size:  # SGLang counts two more, and leaves one
            raise Refusal(
                "pool",
                f"the KV pool of layers with windows has {windows.size} tokens, but the prompt needs {read} of its "
                f"chunks beside a fill of {fill}, or {own} of its own (--swa-full-tokens-ratio; "
                "--disable-hybrid-swa-memory: one pool for all layers)",
            )

    # Probes

    def _undecided(self, req: Request, state: Undecided) -> Undecided | LinkedRequest | None:
        """`state` with a probe, or the decided state if nothing has to be measured; None if no chunk can be kept."""
        lens = [end - start for start, end in state.layout.chunks]
        # A deviation probe computes all chunk tokens at once.
        most = sum(lens) if "deviation" in state.policy.probes else state.policy.max_recomputed(lens)
        linked = self._linked(req, state.layout, state.policy, state.kept, extra_text=most)
        if linked is None:
            return None
        if set(state.policy.probes) == {"key size"}:
            scores = [self.store.scores(chunk) for chunk in linked.prompt.chunks]
            known = [part for part in scores if part is not None]
            if len(known) == len(scores):
                kept = self._choose(state, linked.prompt, {"key size": np.concatenate(known)})
                return self._linked(req, state.layout, state.policy, kept)
        query_start = min(state.layout.chunks[-1][1], len(self.facts.prompt(req)) - 1)
        linked.probe = Probe(req, query_start)
        # SGLang aborts by id prefix: no client's id begins with a NUL.
        state.probe = self.new_request(f"\0probe-{next(self._probe_ids)}", self.facts.prompt(req), req)
        state.probe.lazy = linked
        return state

    def end_probe(self, probe_req: Request, done: bool) -> None:
        """Have the parent's policy choose now that a probe has ended; start another one unless it is `done`."""
        probe_state = as_linked(probe_req)
        assert probe_state.probe is not None
        parent = probe_state.probe.parent
        state = lazy_state(parent)
        if not isinstance(state, Undecided) or state.probe is not probe_req:
            return
        if not done:
            state.launched = False
            parent.lazy = self._undecided(parent, state)
            return
        prompt = probe_state.prompt
        scores = probe_state.probe.result()
        if "key size" in scores:
            ends = np.cumsum([chunk.num_kept for chunk in prompt.chunks])
            for chunk, part in zip(prompt.chunks, np.split(scores["key size"], ends[:-1]), strict=True):
                self.store.keep_scores(chunk, part)
        kept = self._choose(state, prompt, scores)
        chooser = self._chooser(parent, state.layout, state.policy)
        self._choices.remember(chooser, self.facts.prompt(parent), state.layout.chunks, kept)
        parent.lazy = decided = self._linked(parent, state.layout, state.policy, kept, hits=probe_state.hit_mask)
        if decided is not None:
            places = {chunk.index: i for i, chunk in enumerate(prompt.chunks)}
            same = [places[chunk.index] for chunk in decided.prompt.chunks]
            decided.reused = [probe_state.reused[i] for i in same]
            decided.loaded = [probe_state.loaded[i] for i in same]
            decided.prefetched = [probe_state.prefetched[i] for i in same]
            if not probe_state.recomputes:  # the text of such a probe is not published
                namespaces = [span.namespace for span in prompt.spans]
                decided.found_text.update(zip(namespaces, probe_state.row.cached, strict=True))
            decided.found_text.update(probe_state.found_text)

    def _choose(self, state: Undecided, prompt: LinkedPrompt, scores: Mapping[Measure, np.ndarray]) -> list[Ranges]:
        """Per chunk of the layout, the ranges to keep: those of earlier turns, and the policy's choice for the others.

        prompt: the probe's prompt.  scores: of each measure, those of its tokens.
        """
        kept = list(state.kept)
        new = [chunk for chunk in prompt.chunks if chunk.index >= state.num_chosen]
        if new:
            first = prompt.num_chunk_tokens - sum(chunk.num_kept for chunk in new)
            of_new = {measure: of_all[first:] for measure, of_all in scores.items()}
            for chunk, ranges in zip(new, state.policy.choose(new, of_new), strict=True):
                kept[chunk.index] = ranges
        return kept

    def _chooser(self, req: Request, layout: PromptLayout, policy: Policy) -> tuple:
        """The key to remember choices by. It separates tenants: none learns from a choice what another asked."""
        return str(policy), self.facts.extra_key(req), self.facts.adapter(req), layout.cache_salt


def refuse_chunks(facts: Facts, req: Request) -> None:
    """Without chunk reuse, refuse a prompt with chunks unless its policy reuses none."""
    if facts.is_refused(req):
        return
    try:
        plan = facts.plan(req)
        if plan is not None and plan[1].reuses:
            raise ValueError("this server runs without chunk reuse: it takes chunks only with link full")
    except ValueError as error:
        facts.refuse(req, str(error))


def images_of(given: GivenImages | None, layout: PromptLayout, policy: Policy) -> Images | None:
    """The images of a request with chunks; None if it has none.

    Raises ValueError for an image inside a chunk, and for policies that do not support images.
    """
    if given is None:
        return None
    if policy.probes:
        raise Refusal("policy", f"link {policy}: its probes see no images")
    for first, end in given.ranges:
        if any(first < chunk_end and start < end for start, chunk_end in layout.chunks):
            raise ValueError("an image is inside a chunk: images are allowed only in text")
        if policy.preamble == "lead" and first < layout.chunks[0][0]:
            raise Refusal("policy", f"link {policy}: chunks cannot be computed after an image")
    digests = []
    for (first, end), content in zip(given.ranges, given.hashes, strict=True):
        axes = given.places[:, first:end] - given.places[0, first]
        digests.append(hashlib.sha256(b"%d %b" % (content, axes.tobytes())).digest())
    return Images(given.items, given.ranges, digests, given.places[0])


def check_request(facts: Facts, req: Request, layout: PromptLayout, max_chunks: int) -> None:
    """Raise ValueError if `req` asks for something that cannot be combined with chunks."""
    ChunkLimit(max_chunks).check(len(layout.chunks))
    if unsupported := facts.unsupported(req):
        raise ValueError(f"chunks cannot be combined with {unsupported[0]}")
    last_chunk_end, first = layout.chunks[-1][1], facts.first_logprob(req)
    if first is not None and first < min(last_chunk_end, len(facts.prompt(req))):
        raise ValueError(
            f"prompt logprobs from position {first} would need tokens inside or before a reused chunk; "
            f"ask from position {last_chunk_end} on"
        )
