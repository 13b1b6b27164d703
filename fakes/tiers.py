"""Host memory and storage that remember what was copied into them."""

from typing import Any, ClassVar

import numpy as np
import torch

from fakes.slots import NOT_COMPUTED
from fakes.storage import Storage
from fakes.streams import LatePool, current_stream
from sglang_lazy.port.cache.calls import Calls
from sglang_lazy.port.cache.chunk_objects import ChunkObjects, Gate


class HostSlots(LatePool):
    """The host's memory, with what was copied into each slot."""

    def clear(self) -> None:
        super().clear()
        self.contents: dict[int, Any] = {}

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
        return slots

    def free(self, indices: torch.Tensor) -> int:
        for slot in indices.tolist():
            del self.contents[slot]
        return super().free(indices)

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend) -> None:
        pairs = list(zip(host_indices.tolist(), device_indices.tolist(), strict=True))
        copied = [device_pool.slots.contents[slot] for _, slot in pairs]
        assert NOT_COMPUTED not in copied, "copied to the host before it is computed"
        current_stream().do(lambda: self._back_up(device_pool, pairs, copied))
        super().backup_from_device_all_layer(device_pool, host_indices, device_indices, io_backend)

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend) -> None:
        if layer_id == self.layer_num - 1:
            pairs = list(zip(host_indices.tolist(), device_indices.tolist(), strict=True))
            current_stream().do(lambda: self._load(device_pool, pairs))
        super().load_to_device_per_layer(device_pool, host_indices, device_indices, layer_id, io_backend)

    def _back_up(self, device_pool, pairs, copied) -> None:
        assert [device_pool.slots.contents[slot] for _, slot in pairs] == copied, "changed while it is copied"
        self.contents.update((host_slot, content) for (host_slot, _), content in zip(pairs, copied, strict=True))

    def _load(self, device_pool, pairs) -> None:
        for host_slot, slot in pairs:
            assert self.contents[host_slot] != NOT_COMPUTED, "loaded before it is on the host"
            device_pool.slots.compute(slot, self.contents[host_slot])


class RecordingObjects(ChunkObjects):
    """Stored chunks, with what was computed into them. Other KV than was written by a name counts as not computed."""

    written_as: ClassVar[dict[tuple[bytes, int], tuple[bytes, list]]] = {}

    def start_write(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        assert NOT_COMPUTED not in self._contents(slots.numpy()), "stored before it is computed"
        super().start_write(name, slots, what)

    def _write(self, gate: Gate, name: bytes, index: int, slots: np.ndarray) -> bool:
        with gate.passed() as allowed:
            if allowed:
                self.written_as[name, index] = self._kv(slots), self._contents(slots)
        return super()._write(gate, name, index, slots)

    def _read(self, gate: Gate, name: bytes, index: int, slots: np.ndarray) -> bool:
        found = super()._read(gate, name, index, slots)
        with gate.passed() as allowed:
            if found and allowed:
                kv, contents = self.written_as[name, index]
                if kv == self._kv(slots):
                    self.pool.contents.update(zip(slots.tolist(), contents, strict=True))
        return found

    def _kv(self, slots: np.ndarray) -> bytes:
        return self._rows[self._starts + slots].tobytes()

    def _contents(self, slots: np.ndarray) -> list:
        return [self.pool.contents[slot] for slot in slots.tolist()]


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
