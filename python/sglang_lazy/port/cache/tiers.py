"""The tiers below the device: chunks in host memory and, below it, in storage."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.runtime_context import get_memory

from sglang_lazy.cache.host import HostKV
from sglang_lazy.cache.host_copy import Watchers
from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.cache.host_slots import HostSlots
from sglang_lazy.cache.host_states import HostStates
from sglang_lazy.cache.node import Order
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.recurrent.pool import StatePool
from sglang_lazy.storage.chunk_storage import ChunkStorage
from sglang_lazy.storage.report import HostReport

_MIN_HITS = {"write_through": 0, "write_through_selective": 2}
"""By SGLang's names: how often a chunk must have been used to be copied to the host."""


class Tiers:
    """The host tier of a chunk store, and storage below it.

    host, transfers: the host tier, and its copies.  report: what it counts.
    storage: None without.
    watchers: told of what happens on the host.
    """

    def __init__(
        self,
        store: ChunkStore,
        pools: Sequence[Any],
        order: Order,
        share: float,
        params: Any,
        report: HostReport,
        states_pool: StatePool | None = None,
    ):
        """Attach a host tier to `store`.

        pools: SGLang's of the device: the model's, and that of a draft, whose layers are loaded after the model's.
        order: of eviction.  share: of the host memory that SGLang's flags give.  params: SGLang's, of a cache.
        states_pool: of states; the host has as many of them for its KV as the device.
        """
        layers = [layer for pool in pools for layer in _buffers(pool)]
        states, state_bytes = None, 0.0  # of states, for each slot of KV
        if store.states is not None and states_pool is not None:
            state_bytes = states_pool.slot_bytes * states_pool.size / store.device.size
        memory = HostMemory(layers, _num_slots(layers, store.device.size, share, state_bytes))
        if store.states is not None and states_pool is not None:
            num_states = max(1, memory.slots.size * states_pool.size // store.device.size)
            states = HostStates(store.states, HostMemory(states_pool.layers, num_states))
        self.agree = smallest_among(params)
        self.report, self.watchers = report, Watchers(report)
        self.transfers = Transfers(memory, states=None if states is None else states.memory)
        self.host = store.host = HostKV(
            store.tree,
            store.device,
            memory,
            self.transfers,
            order,
            min_hits=_MIN_HITS[get_memory().hicache_write_policy],
            agree=self.agree,
            watcher=self.watchers,
            states=states,
        )
        store.tree.parts += (self.host,)
        self._store = store
        self.storage: ChunkStorage | None = None

    def connect(self, storage: ChunkStorage) -> None:
        """Use storage below the host."""
        self.storage = self._store.storage = storage
        self.watchers.each.append(storage)

    def detach(self) -> None:
        """Use storage no more. No request may run."""
        if self.storage is not None:
            self.storage.detach()

    @property
    def is_copying(self) -> bool:
        """Whether anything is being copied between device and host."""
        return self.host.is_copying

    def poll(self) -> None:
        """Take note of what has ended, on all ranks alike; once a step."""
        self.host.poll()
        if self.storage is not None:
            self.storage.poll()

    def finish(self) -> None:
        """Wait for all copies between device and host."""
        self.host.finish()

    def stop(self) -> None:
        """End what is under way in storage: the tree is emptied next."""
        if self.storage is not None:
            self.storage.reset()

    def numbers(self) -> dict[str, dict[str, int]]:
        """What the tiers count, as the server's state reports it."""
        numbers = {"lazy_host": self.report.numbers()}
        if self.storage is not None:
            numbers["lazy_storage"] = self.storage.report.numbers()
        return numbers


class HostMemories(NamedTuple):
    """Host memory as SGLang's metrics count it, in tokens: that of SGLang's cache, None without, and ours."""

    plain: Any
    own: HostSlots

    @property
    def logical_size(self) -> int:
        return self.own.size + (0 if self.plain is None else self.plain.logical_size)

    def available_size(self) -> int:
        return self.own.num_free + (0 if self.plain is None else self.plain.available_size())


def _buffers(kv: Any) -> list[Sequence[torch.Tensor]]:
    """The buffers of each layer of SGLang's pool; none for layers without KV."""
    if isinstance(kv, HybridLinearKVPool):
        with_kv = kv.full_attention_layer_id_mapping
        return [kv.get_kv_buffer(layer) if layer in with_kv else () for layer in range(max(with_kv) + 1)]
    return [kv.get_kv_buffer(layer) for layer in range(kv.start_layer, kv.start_layer + kv.layer_num)]


def _num_slots(layers: Any, device_size: int, share: float, state_bytes: float) -> int:
    flags = get_memory()
    if flags.hicache_size:
        token_bytes = sum(buffer[0].nbytes for layer in layers for buffer in layer)
        return int(flags.hicache_size * 1e9 * share / (token_bytes + state_bytes))
    return int(flags.hicache_ratio * device_size * share)


def smallest_among(params: Any) -> Callable[[list[int]], list[int]]:
    """A function that returns the smallest of each of some numbers among all tensor-parallel ranks, which all call it.

    params: SGLang's, of a cache.
    """
    groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
    groups = [group for group in groups if group is not None and torch.distributed.get_world_size(group) > 1]
    if not groups and params.tp_cache_group is not None and torch.distributed.get_world_size(params.tp_cache_group) > 1:
        groups = [params.tp_cache_group]

    def agree(numbers: list[int]) -> list[int]:
        if not groups:
            return numbers
        smallest = torch.tensor(numbers, dtype=torch.int64)
        for group in groups:
            torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=group)
        return smallest.tolist()

    return agree
