"""The one cache that SGLang's scheduler sees: its own for prompts without chunks, and our tree for linked requests.

Both take their slots from one allocator. SGLang's cache, whatever its factory makes, is not changed: all names that
`CompositeCache` does not define are that cache's, read and set, and `isinstance` sees its class. A request is ours if
it is linked or a fill (`core.state`); all others never meet our tree.

Of what SGLang 0.5.23 asks of a cache, its own alone answers supports_*, page_size, disable, the pools, free_kv_row,
claim_kv_row, evict_sliding_windows, release_swa_prefix_lock (nothing to do for our locks), touch_prefix,
root_node_handle, total_size, sanity_check, metrics, and whatever belongs to sessions, mamba, its host tier and
disaggregation.

Linked requests must not reach `prefetch_from_storage`, which takes only tokens: the scheduler's hook keeps them away.
Where SGLang matches requests that only wait, it must do so in `ranking`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_lazy.attention.table import table_of
from sglang_lazy.cache.room import Giving, Room
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.cache.windows import Windows
from sglang_lazy.chunks import fill_rows
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.prompt import Images
from sglang_lazy.core.row_order import Row
from sglang_lazy.core.state import RowNodes, fill_of, linked, stand_in
from sglang_lazy.port.cache.plain import BlockEvents, HostMemories, PlainCache, amounts_wanted
from sglang_lazy.storage.tiers import Tiers


class CompositeCache:
    """SGLang's own cache and ours, as one.

    plain: SGLang's, as its factory made it.  tree: ours, in the same pool.  clock: by which `tree` counts uses.
    windows: the part of `tree` for window KV; None if all layers share a pool.
    room: what both evict.
    rows: lays out the rows of linked requests, set once. Its chunks may have a tree and a pool of their own.
    tiers: below the device, of chunks; None without.
    events: of both trees, a part of ours; None unless they are published.
    admission: of linked requests; set once the scheduler is complete.

    Every choice here follows from the order of requests, not from times of day, so all ranks make the same.
    """

    # What SGLang's scheduler asks for many times a request, and never changes: without the way over `__getattr__`.
    _direct = (
        "claim_kv_row",
        "free_kv_row",
        "maybe_hand_to_session",
        "req_to_token_pool",
        "supports_auxiliary_swa",
        "supports_fast_match_prefix",
        "supports_mamba",
        "supports_prefix_sharing",
        "supports_swa",
        "token_to_kv_pool_allocator",
    )

    plain: Any
    tree: RadixTree
    windows: Windows | None
    room: Room
    rows: RowCache
    tiers: Tiers | None
    events: BlockEvents | None
    admission: Any
    _clock: Iterator[int]
    _other: PlainCache
    _ranks: bool | None

    def __init__(self, plain: Any, tree: RadixTree, clock: Iterator[int], windows: Windows | None = None):
        vars(self).update({name: getattr(plain, name) for name in self._direct}, plain=plain)
        self._other = PlainCache(plain)
        self.tree, self._clock, self.windows, self.room = tree, clock, windows, Room(self._other, tree, windows)
        self.tiers, self.events, self.admission, self._ranks = None, None, None, None
        # SGLang's cache makes room for what it loads from its own tiers: our tree must give its share of that, too.
        plain.evict_for_alloc = self.evict_for_alloc

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CompositeCache.__annotations__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.plain, name, value)

    # mypy does not let a property stand for `__class__`, by which `isinstance` sees SGLang's.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.plain)

    @property
    def store(self) -> Any:
        """The chunk store."""
        return self.rows.store

    # Requests

    @contextlib.contextmanager
    def ranking(self, by_prefix: bool) -> Iterator[None]:
        """A context in which matches of waiting requests only tell how much is cached, without laying out rows.

        by_prefix: whether the queue is sorted by it. Otherwise SGLang matches all the same, every waiting request in
            every step, to report its load; for that, what was cached on arrival will do.
        """
        self._ranks = by_prefix
        try:
            yield
        finally:
            self._ranks = None

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        req = params.req
        if self._ranks is not None and (waiting := linked(stand_in(req))) is not None:
            on_device, on_host = waiting.num_known_tokens, 0
            if self._ranks:
                on_device, on_host = self.rows.rank(req, waiting, self.admission.cached(waiting))
            return self._matched(on_device, self.plain.root_node_handle(req.extra_key), on_host)
        if self._ranks is False and fill_of(req) is not None:
            return self._matched(0, self.plain.root_node_handle(req.extra_key))
        if (state := linked(req)) is not None:
            num_tokens = len(req.origin_input_ids) + len(req.output_ids)
            slots, nodes = self.rows.match(req, state, limit=req._compute_max_prefix_len(num_tokens))
            if state.prompt.images is not None:
                order_images(req.multimodal_inputs, state.prompt.images, state.row)
        elif (fill := fill_of(req)) is not None:
            slots, nodes = fill_rows.match(self.rows, req, fill)
        else:
            return self.plain.match_prefix(params)
        nodes.slots = slots
        return self._matched(len(slots), nodes)

    def _matched(self, num_tokens: int, node: Any, on_host: int = 0) -> MatchResult:
        return MatchResult(
            device_prefix_len=num_tokens,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            host_hit_length=on_host,
        )

    def prefix_device_indices(self, req: Any) -> Any:
        node = req.last_node
        if not isinstance(node, RowNodes):
            return self.plain.prefix_device_indices(req)
        assert node.slots is not None
        return node.slots[: req.prefix_len]

    def checkpoint(self, req: Any, *, up_to: int, **more: Any) -> None:
        state = linked(req)
        if state is not None and state.recurrent:
            table = table_of(self.req_to_token_pool)
            assert table is not None
            # Chunks computed ahead of use have no text that anybody continues, nor have probes.
            ends = req.finished() and not state.ahead and state.probe is None
            if ends and table.recurrent.knows_ends and up_to == req.kv.kv_committed_len:
                self.rows.keep_end(req, up_to, table.recurrent.save)
        elif state is not None and not state.recomputes:
            between_pieces = not req.finished() and req.inflight_middle_chunks > 0
            num_lost = 0 if self.windows is None else req.kv.get_evicted_seqlen(ComponentType.SWA)
            self.rows.publish(req, up_to, between_pieces, num_lost)
        elif state is None and fill_of(req) is None:
            self.plain.checkpoint(req, up_to=up_to, **more)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        if (linked(req) or fill_of(req)) is not None and req.kv.holds_mamba:
            self.req_to_token_pool.free_mamba_cache(req)
        if (state := linked(req)) is not None:
            state.policy.end(req, self.rows)
            if state.probe is not None:
                self.admission.end(req, done=checkpointed)
        elif (fill := fill_of(req)) is not None:
            fill_rows.end(self.rows, req, fill)
            self.admission.end(req, done=fill.published)
        else:
            self.plain.on_release(req, checkpointed=checkpointed)
            if self.supports_prefix_sharing():  # what it has put into the tree can be evicted from now on
                tokens = req.full_untruncated_fill_ids[: req.kv.cache_protected_len]
                self.room.mirror.touch(tokens, (req.extra_key, req.cache_salt), next(self._clock))

    # Nodes

    def inc_lock_ref(self, node: Any, *more: Any, **options: Any) -> IncLockRefResult:
        if isinstance(node, RowNodes):
            return IncLockRefResult(delta=self.rows.lock(node))
        return self.plain.inc_lock_ref(node, *more, **options)

    def dec_lock_ref(
        self, node: Any, params: DecLockRefParams | None = None, *more: Any, **options: Any
    ) -> DecLockRefResult:
        if isinstance(node, RowNodes):
            return DecLockRefResult(delta=self.rows.unlock(node))
        return self.plain.dec_lock_ref(node, params, *more, **options)

    def lock(self, node: Any, *more: Any, **options: Any) -> Any:
        if isinstance(node, RowNodes):
            return BasePrefixCache.lock(self, node)
        return self.plain.lock(node, *more, **options)

    def unlock(self, lock: Any) -> None:
        if lock is not None and isinstance(lock.node, RowNodes):
            BasePrefixCache.unlock(self, lock)
        else:
            self.plain.unlock(lock)

    def inc_host_lock_ref(self, node: Any) -> IncLockRefResult:
        """Rows of ours are on the device once they are matched, so there is nothing to hold on the host."""
        return IncLockRefResult() if isinstance(node, RowNodes) else self.plain.inc_host_lock_ref(node)

    def dec_host_lock_ref(self, node: Any, params: DecLockRefParams) -> DecLockRefResult:
        return DecLockRefResult() if isinstance(node, RowNodes) else self.plain.dec_host_lock_ref(node, params)

    def rotation_base_of(self, node: Any) -> int | None:
        return None if isinstance(node, RowNodes) else self.plain.rotation_base_of(node)

    def dfs_weight_order(self, node_handles: Sequence[Any]) -> list[int]:
        """Linked requests are weighed as prompts with nothing in common."""
        root = self.plain.root_node_handle()
        return self.plain.dfs_weight_order([root if isinstance(node, RowNodes) else node for node in node_handles])

    # Both trees

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict(params, self._other.evict)

    def evict_for_alloc(self, params: EvictParams, **joint: Any) -> EvictResult:
        """SGLang's callers name what is missing.  joint: for pools that several kinds of state share, unlike ours."""
        if joint:
            return self._other.make_joint_room(params, **joint)
        return self._evict(params, self._other.make_room)

    def _evict(self, params: EvictParams, giving: Giving) -> EvictResult:
        return EvictResult(*self.room.evict(amounts_wanted(params), giving))

    def evictable_size(self) -> int:
        return self.plain.evictable_size() + self.tree.num_evictable

    def protected_size(self) -> int:
        return self.plain.protected_size() + self.tree.num_locked

    def full_evictable_size(self) -> int:
        return self.plain.full_evictable_size() + self.tree.num_evictable

    def full_protected_size(self) -> int:
        return self.plain.full_protected_size() + self.tree.num_locked

    def swa_evictable_size(self) -> int:
        return self.plain.swa_evictable_size() + (0 if self.windows is None else self.windows.num_evictable)

    def swa_protected_size(self) -> int:
        return self.plain.swa_protected_size() + (0 if self.windows is None else self.windows.num_locked)

    def available_and_evictable_str(self) -> str:
        own = f"Of linked requests: {self.tree.num_evictable} evictable, {self.tree.num_locked} locked tokens\n"
        return self.plain.available_and_evictable_str() + own

    def reset(self) -> None:
        if self.tiers is not None:
            self.tiers.stop()
        self.plain.reset()
        self.room.mirror.reset()
        self.tree.reset()  # with its parts
        if not self.rows.shares_pool:
            self.rows.store.tree.reset()
            self.rows.store.device.clear()
        self.rows.store.reset()
        if self.admission is not None:
            self.admission.reset()

    def take_events(self) -> list[Any]:
        events = self.plain.take_events()
        return events if self.events is None else self.events.merge(events)

    # Tiers below the device

    def check_hicache_events(self) -> None:
        if self.plain.cache_controller is not None or self.plain.linker is not None:
            self.plain.check_hicache_events()
        if self.tiers is not None:
            self.tiers.poll()

    @property
    def is_copying(self) -> bool:
        """Whether chunks are being copied between device and host."""
        return self.tiers is not None and self.tiers.is_copying

    @property
    def token_to_kv_pool_host(self) -> Any:
        """All host memory, which only SGLang's metrics ask for here."""
        plain = getattr(self.plain, "token_to_kv_pool_host", None) or getattr(self.plain, "full_kv_pool_host", None)
        return plain if self.tiers is None else HostMemories(plain, self.tiers.host.memory.slots)

    def attach_storage_backend(self, *_args: Any, **_kwargs: Any) -> tuple[bool, str]:
        return False, "sglang-lazy connects storage at the start alone: --hicache-storage-backend"

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Use storage no more; returns whether that succeeded, and a message, as SGLang does. No request may run."""
        if self.tiers is None or self.tiers.storage is None:
            return True, "there was no storage"
        self.tiers.detach()
        return True, "chunks are neither stored nor fetched until the server is started again"

    def clear_storage_backend(self) -> bool:
        """Delete all that is in storage; returns whether that succeeded on all tensor-parallel ranks."""
        return self.tiers is not None and self.tiers.storage is not None and self.tiers.storage.clear()


def order_images(inputs: Any, images: Images, row: Row) -> None:
    """Set the offsets and order of the images in SGLang's `inputs` of a request to those in its row, by which SGLang
    finds them. Each image is contiguous in the row, see `RowCache`."""
    places = np.argsort(row.positions)
    for item, (start, end) in zip(images.items, images.ranges, strict=True):
        item.offsets = [(int(places[start]), int(places[end - 1]))]
    inputs.mm_items.sort(key=lambda item: item.offsets[0])
