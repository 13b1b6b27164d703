"""The tiers below the device: chunks in host memory and, below it, in storage."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sglang_lazy.cache.host import HostKV
from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.cache.host_states import HostStates
from sglang_lazy.cache.node import Order
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.storage.chunk_storage import ChunkStorage
from sglang_lazy.storage.report import HostReport

Layers = Sequence[Sequence[torch.Tensor]]
"""The buffers of each layer, each [slots, ...]; none for layers without."""


class HostSize(NamedTuple):
    """How much the host keeps: so many bytes; if 0, `ratio` times as many slots as the device."""

    num_bytes: float
    ratio: float

    def num_slots(self, layers: Layers, device_size: int, state_bytes: float) -> int:
        """state_bytes: of states, for each slot of KV."""
        if not self.num_bytes:
            return int(self.ratio * device_size)
        token_bytes = sum(buffer[0].nbytes for layer in layers for buffer in layer)
        return int(self.num_bytes / (token_bytes + state_bytes))


class Tiers:
    """The host tier of a chunk store, and storage below it.

    host, transfers: the host tier, and its copies.  report: what it counts.
    storage: None without.
    """

    def __init__(
        self,
        store: ChunkStore,
        layers: Layers,
        order: Order,
        size: HostSize,
        min_hits: int,
        agree: Callable[[list[int]], list[int]],
        report: HostReport,
    ):
        """Attach a host tier to `store`. Of states, if it has any, the host has as many for its KV as the device.

        layers: of the device's KV: the model's, and after these a draft's.
        order: of eviction.  min_hits: how often a chunk must have been used to be copied to the host.
        agree: returns the smallest of each of some numbers among all ranks, which all call it.
        """
        states, on_device = None, store.states
        state_bytes = 0.0 if on_device is None else on_device.pool.slot_bytes * on_device.pool.size / store.device.size
        memory = HostMemory(layers, size.num_slots(layers, store.device.size, state_bytes))
        if on_device is not None:
            num_states = max(1, memory.slots.size * on_device.pool.size // store.device.size)
            states = HostStates(on_device, HostMemory(on_device.pool.layers, num_states))
        self.agree = agree
        self.report = report
        self.transfers = Transfers(memory, states=None if states is None else states.memory)
        self.host = store.host = HostKV(
            store.tree,
            store.device,
            memory,
            self.transfers,
            order,
            min_hits=min_hits,
            agree=self.agree,
            watchers=[report],
            states=states,
        )
        store.tree.parts += (self.host,)
        self._store = store
        self.storage: ChunkStorage | None = None

    def connect(self, storage: ChunkStorage) -> None:
        """Use storage below the host."""
        self.storage = self._store.storage = storage
        self.host.watchers.append(storage)

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


def smallest_among(group: Any) -> Callable[[list[int]], list[int]]:
    """A function that returns the smallest of each of some numbers among the processes of a group, which all call it.

    group: of torch.distributed; None for this process alone.
    """

    def agree(numbers: list[int]) -> list[int]:
        if group is None or torch.distributed.get_world_size(group) == 1:
            return numbers
        smallest = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=group)
        return smallest.tolist()

    return agree
