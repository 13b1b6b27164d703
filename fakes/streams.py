"""CPU streams whose transfers happen as late as a GPU allows: queued work runs when something waits for it."""

import collections
import contextlib
import multiprocessing
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from sglang.srt.managers import cache_controller

from sglang_lazy.port.cache.host_pool import CpuHostPool


class Stream:
    """A queue of work, in order. The main stream runs everything at once."""

    def __init__(self):
        self.queued: collections.deque[Callable[[], None]] = collections.deque()

    def do(self, work: Callable[[], None]) -> None:
        if self is MAIN:
            work()
        else:
            self.queued.append(work)

    def advance(self) -> None:
        self.queued.popleft()()

    def wait_event(self, event: "Event") -> None:
        self.do(event.synchronize)

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for: `stream` is that of forward passes, which a CPU runs at once."""


MAIN = Stream()
_current = MAIN


class Event:
    """A query that finds it pending runs one step of its stream, so work that nobody waits for completes in time."""

    def __init__(self):
        self._stream, self._num_to_come = MAIN, 0  # records; the last one counts

    def record(self) -> None:
        self._stream = _current
        self._num_to_come += 1
        _current.do(self._come)

    def _come(self) -> None:
        self._num_to_come -= 1

    @property
    def _done(self) -> bool:
        return not self._num_to_come

    def query(self) -> bool:
        if not self._done:
            self._stream.advance()
        return self._done

    def synchronize(self) -> None:
        while not self._done:
            self._stream.advance()

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


@contextlib.contextmanager
def stream(entered: Stream) -> Iterator[None]:
    global _current
    before, _current = _current, entered
    try:
        yield
    finally:
        _current = before


def current_stream() -> Stream:
    return _current


class LatePool(CpuHostPool):
    """A host pool whose transfers are queued on the current stream. Until they are done, their targets are NaN."""

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend) -> None:
        _poison((device_pool.k_buffer[layer_id], device_pool.v_buffer[layer_id]), device_indices)
        load = super().load_to_device_per_layer
        _current.do(lambda: load(device_pool, host_indices, device_indices, layer_id, io_backend))

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend) -> None:
        _poison((*self.k_data_refs, *self.v_data_refs), host_indices)
        back_up = super().backup_from_device_all_layer
        _current.do(lambda: back_up(device_pool, host_indices, device_indices, io_backend))


def _poison(layers: tuple[torch.Tensor, ...], slots: torch.Tensor) -> None:
    for layer in layers:
        layer[slots] = float("nan") if layer.is_floating_point() else 0x7F  # a NaN in both fp8 formats, kept as bytes


def late_transfers() -> contextlib.AbstractContextManager:
    """Make SGLang's cache controllers use these streams."""
    stand_in = types.SimpleNamespace(
        Stream=Stream, Event=Event, stream=stream, current_stream=current_stream, __name__="fakes.streams"
    )
    return mock.patch.object(cache_controller, "device_module", stand_in)


def load() -> None:
    """The SGLang plugin: late transfers in each process that SGLang starts, until it exits."""
    if multiprocessing.parent_process() is None:
        return
    from sglang_lazy.port.cache import host_pool

    host_pool.CpuHostPool = LatePool
    late_transfers().start()
