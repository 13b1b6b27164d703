"""KV events of a tree with chunks: a follower knows what is cached where, by SGLang's own hashes."""

import collections

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored, StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from test_cache_machine import CacheHistories, StoredHistories

from fakes.loop import QUESTION, A, B, Loop
from fakes.requests import CHUNK, TEXT
from fakes.stored import new_server, storage_with
from sglang_lazy.core.keys import Namespace

pytestmark = pytest.mark.usefixtures("sglang_context")

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU


def hashes(tokens):
    """SGLang's hash of each of these tokens' blocks at the start of a prompt."""
    return [hash_str_to_int64(name) for name in get_hash_str(list(tokens), None, page_size=1)]


class Follower:
    """Tracks what the events of a cache say is stored.  strict: no block is stored twice, or removed without being
    stored."""

    def __init__(self, cache, strict=True):
        self.cache, self.strict = cache, strict
        self.stored = collections.defaultdict(set)
        cache.enable_kv_cache_events = True

    def follow(self):
        for event in self.cache.take_events():
            if isinstance(event, AllBlocksCleared):
                self.stored.clear()
                continue
            stored, blocks = self.stored[event.medium], set(event.block_hashes)
            assert blocks and len(blocks) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not self.strict or not blocks & stored
                stored |= blocks
            else:
                assert not self.strict or blocks <= stored
                stored -= blocks
        return self.stored


def cached(pools):
    """The same from the tree itself: plain prompts, and chunks without a tenant or preamble."""
    truth = collections.defaultdict(set)
    for node, namespace, before in pools.nodes():
        if namespace in (None, Namespace("chunk", None, None)):
            names = hashes((*before, *node.key.token_ids))[len(before) :]
            truth[GPU].update([] if node.evicted else names)
            truth[CPU].update(names if node.backuped else [])
    return truth


class EventHistories(CacheHistories):
    """The histories of the cache, followed by events. Tenants have salts only, since SGLang's own events omit
    `extra_key` and adapters."""

    pool_size = 40
    links = ("block", "base", "copy", "base:preamble=lead", "epic:tokens=2")
    strict = True

    def __init__(self):
        super().__init__()
        self.follower = Follower(self.pools.cache, self.strict)

    def begin(self, num_tokens, parts, tenant=(None, None, None), pick=0):
        super().begin(num_tokens, parts, (None, tenant[1], None), pick)

    @invariant()
    def follow(self):
        assert self.follower.follow()[GPU] == cached(self.pools)[GPU]


class StoredEventHistories(EventHistories, StoredHistories):
    """The same with a host tier and storage. SGLang sends no event for KV that is recomputed while the host has it."""

    pool_size = 32
    strict = False

    @invariant()
    def follow(self):
        stored, truth = self.follower.follow(), cached(self.pools)
        assert stored[GPU] <= truth[GPU] and stored[CPU] <= truth[CPU]
        if not self.pools.copying:
            assert stored[CPU] == truth[CPU]


EventHistories.TestCase.settings = settings(CacheHistories.TestCase.settings, max_examples=25)
StoredEventHistories.TestCase.settings = EventHistories.TestCase.settings
TestEventHistories = EventHistories.TestCase
TestStoredEventHistories = StoredEventHistories.TestCase


def test_which_chunks_have_events():
    """Only chunks without a tenant, computed alone: not those after a preamble, nor text after chunks."""
    loop = Loop()
    follower = Follower(loop.tree_cache)
    lead = (TEXT, (13, 12))
    loop.submit([lead, A, QUESTION, A, QUESTION], "plain")
    loop.submit([B, QUESTION], "salted", cache_salt="tenant")
    loop.submit([B, QUESTION], "keyed", extra_key="tenant")
    loop.submit([B, QUESTION], "behind", link="base")
    loop.run()
    neutral = (14, 13)
    assert follower.follow()[GPU] == {*hashes(lead[1]), *hashes(A[1]), *hashes(neutral)}
    loop.tree_cache.evict(EvictParams(num_tokens=100))
    assert follower.follow()[GPU] == set()


@pytest.mark.parametrize("chunk_first", [True, False])
def test_blocks_that_a_chunk_and_a_prompt_share_stay_until_both_are_gone(chunk_first):
    loop = Loop()
    follower = Follower(loop.tree_cache)
    chunk, prompt = (1, 2, 3, 4, 5), (1, 2, 3, 9, 9)
    requests = [[(CHUNK, chunk), QUESTION], [(TEXT, prompt), QUESTION]]
    for parts in requests if chunk_first else requests[::-1]:
        loop.submit(parts, "r", max_new_tokens=1)
        loop.run()
    both = {*hashes(chunk), *hashes((*prompt, *QUESTION[1]))}
    assert follower.follow()[GPU] == both and len(both) == 5 + 6 - 3
    loop.tree_cache.evict(EvictParams(num_tokens=1))
    gone, kept = (chunk, prompt) if chunk_first else (prompt, chunk)
    assert set(hashes(kept)) <= follower.follow()[GPU]
    assert not (set(hashes(gone)) - set(hashes(kept))) & follower.follow()[GPU]


def test_equal_tokens_after_different_ones_are_other_blocks():
    """Two chunks share a prefix; a prompt follows the first and then repeats tokens of the second, which are other KV
    there."""
    loop = Loop()
    follower = Follower(loop.tree_cache)
    for tokens in ((1, 2, 3), (1, 2, 3, 4, 5)):
        loop.submit([(CHUNK, tokens), QUESTION], "r")
    loop.run()
    loop.submit([(TEXT, (1, 2, 4, 5)), QUESTION], "r", max_new_tokens=1)
    loop.run()
    assert follower.follow()[GPU] == {*hashes((1, 2, 3, 4, 5)), *hashes((1, 2, 4, 5, *QUESTION[1]))}


def test_tiers():
    """Copies on the host have events of their own, and so do loads."""
    loop = Loop(host_size=80)
    follower = Follower(loop.tree_cache)
    prompts = [[A, QUESTION], [(TEXT, A[1]), QUESTION]]
    for parts in prompts:
        loop.submit(parts, "r", max_new_tokens=1)
        loop.run()
    names = {*hashes((*A[1], *QUESTION[1]))}
    assert follower.follow() == {GPU: names, CPU: names}
    loop.tree_cache.evict(EvictParams(num_tokens=100))
    assert follower.follow() == {GPU: set(), CPU: names}
    loop.submit([A, QUESTION], "r", max_new_tokens=1)
    loop.run()
    assert follower.follow() == {GPU: {*hashes(A[1])}, CPU: names}
    loop.tree_cache.evict(EvictParams(num_tokens=100))
    loop.tree_cache.evict_host(80)
    assert follower.follow() == {GPU: set(), CPU: set()}


def test_chunks_from_storage_have_events():
    loop = new_server(storage_with(A))
    follower = Follower(loop.tree_cache)
    loop.submit([A, B, QUESTION], "r", max_new_tokens=1)
    loop.run()
    names = {*hashes(A[1]), *hashes(B[1])}
    assert follower.follow() == {GPU: names, CPU: names}
