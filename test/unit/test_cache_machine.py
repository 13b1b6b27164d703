"""The cache against a model that records what the KV in every slot depends on, over random histories of requests."""

import functools
import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.attention import most_attended
from fakes.phases import ALL, Phases
from fakes.requests import CHUNK, TEXT, kept_in, new_request
from fakes.storage import Storage
from fakes.stored import storage_with
from sglang_lazy.core.keys import Namespace, as_int32, chunk_key
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import is_internal, lazy_state, linked, stand_in
from sglang_lazy.policies import POLICIES, register
from sglang_lazy.storage.chunk_storage import Patience

pytestmark = pytest.mark.usefixtures("sglang_context")


class Holes(Policy):
    """Keeps some tokens of each chunk, chosen by its length and first token."""

    name = "holes"
    dice = 0

    def kept(self, layout, input_ids):
        return [self.kept_of(input_ids[start:end]) for start, end in layout.chunks]

    def kept_of(self, tokens):
        dice = random.Random(f"{self.dice} {len(tokens)} {tokens[0]}")
        cuts = sorted(dice.sample(range(len(tokens) + 1), min(len(tokens) + 1, dice.choice([2, 2, 3, 4]))))
        if len(cuts) == 3:  # two adjacent ranges, or one
            return tuple(zip(cuts, cuts[1:], strict=False)) if dice.random() < 0.5 else ((cuts[0], cuts[2]),)
        return tuple(zip(cuts[::2], cuts[1::2], strict=True))


class OtherHoles(Holes):
    """The same with another seed."""

    name = "other holes"
    dice = 1


@pytest.fixture(autouse=True)
def policies_with_holes():
    for policy in (Holes, OtherHoles):
        register(policy)
    yield
    for policy in (Holes, OtherHoles):
        del POLICIES[policy.name]


CHUNKS = [(1, 2, 3), (1, 2, 3, 4, 1), (1, 2), (4,), (3, 1, 2, 4), (2, 1, 3)]
TEXTS = [(1,), (1, 2, 3), (4, 1), (2, 2), (1, 2, 3, 4, 1)]
parts_of_prompts = st.lists(
    st.one_of(
        st.tuples(st.just(CHUNK), st.sampled_from(CHUNKS)),
        st.tuples(st.just(TEXT), st.sampled_from(TEXTS)),
    ),
    min_size=1,
    max_size=4,
)
tenants = st.sampled_from(
    [(None, None, None), (None, None, None), ("a", None, None), (None, "a", None), ("a", "a", None), (None, None, "x")]
)
"""Key, salt and adapter."""
picks = st.integers(0, 7)
pieces = st.sampled_from([1, 2, 5, ALL])


def pick_from(sequence, pick):
    return sequence[pick % len(sequence)]


class CacheHistories(RuleBasedStateMachine):
    """Requests are computed in pieces, decode, finish, fail, return and continue while memory is short."""

    pool_size = 48
    eviction_policy = "lru"
    links = ("block",)
    options = {}
    has_storage = False

    def __init__(self):
        super().__init__()
        self.storage = Storage() if self.has_storage else None
        self.pools = Phases(self.pool_size, eviction_policy=self.eviction_policy, storage=self.storage, **self.options)
        if self.has_storage:  # neither requests nor flushes wait for storage that hangs
            self.pools.cache.tiers.storage.patience = Patience("timeout", base=0.0, per_ki_token=0.0, max=0.0)
        self.retracted = []
        self.ended = []
        self.now = 0

    def begin(self, num_tokens, parts, tenant=(None, None, None), pick=0):
        extra_key, cache_salt, lora_id = tenant
        link = pick_from(self.links, pick)
        req = new_request(parts, extra_key=extra_key, cache_salt=cache_salt, link=link, lora_id=lora_id)
        self.pools.arrive(req)
        assert req.to_finish is None
        self.restart(req, num_tokens)

    def restart(self, req, num_tokens):
        """Start a request, or the probe that its policy needs first."""
        first = stand_in(req)
        if self.pools.begin(first, num_tokens):
            first.phase = "extending"
        elif self.pools.running or self.pools.waiting_locks:
            self.retracted.append(req)

    can_begin = precondition(lambda self: len(self.pools.running) < 4 and len(self.retracted) < 4)

    @can_begin
    @rule(parts=parts_of_prompts, tenant=tenants, num_tokens=pieces, pick=picks)
    def begin_prompt(self, parts, tenant, num_tokens, pick):
        self.begin(num_tokens, parts, tenant, pick)

    @can_begin
    @rule(parts=parts_of_prompts, num_tokens=pieces, pick=picks)
    def begin_twins(self, parts, num_tokens, pick):
        """Two requests compute the same text side by side, in different pieces."""
        self.begin(num_tokens, parts, pick=pick)
        self.begin(ALL, parts, pick=pick)

    @can_begin
    @precondition(lambda self: self.ended)
    @rule(pick=picks, text=st.sampled_from(TEXTS), num_tokens=pieces)
    def begin_next_turn(self, pick, text, num_tokens):
        """An earlier request's prompt and answer, with more text."""
        last = pick_from(self.ended, pick)
        if len(last.contents) < 32:
            parts = [*last.parts, (TEXT, tuple(last.output_ids)), (TEXT, text)]
            own_key = (last.extra_key or "").removesuffix(last.lora_id or "") or None
            tenant = (own_key, last.layout.cache_salt, last.lora_id)
            self.begin(num_tokens, parts, tenant, self.links.index(last.layout.link))

    @can_begin
    @precondition(lambda self: self.pools.paths)
    @rule(pick=picks, tokens=st.sampled_from(CHUNKS + TEXTS), forge=st.sampled_from([repr, str, lambda name: name[0]]))
    def begin_forged(self, pick, tokens, forge):
        """A client passes one of our namespaces as its own key."""
        namespace = pick_from(list(self.pools.paths), pick)
        for name in (namespace, Namespace("chunk", namespace.extra_key, namespace.cache_salt)):
            self.begin(ALL, [(TEXT, tokens)], (forge(name), None, None))

    @precondition(lambda self: len(self.pools.running) < 4 and self.retracted)
    @rule(pick=picks, num_tokens=pieces)
    def begin_retracted(self, pick, num_tokens):
        req = pick_from(self.retracted, pick)
        self.retracted.remove(req)
        self.restart(req, num_tokens)

    @precondition(lambda self: self.pools.running)
    @rule(pick=picks, num_steps=st.integers(1, 6), num_tokens=pieces)
    def advance(self, pick, num_steps, num_tokens):
        """Phases of a running request: receive a result, compute the next piece, decode, finish."""
        req = pick_from(self.pools.running, pick)
        for _ in range(num_steps):
            if req in self.pools.running:
                self.advance_once(req, num_tokens)
                self.pools.check()

    def advance_once(self, req, num_tokens):
        if req.phase == "extending":
            if req.extend_end < len(req.full_untruncated_fill_ids):
                self.pools.end_piece(req)
                req.phase = "extended"
            elif is_internal(req):
                self.end_probe(req, done=True)
            else:
                self.pools.end_prefill(req)
                req.phase = "decoding"
        elif req.phase == "extended":
            if self.pools.next_piece(req, num_tokens):
                req.phase = "extending"
            else:
                self.retract(req)
        elif len(req.output_ids) >= req.sampling_params.max_new_tokens:
            self.pools.release(req)
            self.ended = [*self.ended[-3:], req]
        elif not self.pools.decode(req):
            self.retract(req)

    def end_probe(self, req, done):
        parent = linked(req).probe.parent
        undecided = lazy_state(parent)
        self.pools.release(req, checkpoint=done)
        self.retracted.append(parent)
        if not done:
            assert stand_in(parent) is not req
            return
        if "attention" not in linked(req).policy.probes:
            assert stand_in(parent) is parent
            return
        chunks = parent.layout.chunks
        best = most_attended(parent, chunks[undecided.num_chosen :], lazy_state(req).policy.ratio)
        kept = kept_in(lazy_state(parent), parent.layout)
        assert kept[: undecided.num_chosen] == list(undecided.kept[: undecided.num_chosen])
        for (start, end), ranges in list(zip(chunks, kept, strict=True))[undecided.num_chosen :]:
            computed = set(range(end - start)).difference(*(range(*pair) for pair in ranges))
            last = {len(parent.origin_input_ids) - 1}
            assert {start + i for i in computed} - last == best & set(range(start, end)) - last

    def retract(self, req):
        if is_internal(req):
            return self.end_probe(req, done=False)
        self.pools.release(req, checkpoint=False)
        req.reset_for_retract()
        self.retracted.append(req)

    @precondition(lambda self: self.pools.running)
    @rule(pick=picks, abort=st.booleans())
    def stop(self, pick, abort):
        """A request is aborted or retracted, in any phase."""
        req = pick_from(self.pools.running, pick)
        if abort:
            self.pools.release(req, checkpoint=False)
        else:
            self.retract(req)

    @precondition(lambda self: self.pools.has_tiers)
    @rule()
    def take_acknowledgements(self):
        self.pools.take_acknowledgements()

    @precondition(lambda self: self.pools.has_tiers and self.pools.cache.evictable_size())
    @rule()
    def demote_all(self):
        self.pools.take_acknowledgements()
        self.pools.cache.evict(EvictParams(num_tokens=self.pools.cache.evictable_size()))

    @precondition(lambda self: self.pools.has_tiers and self.pools.cache.tiers.host._leaves)
    @rule(num_tokens=st.integers(1, 6))
    def evict_host(self, num_tokens):
        self.pools.cache.tiers.host.evict(num_tokens)

    @precondition(lambda self: self.pools.cache.evictable_size() > self.pool_size // 2)
    @rule(num_tokens=st.integers(1, 20))
    def evict(self, num_tokens):
        before, evictable = self.pools.num_free, self.pools.cache.evictable_size()
        result = self.pools.cache.evict(EvictParams(num_tokens=num_tokens))
        assert self.pools.num_free == before + result.num_tokens_evicted
        assert result.num_tokens_evicted >= min(num_tokens, evictable)

    @precondition(lambda self: self.pools.store._cached)
    @rule(pick=picks)
    def delete_chunk(self, pick):
        """A chunk is deleted, in use or not."""
        chunk = pick_from(list(self.pools.store._cached.values()), pick)
        free = self.pools.num_free
        self.pools.cache.admission.pins.remove(chunk)
        held = self.pools.cache.tree.is_held(chunk.node)
        self.pools.store.deletions.add(chunk)
        self.sweep()
        assert (chunk.node is not None) == held
        assert self.pools.num_free >= free

    @precondition(lambda self: self.pools.store._cached)
    @rule(pick=picks, ttl=st.sampled_from([None, 5]))
    def pin_chunk(self, pick, ttl):
        """A chunk is pinned, possibly again, unless the budget or memory is short."""
        pins, chunk = self.pools.cache.admission.pins, pick_from(list(self.pools.store._cached.values()), pick)
        before = len(pins)
        try:
            pins.add([chunk], ttl, now=self.now)
        except ValueError:
            assert len(pins) == before and chunk.pin is None
        assert pins.num_tokens.total() <= pins.budget

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds):
        """Time passes: pins that were not used expire."""
        self.now += seconds
        pins = self.pools.cache.admission.pins
        pins.expire(self.now)
        assert all(chunk.pin.until is None or chunk.pin.until > self.now for chunk in pins._chunks.values())

    @rule()
    def sweep(self):
        """Deleted chunks are freed once nobody holds them."""
        self.pools.store.deletions.sweep()
        assert all(
            chunk.node is None or self.pools.cache.tree.is_held(chunk.node)
            for chunk in self.pools.store.deletions.waiting.values()
        )

    @precondition(lambda self: len(self.pools.waiting_locks) < 2 and self.pools.paths)
    @rule(tokens=st.sampled_from(CHUNKS), needed=st.integers(1, 5))
    def lock_for_waiting(self, tokens, needed):
        """A waiting request locks the beginning of a chunk."""
        key = chunk_key(as_int32(tokens), Namespace("chunk", None, None))
        kept = ((0, min(needed, len(tokens))),)
        node = self.pools.store.find(ChunkSlice(key, 0, array("q", tokens), 0, len(tokens), kept))
        if node is not None and (node.slots is not None or self.pools.store.load([node])):
            self.pools.cache.tree.lock(node)
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
        self.settle()
        self.pools.flush()
        assert not len(self.pools.cache.admission.pins)
        assert self.pools.num_free == self.pool_size

    @invariant()
    def check(self):
        self.pools.check()
        if not self.pools.running and not self.pools.waiting_locks and not self.pools.copying:
            pins = self.pools.cache.admission.pins
            assert self.pools.cache.tree.num_locks == len(pins)
            locked = {above for chunk in pins._chunks.values() for above in chunk.node.path()}
            assert self.pools.cache.protected_size() == sum(map(len, locked))
        for chunk in self.pools.cache.admission.pins._chunks.values():
            assert chunk.node.slots is not None and self.pools.store._cached[chunk.key] is chunk

    def end_all(self):
        for req in list(self.pools.running):
            self.pools.release(req, checkpoint=False)
        while self.pools.revoke():
            pass
        self.settle()

    def settle(self):
        """All copies under way arrive; then what is on the host is stored."""
        while self.pools.copying:
            self.pools.take_acknowledgements()
        self.pools.take_acknowledgements()

    def teardown(self):
        """Everything can be released and evicted: nothing has leaked."""
        self.end_all()
        self.check()
        while len(self.pools.cache.admission.pins):
            self.pools.cache.admission.pins.give_up()
        assert self.pools.cache.admission.pins.num_tokens.total() == 0
        self.pools.cache.evict(EvictParams(num_tokens=self.pool_size))
        assert self.pools.num_free == self.pool_size
        if self.pools.has_tiers:
            host, num_slots = self.pools.cache.tiers.host, self.options["host_size"]
            host.evict(num_slots)
            assert host.memory.slots.num_free == num_slots
        assert not self.pools.cache.tree.root.children and not self.pools.store._cached
        assert not any(self.pools.plain_nodes()) and not any(self.pools.cache.room.mirror.oldest())


class FrequencyHistories(CacheHistories):
    """The same with priorities that are more than times, in a smaller pool."""

    pool_size = 24
    eviction_policy = "lfu"


class CopyHistories(CacheHistories):
    """The same with requests that copy their chunks, beside others that do not."""

    pool_size = 64
    links = ("copy", "copy", "block")


class HoleHistories(CacheHistories):
    """The same with prompts that keep some tokens of their chunks and compute the others in context."""

    links = ("holes", "other holes", "holes", "block")


class PolicyHistories(CacheHistories):
    """The same with recomputed tokens, preambles, and probes beside other requests."""

    pool_size = 80
    links = (
        "query:ratio=0.4",
        "base+query:ratio=0.4",
        "blend:ratio=0.4",
        "base+static:ratio=0.4",
        "base",
        "base:preamble=lead",
        "base+epic:tokens=2",
        "epic:tokens=2",
        "copy",
        "block",
    )


class TierHistories(CacheHistories):
    """The same with a host tier that receives what the device evicts, and soon fills up."""

    pool_size = 32
    options = {"host_size": 40}


@functools.cache
def stored_before():
    """What an earlier server has left in storage."""
    return storage_with(*((CHUNK, tokens) for tokens in CHUNKS)).objects


class StoredHistories(TierHistories):
    """The same with storage behind the host, which at times hangs, fails, or has damaged objects."""

    has_storage = True

    def __init__(self):
        super().__init__()
        self.storage.objects.update((name, data.clone()) for name, data in stored_before().items())

    @rule(hangs=st.booleans())
    def hang_storage(self, hangs):
        """Storage stops answering, or answers everything asked in the meantime."""
        self.pools.slow = hangs
        (self.storage.open.clear if hangs else self.storage.open.set)()

    @rule(call=st.sampled_from([None, None, "exists", "batch_get", "batch_set"]))
    def break_storage(self, call):
        """This call fails from now on; all others succeed."""
        self.storage.broken = call

    @rule(
        pick=picks,
        damage=st.sampled_from(["truncated", "flipped", "another", "lost"]),
        from_end=st.integers(1, 96),
    )
    def damage_object(self, pick, damage, from_end):
        """Storage loses an object or its end, changes a bit of it, or has another of its size in its place."""
        self.pools.take_acknowledgements()
        objects = self.storage.objects
        if not objects:
            return
        name = pick_from(sorted(objects), pick)
        byte = max(0, len(objects[name]) - from_end)
        if damage == "truncated":
            objects[name] = objects[name][:byte]
        elif damage == "flipped":
            objects[name][byte : byte + 1] ^= 1
        elif damage == "another":
            same_size = [other for other in sorted(objects) if len(objects[other]) == len(objects[name])]
            objects[name] = objects[pick_from(same_size, same_size.index(name) + 1)].clone()
        else:
            del objects[name]

    @rule(parts=parts_of_prompts, num_tokens=pieces)
    def begin_after_restart(self, parts, num_tokens):
        """Everything but storage is lost before a prompt arrives."""
        self.end_all()
        self.flush()
        self.begin(num_tokens, parts)

    def teardown(self):
        self.hang_storage(False)
        super().teardown()
        storage = self.pools.cache.tiers.storage
        assert not storage.fetches and storage._num_fetching == storage._num_writing == 0


class HybridHistories(CacheHistories):
    """The same with a sliding-window layer that has fewer slots than the other one."""

    pool_size = 64
    links = ("block", "block", "holes", "base:preamble=lead", "base+epic:tokens=2")
    options = {"window": 1, "window_size": 28}

    @precondition(lambda self: self.pools.cache.swa_evictable_size())
    @rule(num_tokens=st.integers(1, 12))
    def evict_windows(self, num_tokens):
        cache, slots = self.pools.cache, self.pools.slots
        free, evictable = slots.swa_available_size(), cache.swa_evictable_size()
        cache.evict(EvictParams(num_tokens=0, swa_num_tokens=num_tokens))
        assert slots.swa_available_size() >= free + min(num_tokens, evictable)


class WiderHybridHistories(HybridHistories):
    """The same with a window that spans several chunks, and probes."""

    links = ("block", "query:ratio=0.4", "other holes", "base", "base+static:ratio=0.4")
    options = {"window": 4, "window_size": 40}


class SelectiveTierHistories(CacheHistories):
    """The same where only what is used again is backed up, and policies keep parts of chunks."""

    pool_size = 40
    eviction_policy = "lfu"
    links = ("block", "holes", "copy", "base:preamble=lead")
    options = {"host_size": 80, "write_policy": "write_through_selective"}


CacheHistories.TestCase.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, stateful_step_count=40
)
for few in (
    FrequencyHistories,
    CopyHistories,
    HoleHistories,
    PolicyHistories,
    TierHistories,
    SelectiveTierHistories,
    HybridHistories,
    WiderHybridHistories,
):
    few.TestCase.settings = settings(CacheHistories.TestCase.settings, max_examples=40)
StoredHistories.TestCase.settings = CacheHistories.TestCase.settings
TestCacheHistories = CacheHistories.TestCase
TestFrequencyHistories = FrequencyHistories.TestCase
TestCopyHistories = CopyHistories.TestCase
TestHoleHistories = HoleHistories.TestCase
TestPolicyHistories = PolicyHistories.TestCase
TestTierHistories = TierHistories.TestCase
TestStoredHistories = pytest.mark.slow(StoredHistories.TestCase)
TestSelectiveTierHistories = SelectiveTierHistories.TestCase
TestHybridHistories = HybridHistories.TestCase
TestWiderHybridHistories = pytest.mark.slow(WiderHybridHistories.TestCase)
