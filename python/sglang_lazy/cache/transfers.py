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
    states: memory for states of recurrent layers, if the host has any; `state_copies` like `copies`.

    forward_stream: the stream of forward passes; None if there is none.
    """

    forward_stream: Any = None

    def __init__(
        self,
        memory: HostMemory,
        copies: Copier | None = None,
        streams: Any = None,
        states: HostMemory | None = None,
        state_copies: Copier | None = None,
    ):
        self._copies = copies or _copier(memory)
        self._states = states
        if states is not None:
            self._state_copies = state_copies or _copier(states)
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

    def back_up(self, pieces: Sequence[Piece], states: Sequence[Piece] = ()) -> Ticket:
        """Copy slots of the device to the host, once all passes launched so far have ended: what is copied may have
        been published ahead of its computation. Neither side may change before the ticket is done."""
        self._follow(self._back_up_stream)
        with self._streams.stream(self._back_up_stream):
            plan = self._copies.plan(pieces) if pieces else None
            state_plan = self._state_copies.plan(states) if states else None
            if pieces:
                self._copies.back_up(plan)
            if states:
                self._state_copies.back_up(state_plan)
            return self._ticket(plan, state_plan, pieces, states)

    def load(self, pieces: Sequence[Piece], states: Sequence[Piece] = ()) -> Ticket:
        """Copy slots of the host to the device, layer by layer, once all passes launched so far have ended: a decode
        step still writes a last token for each request that has ended, into a slot that is free by now.

        Passes launched later may read a layer after `wait`, and states after `wait` for any layer: they come first.
        """
        self._follow(self._load_stream)
        with self._streams.stream(self._load_stream):
            plan = self._copies.plan(pieces)
            state_plan = self._state_copies.plan(states) if states else None
            if states and self._states is not None:
                for layer in range(self._states.num_layers):
                    self._state_copies.load(state_plan, layer)
            for layer, loaded in enumerate(self._loaded):
                self._copies.load(plan, layer)
                loaded.record()
            self._last_load = self._ticket(plan, state_plan, pieces, states)
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

    def _follow(self, stream: Any) -> None:
        """Have `stream` wait for all passes launched so far."""
        stream.wait_stream(self._streams.current_stream())  # which has made these slots
        if self.forward_stream is not None:
            stream.wait_stream(self.forward_stream)

    def _ticket(self, *kept: Any) -> Ticket:
        event = self._streams.Event()
        event.record()
        return Ticket(event, *kept)


def _copier(memory: HostMemory) -> Copier:
    return GpuCopier(memory) if memory.device.type == "cuda" else CpuCopier(memory)
