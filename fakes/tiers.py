"""Host memory and storage that remember what was copied into them."""

from typing import Any, ClassVar

import numpy as np
import torch

from fakes.late_copies import LateCopier
from fakes.slots import NOT_COMPUTED
from fakes.storage import Storage
from fakes.streams import current_stream
from sglang_lazy.cache import host_slots
from sglang_lazy.cache.host_memory import CpuCopier, HostMemory
from sglang_lazy.storage.calls import Calls
from sglang_lazy.storage.chunk_objects import ChunkObjects, Gate


class HostSlots(host_slots.HostSlots):
    """The slots of the host, with what was copied into each since its allocation."""

    def clear(self) -> None:
        super().clear()
        self.contents: dict[int, Any] = {}

    def alloc(self, count: int) -> torch.Tensor | None:
        slots = super().alloc(count)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
        return slots

    def free(self, slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            del self.contents[slot]
        super().free(slots)


class RecordingCopier(LateCopier):
    """Late copies, with what they copy.  device: the allocator of the device's slots, which records the same."""

    def __init__(self, memory: HostMemory, device: Any):
        super().__init__(CpuCopier(memory), memory)
        self._device, self._last_layer = device, memory.num_layers - 1

    def back_up(self, plan: tuple) -> None:
        pairs = list(zip(plan[1].tolist(), plan[2].tolist(), strict=True))
        copied = [self._device.contents[slot] for _, slot in pairs]
        assert NOT_COMPUTED not in copied, "copied to the host before it is computed"
        current_stream().do(lambda: self._backed_up(pairs, copied))
        super().back_up(plan)

    def _backed_up(self, pairs: list[tuple[int, int]], copied: list) -> None:
        assert [self._device.contents[slot] for _, slot in pairs] == copied, "changed while it is copied"
        contents = self._memory.slots.contents
        contents.update((host_slot, content) for (host_slot, _), content in zip(pairs, copied, strict=True))

    def load(self, plan: tuple, layer: int) -> None:
        pairs = list(zip(plan[1].tolist(), plan[2].tolist(), strict=True))
        if layer == 0:
            for _, slot in pairs:
                assert slot in self._device.contents, "loaded to a free slot"
                self._device.contents[slot] = NOT_COMPUTED  # it may be that of an evicted node, which nobody has freed
        if layer == self._last_layer:
            current_stream().do(lambda: self._loaded(pairs))
        super().load(plan, layer)

    def _loaded(self, pairs: list[tuple[int, int]]) -> None:
        contents = self._memory.slots.contents
        for host_slot, slot in pairs:
            assert contents[host_slot] != NOT_COMPUTED, "loaded before it is on the host"
            self._device.compute(slot, contents[host_slot])


class RecordingObjects(ChunkObjects):
    """Stored chunks, with what was computed into them. Other KV than was written by a name counts as not computed."""

    written_as: ClassVar[dict[tuple[bytes, int], tuple[bytes, list]]] = {}

    def __init__(self, backend: Any, memory: HostMemory, states: HostMemory | None = None):
        super().__init__(backend, memory, states)
        self._memory = memory

    def start_write(self, name: bytes, slots: torch.Tensor, state: torch.Tensor | None, what: Any) -> None:
        assert NOT_COMPUTED not in self._contents(slots.numpy()), "stored before it is computed"
        super().start_write(name, slots, state, what)

    def _write(self, gate: Gate, name: bytes, index: int, tables: Any, slots: np.ndarray) -> bool:
        with gate.passed() as allowed:
            if allowed and tables is self._tables:
                self.written_as[name, index] = self._kv(slots), self._contents(slots)
        return super()._write(gate, name, index, tables, slots)

    def _read(self, gate: Gate, name: bytes, index: int, tables: Any, slots: np.ndarray) -> bool:
        found = super()._read(gate, name, index, tables, slots)
        with gate.passed() as allowed:
            if found and allowed and tables is self._tables:
                kv, contents = self.written_as[name, index]
                if kv == self._kv(slots):
                    self._memory.slots.contents.update(zip(slots.tolist(), contents, strict=True))
        return found

    def _kv(self, slots: np.ndarray) -> bytes:
        return b"".join(rows[starts + slots].tobytes() for rows, starts in self._tables)

    def _contents(self, slots: np.ndarray) -> list:
        return [self._memory.slots.contents[slot] for slot in slots.tolist()]


class OnDemand(Calls):
    """Without threads: calls are made when somebody asks for results, unless storage hangs."""

    def __init__(self, storage: Storage):
        super().__init__(num_threads=0)
        self._storage = storage

    @property
    def num_ended(self) -> int:
        self._make_calls()
        return super().num_ended

    def settle(self, patience: float) -> bool:
        self._make_calls()
        return super().settle(patience)

    def _make_calls(self) -> None:
        while self._storage.open.is_set() and self._queue:
            self._make(*self._begin())


class ObjectsOnDemand(RecordingObjects):
    """Chunks stored by no thread, so that a history can be repeated."""

    def _new_calls(self, num_threads: int) -> OnDemand:
        return OnDemand(self.backend.backend)
