"""The cache against a record of what the KV in every slot depends on, through random histories of requests."""

import collections
import dataclasses
import hashlib
import itertools
from array import array

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.prompt import CHUNK_NAMESPACE, ChunkRef, LinkedPrompt
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.core.state import Fill, Link, requested_layout
from sglang_lazy.port.radix import ChunkNodes, LazyRadixCache, LinkHandle

TEXT, CHUNK = False, True
MAX_LEN = 64
VOCAB_SIZE = 16


def new_request(parts, extra_key=None, salt=None, max_new_tokens=3, rid="request"):
    """A request for `parts`, pairs of (is chunk, tokens), that knows the tokens it will generate.

    contents: per position, the generated ones included, what its KV depends on.
    """
    ids, chunks = array("q"), []
    for is_chunk, tokens in parts:
        if is_chunk:
            chunks.append((len(ids), len(ids) + len(tokens)))
        ids.extend(tokens)
    layout = PromptLayout(tuple(chunks), salt)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, custom_params={LAYOUT_PARAM: layout.pack()} if chunks else None
    )
    params.normalize(None)
    req = Req(rid, "", ids, params, vocab_size=VOCAB_SIZE, extra_key=extra_key)
    req.parts, req.salt = list(parts), salt
    req.future = array("q", (1 + (len(ids) + i) % 3 for i in range(max_new_tokens + 2)))
    req.contents = contents_of(ids, req.future, layout, extra_key)
    return req


def contents_of(ids, generated, layout, extra_key):
    """The semantics: a chunk token depends on its chunk so far, a text token on the whole path so far, and either is
    private to those who share extra_key and, from the first chunk on, salt."""
    chunk_of = {
        position: (number, start)
        for number, (start, end) in enumerate(layout.chunks)
        for position in range(start, min(end, len(ids) - 1))
    }
    contents, path, salt = [], (), None
    for position, token in enumerate(ids + generated):
        number, start = chunk_of.get(position, (None, None))
        path += ((token, number),)
        if number is None:
            contents.append(("text", extra_key, salt, path))
        else:
            salt = layout.salt
            contents.append(("chunk", extra_key, salt, tuple(ids[start : position + 1])))
    return contents


def contents_of_chunks(chunks):
    """What the KV of a fill's tokens depends on, chunk by chunk."""
    contents = []
    for chunk in chunks:
        _, extra_key, salt = chunk.namespace
        tokens = tuple(chunk.tokens)
        contents += [("chunk", extra_key, salt, tokens[: i + 1]) for i in range(len(tokens))]
    return contents


def positions_of(req, start, end):
    """The positions of row entries [start, end); of a fill, places in what it computes."""
    if getattr(req, "fill", None) is not None:
        return req.fill.row.permuted(array("q", range(len(req.origin_input_ids)))).tolist()[start:end]
    link = getattr(req, "link", None)
    return list(range(start, end)) if link is None else link.row.positions_of(start, end).tolist()


class Slots(TokenToKVPoolAllocator):
    """SGLang's allocator, with what was computed into each slot since it was allocated."""

    def __init__(self, size):
        self.contents = {}
        super().__init__(size, torch.float32, "cpu", None, need_sort=False)

    def alloc(self, need_size):
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, "not computed") for slot in slots.tolist())
        return slots

    def free(self, free_index):
        for slot in free_index.tolist():
            assert self.contents.pop(slot, None), f"slot {slot} is freed, but was not in use"
        super().free(free_index)

    def clear(self):
        super().clear()
        self.contents.clear()


class Pools:
    """A cache over real pools on the CPU, and the requests that have rows there.

    waiting_locks: nodes locked on behalf of waiting requests, revocable.
    paths: what stands before the text of each namespace, as far as prompts have named it.
    """

    def __init__(self, size, num_rows=8, eviction_policy="lru", materialize=False):
        self.materialize = materialize
        self.slots = Slots(size)
        self.rows = ReqToTokenPool(num_rows, MAX_LEN, "cpu", enable_memory_saver=False)
        self.cache = LazyRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.slots,
                page_size=1,
                eviction_policy=eviction_policy,
            )
        )
        self.cache.release_waiting_lock = self.revoke
        self.running = []
        self.waiting_locks = []
        self.paths = {}

    def revoke(self):
        if self.waiting_locks:
            self.cache.dec_lock_ref(self.waiting_locks.pop())
            return True
        return False

    # What a scheduler does with requests

    def link(self, req):
        """What admission does on arrival."""
        layout = requested_layout(req)
        if layout is not None:
            prompt = LinkedPrompt.build(req.origin_input_ids, layout, req.extra_key)
            if prompt.chunks:
                found = [self.cache.find_chunk(chunk) for chunk in prompt.chunks]
                req.link = Link(prompt, found, self.materialize)
                self.name_paths(req)

    def name_paths(self, req):
        """Record the path that each namespace of `req` stands for; two paths in one namespace fail."""
        for span in req.link.prompt.spans:
            if span.namespace is not None:
                kind, extra_key, salt, path = req.contents[span.start]
                before = (extra_key, salt, path[:-1])
                assert kind == "text"
                assert self.paths.setdefault(span.namespace, before) == before

    def fits(self, num_tokens):
        return self.slots.available_size() + self.cache.evictable_size() >= num_tokens

    def fill(self, parent, chunks, num_tokens):
        """Compute chunks of a request as admission does, `num_tokens` at a time; False if they do not fit."""
        tokens = array("q", itertools.chain.from_iterable(chunk.tokens for chunk in chunks))
        req = new_request([(TEXT, tokens)], max_new_tokens=0, rid="fill")
        req.fill, req.contents = Fill(chunks, parent), contents_of_chunks(chunks)
        begun = self.begin(req, num_tokens)
        while begun and req.extend_range.end < len(tokens):
            self.check([parent])
            self.end_extend(req)
            req.inflight_middle_chunks = 1
            req.init_next_round_input()
            if not self.extend(req, num_tokens):
                self.release(req, is_insert=False)
                begun = False
        if begun:
            row = self.rows.req_to_token[req.req_pool_idx, slice(*req.extend_range)]
            nodes = self.cache.publish_fill(req, row.to(torch.int64))
            assert nodes == [
                self.cache.find_chunk(dataclasses.replace(chunk, used=chunk.num_tokens)) for chunk in chunks
            ]
            self.check([parent])
            self.release(req)
        return begun

    def begin(self, req, num_tokens):
        """Make the chunks of `req` resident, match it, and compute up to `num_tokens`; False if that does not fit."""
        refs = req.link.prompt.chunks if hasattr(req, "link") else ()
        chunks = ChunkNodes([None] * len(refs), num_locks=1)
        if refs:
            req.link.chunks = chunks
        for i, chunk in enumerate(refs):
            if (node := self.cache.find_chunk(chunk)) is not None:
                self.cache.enter_chunk(chunks, i, node)
        missing = {chunk.key: chunk for chunk, node in zip(refs, chunks.nodes, strict=True) if node is None}
        if not missing or self.fill(req, list(missing.values()), num_tokens):
            for i, chunk in enumerate(refs):
                if chunks.nodes[i] is None:
                    self.cache.enter_chunk(chunks, i, self.cache.find_chunk(chunk))
            assert chunks.complete
            req.init_next_round_input(self.cache)
            self.cache.inc_lock_ref(req.last_node)
        begun = req.last_node is not None and self.extend(req, num_tokens)
        if begun:
            self.running.append(req)
        elif req.last_node is not None:
            self.cache.dec_lock_ref(req.last_node)
            req.last_node = None
        self.cache.unlock_chunks(chunks)
        return begun

    def extend(self, req, num_tokens):
        """Compute up to `num_tokens` after the prefix; False if they do not fit."""
        start = len(req.prefix_indices)
        end = min(start + num_tokens, len(req.full_untruncated_fill_ids))
        link = getattr(req, "link", None)
        copies = link is not None and link.materialize and link.copy is None
        if not self.fits(end - start + (link.prompt.num_chunk_tokens if copies else 0)):
            return False
        evict_from_tree_cache(self.cache, end - start)
        req.set_extend_range(start, end)
        assert self.rows.alloc([req])
        row = self.rows.req_to_token[req.req_pool_idx]
        row[:start] = req.prefix_indices
        row[start:end] = self.slots.alloc(end - start)
        req.kv = ReqKvInfo(kv_allocated_len=end, swa_evicted_seqlen=0)
        if copies:
            self.copy_chunks(req)
        self.compute(req, start, end)
        return True

    def copy_chunks(self, req):
        """What a batch that begins the request does about its chunks, where they are materialised."""
        self.cache.allocate_copy(req)
        copy = req.link.copy
        for source, slot in zip(copy.source.tolist(), copy.slots.tolist(), strict=True):
            assert self.slots.contents[slot] == "not computed"
            self.slots.contents[slot] = self.slots.contents[source]
        self.cache.end_copy(req)

    def compute(self, req, start, end):
        """Write the KV of row entries [start, end)."""
        row = self.rows.req_to_token[req.req_pool_idx, start:end].tolist()
        for slot, position in zip(row, positions_of(req, start, end), strict=True):
            assert self.slots.contents[slot] == "not computed"
            self.slots.contents[slot] = req.contents[position]
        req.kv_committed_len = end

    def end_extend(self, req):
        """The result of an extend is in: publish it, and generate a token if the prompt is complete."""
        if req.extend_range.end < len(req.full_untruncated_fill_ids):
            self.cache.cache_unfinished_req(req, chunked=True)
            return
        self.generate(req)
        self.cache.cache_unfinished_req(req)

    def generate(self, req):
        req.output_ids.append(req.future[len(req.output_ids)])

    def decode(self, req):
        """Compute the last token and generate another; False if there is no slot."""
        if not self.fits(1):
            return False
        evict_from_tree_cache(self.cache, 1)
        end = req.kv_committed_len
        self.rows.req_to_token[req.req_pool_idx, end] = self.slots.alloc(1)[0]
        self.compute(req, end, end + 1)
        self.generate(req)
        return True

    def release(self, req, is_insert=True):
        self.cache.cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=req.kv_committed_len)
        self.rows.free(req)
        req.kv = None
        self.running.remove(req)

    def flush(self):
        self.cache.reset()
        self.rows.clear()
        self.slots.clear()

    # What must hold after every step

    def nodes(self):
        """All tree nodes with their namespace and the tokens before them in it."""
        stack = [(child, ()) for child in self.cache.root_node.children.values()]
        while stack:
            node, before = stack.pop()
            yield node, node.key.extra_key, before
            stack += [(child, before + tuple(node.key.token_ids)) for child in node.children.values()]

    def check(self, admitted=()):
        self.check_slots()
        self.check_locks(admitted)
        self.check_tree_contents()
        self.check_row_contents()

    def check_slots(self):
        """Every slot is free, in exactly one tree node, or owned by one running request."""
        places = [*self.slots.free_pages.tolist(), *self.slots.release_pages.tolist()]
        for node, _, _ in self.nodes():
            assert len(node.value) == len(node.key)
            places += node.value.tolist()
        for req in self.running:
            row = self.rows.req_to_token[req.req_pool_idx]
            places += row[req.cache_protected_len : req.kv_committed_len].tolist()
            if getattr(req, "fill", None) is not None and req.fill.duplicates is not None:
                places += req.fill.duplicates.tolist()
            if hasattr(req, "link") and req.link.copy is not None:
                places += req.link.copy.slots.tolist()
        assert sorted(places) == list(range(1, self.slots.size + 1))

    def check_locks(self, admitted):
        """A node is locked once by each user at or below it; the sizes and the leaves say what the locks say.

        The chunks of a request are one user, whether it is admitted, runs, or both.
        """
        users = collections.Counter()
        handles = [req.last_node for req in self.running if isinstance(req.last_node, LinkHandle)]
        held = [req.last_node for req in self.running if not isinstance(req.last_node, LinkHandle)]
        held += [node for handle in handles for node in handle.spans]
        holders = collections.Counter([handle.chunks for handle in handles] + [req.link.chunks for req in admitted])
        for chunks, num_locks in holders.items():
            assert chunks.num_locks == num_locks
            held += [node for node in chunks.nodes if node is not None]
        for node in held + self.waiting_locks:
            while node is not self.cache.root_node:
                users[node] += 1
                node = node.parent
        evictable = protected = 0
        leaves = set()
        for node, _, _ in self.nodes():
            assert node.lock_ref == users.pop(node, 0)
            if node.lock_ref:
                protected += len(node.key)
            else:
                evictable += len(node.key)
                if not node.children:
                    leaves.add(node)
        assert not users, "a request holds nodes that left the tree"
        assert (self.cache.evictable_size(), self.cache.protected_size()) == (evictable, protected)
        assert self.cache.evictable_leaves == leaves

    def check_tree_contents(self):
        """The slots of a node hold what its key and namespace promise to whoever matches it; chunks are found there."""
        ends = {}
        for node, namespace, before in self.nodes():
            tokens = before + tuple(node.key.token_ids)
            ends[namespace, hashlib.sha256(np.array(tokens, dtype=np.int32)).digest()] = node
            for i, slot in enumerate(node.value.tolist(), len(before)):
                assert self.slots.contents[slot] == self.promise(namespace, tokens[: i + 1])
        assert self.cache._chunk_ends.items() <= ends.items()

    def promise(self, namespace, tokens):
        if isinstance(namespace, tuple) and namespace[0] == CHUNK_NAMESPACE:
            _, extra_key, salt = namespace
            return ("chunk", extra_key, salt, tokens)
        extra_key, salt, path = self.paths[namespace] if isinstance(namespace, tuple) else (namespace, None, ())
        return ("text", extra_key, salt, path + tuple((token, None) for token in tokens))

    def check_row_contents(self):
        """Every entry of a running request's row holds what its position demands."""
        for req in self.running:
            row = self.rows.req_to_token[req.req_pool_idx, : req.kv_committed_len].tolist()
            positions = positions_of(req, 0, req.kv_committed_len)
            assert [self.slots.contents.get(slot) for slot in row] == [req.contents[p] for p in positions]


def chunk_of(tokens, used):
    """The first `used` tokens of a chunk."""
    last = array("q") if used < len(tokens) else array("q", [0])
    layout = PromptLayout(((0, len(tokens)),))
    (chunk,) = LinkedPrompt.build(array("q", tokens) + last, layout, None).chunks
    return dataclasses.replace(chunk, used=used)


CHUNKS = [(1, 2, 3), (1, 2, 3, 4, 1), (1, 2), (4,), (3, 1, 2, 4)]
TEXTS = [(1,), (1, 2, 3), (4, 1), (2, 2), (1, 2, 3, 4, 1)]
parts_of_prompts = st.lists(
    st.one_of(
        st.tuples(st.just(CHUNK), st.sampled_from(CHUNKS)),
        st.tuples(st.just(TEXT), st.sampled_from(TEXTS)),
    ),
    min_size=1,
    max_size=4,
)
tenants = st.sampled_from([(None, None), (None, None), ("a", None), (None, "a"), ("a", "a")])
picks = st.integers(0, 7)
pieces = st.sampled_from([1, 2, 5, MAX_LEN])


def pick_from(sequence, pick):
    return sequence[pick % len(sequence)]


class CacheHistories(RuleBasedStateMachine):
    """Requests are computed in pieces, decode, finish, fail, return and continue while memory is short."""

    pool_size = 48
    eviction_policy = "lru"
    materialize = False

    def __init__(self):
        super().__init__()
        self.pools = Pools(self.pool_size, eviction_policy=self.eviction_policy, materialize=self.materialize)
        self.retracted = []
        self.ended = []

    def begin(self, req, num_tokens):
        self.pools.link(req)
        self.restart(req, num_tokens)

    def restart(self, req, num_tokens):
        if self.pools.begin(req, num_tokens):
            req.phase = "extending"
        elif self.pools.running or self.pools.waiting_locks:
            self.retracted.append(req)

    can_begin = precondition(lambda self: len(self.pools.running) < 4 and len(self.retracted) < 4)

    @can_begin
    @rule(parts=parts_of_prompts, tenant=tenants, num_tokens=pieces)
    def begin_prompt(self, parts, tenant, num_tokens):
        self.begin(new_request(parts, *tenant), num_tokens)

    @can_begin
    @rule(parts=parts_of_prompts, num_tokens=pieces)
    def begin_twins(self, parts, num_tokens):
        """Two requests compute the same text side by side, in different pieces."""
        self.begin(new_request(parts), num_tokens)
        self.begin(new_request(parts), MAX_LEN)

    @can_begin
    @precondition(lambda self: self.ended)
    @rule(pick=picks, text=st.sampled_from(TEXTS), num_tokens=pieces)
    def begin_next_turn(self, pick, text, num_tokens):
        """The prompt and the answer of an earlier request, and more."""
        last = pick_from(self.ended, pick)
        if len(last.contents) < MAX_LEN // 2:
            parts = [*last.parts, (TEXT, tuple(last.output_ids)), (TEXT, text)]
            self.begin(new_request(parts, last.extra_key, last.salt), num_tokens)

    @can_begin
    @precondition(lambda self: self.pools.paths)
    @rule(pick=picks, tokens=st.sampled_from(CHUNKS + TEXTS), forge=st.sampled_from([repr, str, lambda name: name[0]]))
    def begin_forged(self, pick, tokens, forge):
        """A client names a namespace of ours as its own."""
        namespace = pick_from(list(self.pools.paths), pick)
        for name in (namespace, (CHUNK_NAMESPACE, *namespace[1:3])):
            self.begin(new_request([(TEXT, tokens)], extra_key=forge(name)), MAX_LEN)

    @can_begin
    @precondition(lambda self: self.retracted)
    @rule(pick=picks, num_tokens=pieces)
    def begin_retracted(self, pick, num_tokens):
        req = pick_from(self.retracted, pick)
        self.retracted.remove(req)
        self.restart(req, num_tokens)

    @precondition(lambda self: self.pools.running)
    @rule(pick=picks, num_steps=st.integers(1, 6), num_tokens=pieces)
    def advance(self, pick, num_steps, num_tokens):
        """Some steps of a running request: take a result, compute the next piece, decode, finish."""
        req = pick_from(self.pools.running, pick)
        for _ in range(num_steps):
            if req in self.pools.running:
                self.advance_once(req, num_tokens)
                self.pools.check()

    def advance_once(self, req, num_tokens):
        if req.phase == "extending":
            complete = req.extend_range.end == len(req.full_untruncated_fill_ids)
            self.pools.end_extend(req)
            req.phase = "decoding" if complete else "extended"
        elif req.phase == "extended":
            req.inflight_middle_chunks = 1
            req.init_next_round_input()
            if self.pools.extend(req, num_tokens):
                req.phase = "extending"
            else:
                self.retract(req)
        elif len(req.output_ids) >= req.sampling_params.max_new_tokens:
            self.pools.release(req)
            self.ended = [*self.ended[-3:], req]
        elif not self.pools.decode(req):
            self.retract(req)

    def retract(self, req):
        self.pools.release(req, is_insert=False)
        req.reset_for_retract()
        self.retracted.append(req)

    @precondition(lambda self: self.pools.running)
    @rule(pick=picks, abort=st.booleans())
    def stop(self, pick, abort):
        """A request is aborted or retracted, in whatever phase."""
        req = pick_from(self.pools.running, pick)
        if abort:
            self.pools.release(req, is_insert=False)
        else:
            self.retract(req)

    @precondition(lambda self: self.pools.cache.evictable_size() > self.pool_size // 2)
    @rule(num_tokens=st.integers(1, 20))
    def evict(self, num_tokens):
        before, evictable = self.pools.slots.available_size(), self.pools.cache.evictable_size()
        result = self.pools.cache.evict(EvictParams(num_tokens=num_tokens))
        assert self.pools.slots.available_size() == before + result.num_tokens_evicted
        assert result.num_tokens_evicted >= min(num_tokens, evictable)

    @precondition(lambda self: len(self.pools.waiting_locks) < 2 and self.pools.paths)
    @rule(tokens=st.sampled_from(CHUNKS), used=st.integers(1, 5))
    def lock_for_waiting(self, tokens, used):
        chunk = chunk_of(tokens, min(used, len(tokens)))
        node = self.pools.cache.find_chunk(chunk)
        if node is not None:
            self.pools.cache.inc_lock_ref(node)
            self.pools.waiting_locks.append(node)

    @precondition(lambda self: self.pools.waiting_locks)
    @rule()
    def revoke(self):
        self.pools.revoke()

    @precondition(lambda self: not self.pools.running and self.pools.cache.evictable_size() > self.pool_size // 2)
    @rule()
    def flush(self):
        while self.pools.revoke():
            pass
        self.pools.flush()
        assert self.pools.slots.available_size() == self.pool_size

    @invariant()
    def check(self):
        self.pools.check()
        if not self.pools.running and not self.pools.waiting_locks:
            assert self.pools.cache.protected_size() == 0

    def teardown(self):
        """Everything can be given back: nothing is lost."""
        for req in list(self.pools.running):
            self.pools.release(req, is_insert=False)
        while self.pools.revoke():
            pass
        self.check()
        self.pools.cache.evict(EvictParams(num_tokens=self.pool_size))
        assert self.pools.slots.available_size() == self.pool_size


class FrequencyHistories(CacheHistories):
    """The same with priorities that are not times alone, in a smaller pool."""

    pool_size = 24
    eviction_policy = "lfu"


class CopyHistories(CacheHistories):
    """The same where every request gets a copy of its chunks."""

    pool_size = 64
    materialize = True


CacheHistories.TestCase.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, stateful_step_count=40
)
FrequencyHistories.TestCase.settings = settings(CacheHistories.TestCase.settings, max_examples=40)
CopyHistories.TestCase.settings = settings(CacheHistories.TestCase.settings, max_examples=40)
TestCacheHistories = CacheHistories.TestCase
TestFrequencyHistories = FrequencyHistories.TestCase
TestCopyHistories = CopyHistories.TestCase


def run(pools, req):
    """One request from beginning to end; returns how many tokens were computed for it, those of its chunks aside."""
    pools.link(req)
    assert pools.begin(req, MAX_LEN)
    num_computed = req.extend_range.length
    pools.end_extend(req)
    while len(req.output_ids) < req.sampling_params.max_new_tokens:
        assert pools.decode(req)
    pools.check()
    pools.release(req)
    pools.check()
    return num_computed


def num_used(pools):
    return pools.slots.size - pools.slots.available_size()


def test_cached_chunks_take_no_slots_at_new_offsets():
    """Zero copy: a warm prompt in a new order allocates its text and its answer, and computes its text in one pass."""
    pools = Pools(200)
    documents = [(CHUNK, (i, i + 1, i + 2)) for i in range(1, 9)]
    separators = [(TEXT, (15,))] * 8
    run(pools, new_request([*itertools.chain(*zip(documents, separators, strict=True))], max_new_tokens=1))
    used = num_used(pools)
    assert used == 8 * 3 + 8
    reordered = [*itertools.chain(*zip(documents[::-1], separators, strict=True))]
    assert run(pools, new_request(reordered, max_new_tokens=1)) == 8
    assert num_used(pools) == used + 8
    assert run(pools, new_request(reordered, max_new_tokens=1)) == 1, "only the last token of a known prompt"


def test_copies_last_as_long_as_their_request():
    """A copied chunk takes slots of the request's own, leaves the shared ones to eviction, and goes with it."""
    pools = Pools(30, materialize=True)
    req = new_request([(TEXT, (9,)), (CHUNK, (1, 2, 3)), (CHUNK, (4, 5)), (TEXT, (7,))], max_new_tokens=2)
    pools.link(req)
    assert pools.begin(req, MAX_LEN)
    assert num_used(pools) == 5 + 5 + 2
    assert pools.cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 5
    pools.check()
    pools.end_extend(req)
    assert pools.decode(req)
    pools.check()
    pools.release(req)
    pools.check()
    assert num_used(pools) == 3 and req.link.copy is None


def test_duplicate_text_is_kept_once():
    """Two requests that compute the same text side by side end with one copy, in the rows of both."""
    pools = Pools(40)
    parts = [(TEXT, (9,)), (CHUNK, (1, 2, 3)), (TEXT, (5, 6)), (CHUNK, (4,)), (TEXT, (7, 8))]
    twins = [new_request(parts), new_request(parts)]
    for req in twins:
        pools.link(req)
        assert pools.begin(req, MAX_LEN)
    before = num_used(pools)
    for req in twins:
        pools.end_extend(req)
        pools.check()
    rows = [pools.rows.req_to_token[req.req_pool_idx, : req.kv_committed_len].tolist() for req in twins]
    assert rows[0] == rows[1]
    assert num_used(pools) == before - 5


@pytest.mark.parametrize("forge", [repr, str, lambda namespace: namespace[0], lambda namespace: str(namespace[-1])])
def test_client_keys_reach_no_private_namespace(forge):
    """Whatever string a client gives as extra_key, it meets neither a chunk nor the text after one."""
    pools = Pools(60)
    req = new_request([(CHUNK, (1, 2, 3)), (TEXT, (4, 5))], extra_key="a", salt="s")
    run(pools, req)
    chunk, span = req.link.prompt.chunks[0], req.link.prompt.spans[0]
    for namespace, tokens in ((chunk.namespace, (1, 2, 3, 4)), (span.namespace, (4, 5, 1))):
        client = new_request([(TEXT, tokens)], extra_key=forge(namespace))
        client.init_next_round_input(pools.cache)
        assert len(client.prefix_indices) == 0
        linked = new_request([(CHUNK, tokens[:3]), (TEXT, (4,))], extra_key=forge(namespace))
        pools.link(linked)
        assert linked.link.hit_mask == 0


def test_segment_table_rows_follow_their_requests():
    """A row shows the chunks of the request it was given to last, none for an ordinary one; others keep every bit."""
    table = SegmentTable(num_rows=6, max_segments=5, device="cpu")
    table.ends.fill_(-7)
    table.offsets.fill_(-7)
    tensors = table.num_segments, table.ends, table.offsets

    def chunk(start, used):
        return ChunkRef((CHUNK_NAMESPACE, None, None), array("q"), start, used, b"", used)

    def assign(rows):
        before = [tensor.clone() for tensor in tensors]
        table.assign(rows)
        untouched = [row for row in range(6) if row not in rows]
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[untouched], old[untouched])

    def segments(row):
        count = table.num_segments[row]
        return list(zip(table.ends[row, :count].tolist(), table.offsets[row, :count].tolist(), strict=True))

    assign({1: [chunk(0, 3), chunk(10, 2)], 2: [chunk(4, 1)], 3: []})
    assert [segments(row) for row in range(6)] == [[], [(3, 0), (5, 10)], [(1, 4)], [], [], []]
    assign({2: [chunk(7, 2), chunk(9, 1), chunk(20, 4)], 4: [chunk(5, 5)]})
    assert [segments(row) for row in (1, 2, 4)] == [[(3, 0), (5, 10)], [(2, 7), (3, 9), (7, 20)], [(5, 5)]]
    assign({1: [], 2: [chunk(1, 1)], 5: []})
    assert [segments(row) for row in range(6)] == [[], [], [(1, 1)], [], [(5, 5)], []]
    assign({2: [], 4: []})
    assert not table.num_segments.any()
