"""Copies between device and host beside forward passes, on streams of their own, and when they have ended."""

from collections.abc import Sequence
from typing import Any

import torch

from sglang_lazy.cache.host_memory import Copier, CpuCopier, GpuCopier, HostMemory, Piece
from sglang_lazy.cache.numbers import Numbers


class Ticket:
    """A copy under way. Keeps what it reads, so it must itself be kept until the copy has ended."""

    def __init__(self, event: Any, *kept: Any):
        self._event, self._kept = event, kept

    @property
    def done(self) -> bool:
        """Whether the copy has ended; waits for nothing."""
        return self._event.query()

    def finish(self) -> None:
        """Wait until the copy has ended."""
        self._event.synchronize()


class Transfers:
    """Copies of slots of a `HostMemory`.

    streams: the device's module of PyTorch, with streams and events; `copies` likewise. By default those of the
        memory's device.

    forward_stream: the stream of forward passes; None if there is none.
    """

    forward_stream: Any = None

    def __init__(self, memory: HostMemory, copies: Copier | None = None, streams: Any = None):
        on_gpu = memory.device.type == "cuda"
        self._copies: Copier = copies or (GpuCopier(memory) if on_gpu else CpuCopier(memory))
        self._streams = streams or torch.get_device_module(memory.device)
        self._load_stream, self._back_up_stream = self._streams.Stream(), self._streams.Stream()
        self._loaded = [self._streams.Event() for _ in range(memory.num_layers)]
        self._last_load: Ticket | None = None

    def numbers(self, slots: torch.Tensor) -> Numbers:
        """Begin to read slots of the device, [n] int64, which the current stream has made."""
        values = torch.empty(len(slots), dtype=torch.int64, pin_memory=slots.is_cuda)
        values.copy_(slots, non_blocking=True)
        event = self._streams.Event()
        event.record()
        return Numbers(values, event)

    def back_up(self, pieces: Sequence[Piece]) -> Ticket:
        """Copy slots of the device to the host, once all passes launched so far have ended: what is copied may have
        been published ahead of its computation. Neither side may change before the ticket is done."""
        plan = self._begin(self._back_up_stream, pieces)
        with self._streams.stream(self._back_up_stream):
            self._copies.back_up(plan)
            return self._ticket(plan, pieces)

    def load(self, pieces: Sequence[Piece]) -> Ticket:
        """Copy slots of the host to the device, layer by layer, once all passes launched so far have ended: a decode
        step still writes a last token for each request that has ended, into a slot that is free by now.

        Passes launched later may read a layer after `wait`.
        """
        plan = self._begin(self._load_stream, pieces)
        with self._streams.stream(self._load_stream):
            for layer, loaded in enumerate(self._loaded):
                self._copies.load(plan, layer)
                loaded.record()
            self._last_load = self._ticket(plan, pieces)
        return self._last_load

    def wait(self, layer: int) -> None:
        """Make the current stream wait until all loads begun so far have loaded this layer.

        One event per layer suffices for any number of loads: a stream waits for the record that is the last when it is
        told to, and loads follow each other on one stream.
        """
        if self._last_load is None:
            return
        if self._last_load.done:
            self._last_load = None
        else:
            self._streams.current_stream().wait_event(self._loaded[layer])

    def wait_all(self) -> None:
        """The same for all layers: for passes that cannot wait between them, as those of CUDA graphs."""
        self.wait(len(self._loaded) - 1)

    def _begin(self, stream: Any, pieces: Sequence[Piece]) -> Any:
        stream.wait_stream(self._streams.current_stream())  # which has made these slots
        if self.forward_stream is not None:
            stream.wait_stream(self.forward_stream)
        with self._streams.stream(stream):
            return self._copies.plan(pieces)

    def _ticket(self, *kept: Any) -> Ticket:
        event = self._streams.Event()
        event.record()
        return Ticket(event, *kept)
