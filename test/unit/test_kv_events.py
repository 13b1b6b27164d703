"""KV events of SGLang's cache and our tree: a follower knows what is cached where, by SGLang's own hashes."""

import collections
import random
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

from fakes import chunk_server
from fakes.host_tree import CHUNKS, Tree, check
from sglang_lazy.core.keys import Namespace
from sglang_lazy.port.cache.plain import BlockEvents

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
LEADING, PRIVATE = CHUNKS.leading, Namespace("chunk", None, "tenant")


def hashes(tokens):
    """SGLang's hash of each of these tokens' blocks at the start of a prompt."""
    return [hash_str_to_int64(name) for name in get_hash_str(list(tokens), None, page_size=1)]


class Follower:
    """Believes what events say, all of which is news."""

    def __init__(self):
        self.held = {GPU: set(), CPU: set()}
        self.texts = {}  # of blocks: the one before each, and its token

    def follow(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held = {GPU: set(), CPU: set()}
                continue
            held, blocks = self.held[event.medium], set(event.block_hashes)
            assert blocks and len(blocks) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not blocks & held and event.block_size == 1
                before = [event.parent_block_hash, *event.block_hashes]
                for block, *told in zip(event.block_hashes, before, event.token_ids, strict=False):
                    assert self.texts.setdefault(block, told) == told
                held |= blocks
            else:
                assert blocks <= held
                held -= blocks
        return self.held

    def text_of(self, block):
        """The prompt that ends with this block."""
        before, token = self.texts[block]
        return [*([] if before is None else self.text_of(before)), token]


class Caches:
    """SGLang's cache and our tree, followed."""

    def __init__(self, size=60, host_size=40):
        slots = SimpleNamespace(free_segment=lambda slots, start_pos: None, device="cpu")
        self.plain = RadixCache.create_simulated(mock_allocator=slots, enable_kv_cache_events=True)
        self.tree, self.events, self.follower = Tree(size, host_size), BlockEvents(), Follower()
        self.tree.parts += (self.events,)
        self.tree.host.watchers.append(self.events)

    def prompt(self, *tokens):
        """Have a plain prompt cached."""
        self.plain.insert(InsertParams(key=RadixKey(array("q", tokens), None), value=torch.arange(len(tokens))))

    def follow(self):
        return self.follower.follow(self.events.merge(self.plain.take_events()))

    def held(self):
        """The same from the trees themselves."""
        truth = {GPU: set(), CPU: set()}
        for node in self.tree.nodes():
            if node.namespace in (CHUNKS, LEADING):
                before = [token for each in node.path() for token in each.tokens]
                names = hashes(before)[-len(node) :]
                truth[GPU].update([] if node.slots is None else names)
                truth[CPU].update([] if node.host is None else names)
        left = [(child, []) for child in self.plain.root_node.children.values()]
        while left:
            node, before = left.pop()
            tokens = [*before, *node.key.token_ids]
            truth[GPU].update(hashes(tokens)[len(before) :])
            left += [(child, tokens) for child in node.children.values()]
        return truth

    def reset(self):
        self.plain.reset()
        self.tree.host.finish()
        self.tree.reset()
        self.tree.allocator.clear()


@pytest.mark.parametrize("seed", range(8))
def test_followers_know_what_is_held(seed):
    """Whatever happens, in whatever order, and however often they ask. Texts are alike, so that all kinds of holders
    share beginnings."""
    dice = random.Random(seed)
    caches = Caches(dice.choice((20, 40, 80)), dice.choice((10, 30)))
    tree = caches.tree
    texts = [[dice.randrange(2) for _ in range(dice.randrange(1, 8))] for _ in range(12)]

    def compute():
        namespace = dice.choice((CHUNKS, CHUNKS, LEADING, PRIVATE))
        if (node := tree.compute(dice.choice(texts), namespace)) and dice.random() < 0.6:
            tree.host.back_up([node])

    def load():
        nodes = tree.nodes()
        tree.host.load([node for node in dice.sample(nodes, min(2, len(nodes))) if node.slots is None])

    def adopt():
        tokens, slots = array("q", dice.choice(texts)), None
        if tree.end_of(tokens, CHUNKS) is None:
            slots = tree.host.alloc(len(tokens))
        if slots is not None:
            rows = Tree(20, 20)
            rows.host.back_up([node := rows.compute(tokens.tolist())])
            rows.host.finish()
            tree.memory.groups[0].host[:, slots] = rows.memory.groups[0].host[:, rows.host.slots_to(node)]
            if tree.host.adopt(tokens, CHUNKS, slots) is None:
                tree.host.free(slots)

    def discard():
        if nodes := tree.nodes():
            tree.discard(dice.choice(nodes))

    events = [compute, compute, compute, load, load, adopt, discard, tree.host.poll, tree.host.finish]
    events += [
        lambda: caches.prompt(*dice.choice(texts)),
        lambda: caches.prompt(*dice.choice(texts)),
        lambda: caches.plain.evict(EvictParams(num_tokens=dice.randrange(1, 9))),
        lambda: tree.evict(dice.randrange(1, 12)),
        lambda: tree.host.evict(dice.randrange(1, 6)),
        lambda: tree.find(array("q", dice.choice(texts)), CHUNKS),
    ]
    seen = collections.Counter()
    for _ in range(500):
        if dice.random() < 0.02:
            caches.reset()
        else:
            dice.choice(events)()
        check(tree)
        if dice.random() < 0.5:
            truth = caches.held()
            assert caches.follow() == truth
            for place, blocks in truth.items():
                seen[place] += len(blocks)
                for block in blocks:
                    assert hashes(caches.follower.text_of(block))[-1] == block
    assert min(seen[GPU], seen[CPU]) > 500
    caches.reset()
    assert caches.follow() == {GPU: set(), CPU: set()}
    assert not caches.events._digests


def test_nothing_is_kept_of_what_is_gone():
    caches = Caches()
    for first in range(20):
        caches.prompt(first, 2, 3)
        caches.tree.host.back_up([caches.tree.compute([first, 2])])
        caches.tree.host.finish()
    caches.follow()
    caches.plain.evict(EvictParams(num_tokens=1000))
    caches.tree.evict(1000)
    caches.tree.host.evict(1000)
    assert caches.follow() == {GPU: set(), CPU: set()}
    kept = [*caches.events._own.values(), *caches.events._plain.values(), caches.events._digests]
    assert not any(kept)


def test_which_kv_has_events():
    """Only chunks without a tenant, computed alone, and leading text: not chunks after a preamble, nor text after
    chunks, nor whole chunks, nor what an adapter has computed."""
    caches = Caches()
    others = [
        PRIVATE,
        PRIVATE.leading,
        Namespace("chunk", "key", None),
        Namespace("chunk", None, None, b"preamble"),
        Namespace("chunk", "adapter", None, None, "adapter"),
        Namespace("text", None, None, b"path"),
        Namespace("whole", None, None, b"own digest"),
    ]
    for i, namespace in enumerate(others):
        caches.tree.compute([i, 1, 2], namespace)
    assert caches.follow()[GPU] == set()
    caches.tree.compute([13, 12], LEADING)
    caches.tree.compute([1, 2, 3, 4], CHUNKS)
    assert caches.follow()[GPU] == {*hashes([13, 12]), *hashes([1, 2, 3, 4])}
    caches.tree.evict(100)
    assert caches.follow()[GPU] == set()


@pytest.mark.parametrize("chunk_first", [True, False])
@pytest.mark.parametrize("chunk_leaves_first", [True, False])
def test_blocks_that_a_chunk_and_a_prompt_share_stay_until_both_are_gone(chunk_first, chunk_leaves_first):
    caches = Caches()
    chunk, prompt = (1, 2, 3, 4, 5), (1, 2, 3, 9, 9)
    for computes_chunk in (chunk_first, not chunk_first):
        caches.tree.compute(chunk) if computes_chunk else caches.prompt(*prompt)
        caches.follow()
    assert caches.follow()[GPU] == {*hashes(chunk), *hashes(prompt)} and len(caches.follow()[GPU]) == 7
    if chunk_leaves_first:
        caches.tree.evict(100)
    else:
        caches.plain.evict(EvictParams(num_tokens=100))
    assert caches.follow()[GPU] == {*hashes(prompt if chunk_leaves_first else chunk)}
    caches.tree.evict(100)
    caches.plain.evict(EvictParams(num_tokens=100))
    assert caches.follow()[GPU] == set()


def test_a_chunk_and_leading_text_are_one_block():
    caches = Caches()
    caches.tree.compute([1, 2, 3], CHUNKS)
    assert len(caches.follow()[GPU]) == 3
    leads = caches.tree.compute([1, 2, 3], LEADING)
    assert not caches.events.merge([])
    caches.tree.discard(leads)
    assert not caches.events.merge([]), "the chunk is still there"


def test_equal_tokens_after_different_ones_are_other_blocks():
    """Two chunks share a prefix; a prompt follows the first and then repeats tokens of the second, which are other KV
    there."""
    caches = Caches()
    caches.tree.compute([1, 2, 3])
    caches.tree.compute([1, 2, 3, 4, 5])
    caches.prompt(1, 2, 4, 5)
    assert caches.follow()[GPU] == {*hashes((1, 2, 3, 4, 5)), *hashes((1, 2, 4, 5))}


def test_tiers():
    """Copies on the host have events of their own, and so do loads."""
    caches = Caches()
    node = caches.tree.compute([1, 2, 3, 4])
    caches.tree.host.back_up([node])
    caches.tree.host.finish()
    names = {*hashes((1, 2, 3, 4))}
    assert caches.follow() == {GPU: names, CPU: names}
    caches.tree.evict(100)
    assert caches.follow() == {GPU: set(), CPU: names}
    assert caches.tree.host.load([node])
    assert caches.follow() == {GPU: names, CPU: names}
    caches.tree.host.finish()
    caches.tree.evict(100)
    caches.tree.host.evict(80)
    assert caches.follow() == {GPU: set(), CPU: set()}


def test_host_tiers_of_both_trees():
    """SGLang's cache may have one, too. It sends no event for KV that it computes again while its host has it."""
    caches, names = Caches(), hashes((1, 2, 3))
    told = [BlockStored(names, None, [1, 2, 3], 1, None, CPU), BlockRemoved(names, GPU)]
    assert caches.follower.follow(caches.events.merge(told)) == {GPU: set(), CPU: {*names}}
    caches.tree.host.back_up([caches.tree.compute([1, 2, 3])])
    caches.tree.host.finish()
    assert caches.follow() == {GPU: {*names}, CPU: {*names}}
    told = [BlockRemoved(names[1:], CPU)]
    assert caches.follower.follow(caches.events.merge(told)) == {GPU: {*names}, CPU: {*names}}


@pytest.mark.usefixtures("sglang_context")
def test_chunks_from_storage_have_events():
    server = chunk_server.Server(chunk_server.storage_with((1, 2, 3, 4)))
    events, follower = BlockEvents(), Follower()
    server.tree.parts += (events,)
    server.tree.host.watchers.append(events)
    prompt = server.ask((1, 2, 3, 4))
    server.step()
    names = {*hashes((1, 2, 3, 4))}
    assert follower.follow(events.merge([])) == {GPU: set(), CPU: names}
    server.answer(prompt)
    assert follower.follow(events.merge([])) == {GPU: names, CPU: names}
    server.compute([chunk_server.chunk_of((5, 6))])
    assert follower.follow(events.merge([]))[GPU] == names | {*hashes((5, 6))}
