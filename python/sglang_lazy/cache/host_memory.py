"""Host memory for copies of what the slots of a device's pools hold, and the copying itself.

A pool is given as the buffers of its layers, of any shapes: keys and values [slots, heads, dim], one latent buffer
[slots, dim], or others whose first dimension counts slots. Bytes are copied as they are.

The host's layout is the device's, layer first: [buffers, slots, row]. So a run of slots is a run of memory on both
sides, however many tokens it has, and one command of a copy engine moves it. With all layers of a token together each
row of each layer would be a copy of its own. Storage gathers rows from it in one call (`Rows.table`).
"""

import importlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sgl_kernel_lazy import copy_engine
from sglang_lazy.cache.host_slots import HostSlots, runs
from sglang_lazy.cache.turns import Turns

LOAD_BLOCKS, BACK_UP_BLOCKS = 2, 1
"""Thread blocks that copy scattered slots. Each occupies an SM that concurrent passes could use. Requests wait for
loads; only eviction may wait for copies to the host."""
MIN_RUN_BYTES = 1 << 17
"""Of a buffer: shorter runs are copied with the scattered slots, since a copy engine takes a while to begin. Like the
numbers of blocks, chosen on an H200 with `benchmark.serving.tier_copies`."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Rows(NamedTuple):
    """The buffers of one row size.

    row_bytes: bytes of a slot in one buffer.
    host: [buffers, slots, row_bytes] uint8; first the first buffer of every layer, then the second ones.
    device: for each, [slots, row_bytes] uint8, a view.
    layers: for each, the number of its layer.
    """

    row_bytes: int
    host: torch.Tensor
    device: list[torch.Tensor]
    layers: list[int]

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """The host's memory as one row of bytes for each buffer and slot, [buffers * slots], and where each buffer
        begins there, [buffers, 1] int64: `table[starts + slots]` gathers a whole object in one call."""
        num_buffers, num_slots, _ = self.host.shape
        rows = self.host.numpy().view(f"V{self.row_bytes}").reshape(num_buffers * num_slots)
        return rows, np.arange(0, len(rows), num_slots)[:, None]


class HostMemory:
    """Slots of the host for a device's pool.

    layers: the device's buffers of each layer, none for some, contiguous, all on one device and with as many slots.
    num_slots: of the host.

    slots: which of them are free.  groups: the buffers by row size.  token_bytes: of a token in all buffers.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], num_slots: int):
        self.num_layers = len(layers)
        self.device = next(buffer.device for buffers in layers for buffer in buffers)
        self.slots = HostSlots(num_slots)
        of_size: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        for layer, buffers in enumerate(layers):
            for place, buffer in enumerate(buffers):
                if not buffer.is_contiguous() or buffer.device != self.device:
                    raise ValueError(f"layers[{layer}][{place}]: expected a contiguous buffer on {self.device}")
                rows = buffer.reshape(len(buffer), -1).view(torch.uint8)
                of_size.setdefault(rows.shape[1], []).append((place, layer, rows))
        self.groups = []
        for row_bytes, found in of_size.items():
            found.sort(key=lambda each: each[:2])
            host = _new_memory((len(found), num_slots, row_bytes), pinned=self.device.type == "cuda")
            self.groups.append(Rows(row_bytes, host, [rows for *_, rows in found], [layer for _, layer, _ in found]))
        self.token_bytes = sum(rows.row_bytes * len(rows.device) for rows in self.groups)


def _new_memory(shape: tuple[int, ...], pinned: bool) -> torch.Tensor:
    """PyTorch's own pinned memory comes in powers of two, which would waste up to half of it."""
    memory = torch.empty(shape, dtype=torch.uint8)
    if pinned and memory.numel():
        runtime = torch.cuda.cudart()
        if error := int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
            raise RuntimeError(f"{memory.numel() / 1e9:.1f} GB of host memory cannot be pinned: CUDA error {error}")
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


class Piece(NamedTuple):
    """Slots to be copied.

    host: [n] int64 on the CPU.  device: [n] int64, of the device's pool, on the device.
    known: `device` on the CPU; None if reading it would take waiting for the device. Runs are found in it.
    """

    host: torch.Tensor
    device: torch.Tensor
    known: torch.Tensor | None


class Copier(Protocol):
    """Copies between a `HostMemory` and its device, on the current stream."""

    def plan(self, pieces: Sequence[Piece]) -> Any:
        """What the copies of these slots need; it must be kept until they have ended."""

    def load(self, plan: Any, layer: int) -> None:
        """Copy one layer to the device."""

    def back_up(self, plan: Any) -> None:
        """Copy all layers to the host."""


class CpuCopier:
    """For a CPU as the device."""

    def __init__(self, memory: HostMemory):
        self._pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # layer, host's rows, device's rows
        for rows in memory.groups:
            word = _WORDS[next(size for size in _WORDS if rows.row_bytes % size == 0)]
            for layer, host, device in zip(rows.layers, rows.host, rows.device, strict=True):
                self._pairs.append((layer, host.view(word), device.view(word)))

    def plan(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([piece.host for piece in pieces]), torch.cat([piece.device for piece in pieces])

    def load(self, plan: tuple[torch.Tensor, torch.Tensor], layer: int) -> None:
        for own_layer, host, device in self._pairs:
            if own_layer == layer:
                _copy(host, plan[0], device, plan[1])

    def back_up(self, plan: tuple[torch.Tensor, torch.Tensor]) -> None:
        for _, host, device in self._pairs:
            _copy(device, plan[1], host, plan[0])


def _copy(source: torch.Tensor, source_slots: torch.Tensor, target: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Indexing would start PyTorch's threads however few the slots are, twice for each layer; on a busy machine that
    takes longer than prefill."""
    target.index_copy_(0, target_slots, source.index_select(0, source_slots))


class _Plan(NamedTuple):
    """of_groups: for each group the host's addresses, the device's addresses and the sizes of its runs, [buffers, runs]
    int64 each, buffers by layer.  host, device: the scattered slots, int64 on the device."""

    of_groups: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    host: torch.Tensor
    device: torch.Tensor


class _Buffers(NamedTuple):
    """The addresses of a group's buffers, by layer.

    bounds: [layers + 1], where each layer's begin.  host, device: [buffers, 1] int64.  tables: both, [buffers] int64 on
    the device.
    """

    row_bytes: int
    bounds: list[int]
    host: np.ndarray
    device: np.ndarray
    tables: tuple[torch.Tensor, torch.Tensor]


class GpuCopier:
    """For a GPU: runs by its copy engines, which hold no SMs, other slots by a kernel of few thread blocks.

    streams: the device's module of PyTorch, with streams and events.
    """

    def __init__(self, memory: HostMemory, streams: Any = torch.cuda):
        # Imported where there is a GPU only: Triton takes a while.
        self._copy_rows = importlib.import_module("sgl_kernel_lazy.triton.copy_rows").copy_rows
        self._device, self._num_layers = memory.device, memory.num_layers
        self._streams, self._turns = streams, Turns(streams)
        self._buffers = [self._addresses(rows) for rows in memory.groups]
        widest = max(rows.row_bytes for rows in memory.groups)
        self._min_run = -(-MIN_RUN_BYTES // widest) if copy_engine.available() else None
        # Nobody has slots of the host yet. What is compiled later keeps requests waiting.
        first = torch.zeros(1, dtype=torch.int64)
        self.back_up(self.plan([Piece(first, first.to(self._device), None)]))

    def _addresses(self, rows: Rows) -> _Buffers:
        order = sorted(range(len(rows.layers)), key=lambda i: (rows.layers[i], i))
        host = np.array([rows.host[i].data_ptr() for i in order])
        device = np.array([rows.device[i].data_ptr() for i in order])
        layers = [rows.layers[i] for i in order]
        bounds = np.searchsorted(layers, np.arange(self._num_layers + 1)).tolist()
        tables = tuple(torch.from_numpy(each).to(self._device) for each in (host, device))
        return _Buffers(rows.row_bytes, bounds, host[:, None], device[:, None], tables)

    def plan(self, pieces: Sequence[Piece]) -> _Plan:
        known, unknown = ([piece for piece in pieces if (piece.known is None) == late] for late in (False, True))
        nothing = torch.empty(0, dtype=torch.int64)
        here = torch.cat([nothing, *(piece.host for piece in known)]).numpy()
        there = torch.cat([nothing, *(piece.known for piece in known)]).numpy()
        starts, lengths = runs(here, there)
        long = lengths >= self._min_run if self._min_run is not None else np.zeros(len(lengths), dtype=bool)
        scattered = np.flatnonzero(np.repeat(~long, lengths))
        starts, lengths = starts[long], lengths[long]
        at_host = torch.cat([torch.from_numpy(here[scattered]), *(piece.host for piece in unknown)])
        at_device = [self._upload(torch.from_numpy(there[scattered])), *(piece.device for piece in unknown)]
        of_groups = []
        for buffers in self._buffers:
            addresses = (
                base + each[starts] * buffers.row_bytes
                for base, each in ((buffers.host, here), (buffers.device, there))
            )
            sizes = np.broadcast_to(lengths * buffers.row_bytes, (len(buffers.host), len(lengths)))
            of_groups.append((*addresses, sizes))
        return _Plan(of_groups, self._upload(at_host), torch.cat(at_device))

    def _upload(self, slots: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda" and len(slots):
            slots = slots.pin_memory()
        return slots.to(self._device, non_blocking=True)

    def load(self, plan: _Plan, layer: int) -> None:
        stream = self._streams.current_stream().cuda_stream
        for buffers, (host, device, sizes) in zip(self._buffers, plan.of_groups, strict=True):
            part = slice(buffers.bounds[layer], buffers.bounds[layer + 1])
            copy_engine.copy_runs(host[part].ravel(), device[part].ravel(), sizes[part].ravel(), stream)
            tables = [table[part] for table in buffers.tables]
            self._copy_rows(*tables, plan.host, plan.device, buffers.row_bytes, LOAD_BLOCKS)

    def back_up(self, plan: _Plan) -> None:
        for buffers, (host, device, sizes) in zip(self._buffers, plan.of_groups, strict=True):
            self._turns.copy_runs(device.ravel(), host.ravel(), sizes.ravel())
            there, here = buffers.tables[1], buffers.tables[0]
            self._copy_rows(there, here, plan.device, plan.host, buffers.row_bytes, BACK_UP_BLOCKS)
