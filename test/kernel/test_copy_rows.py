"""Copies of rows and runs between buffers: bitwise, and nothing else is touched."""

import ctypes

import numpy as np
import pytest
import torch
from ragged import DEVICE

from sgl_kernel_lazy import copy_engine
from sgl_kernel_lazy.triton.copy_rows import copy_rows

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="copy engines need a GPU")


def host_buffers(num_buffers, num_slots, row_bytes, gen):
    """Random bytes in host memory that the device can access."""
    buffers = [torch.randint(256, (num_slots, row_bytes), dtype=torch.uint8, generator=gen) for _ in range(num_buffers)]
    return [buffer.pin_memory() for buffer in buffers] if DEVICE == "cuda" else buffers


def addresses(buffers):
    return torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)


@pytest.mark.parametrize("row_bytes", [16, 24, 72, 1152, 2048, 36, 6, 5])
@pytest.mark.parametrize("num_rows", [1, 37, 300])
@pytest.mark.parametrize("to_host", [False, True])
def test_rows_are_copied(row_bytes, num_rows, to_host):
    gen = torch.Generator().manual_seed(row_bytes * 1000 + num_rows)
    num_slots = 2 * num_rows + 3
    host = host_buffers(3, num_slots, row_bytes, gen)
    device = [buffer.to(DEVICE, copy=True) for buffer in host_buffers(3, num_slots + 5, row_bytes, gen)]
    sources, targets = (device, host) if to_host else (host, device)
    source_rows, target_rows = (torch.randperm(len(some[0]), generator=gen)[:num_rows] for some in (sources, targets))
    expected = [target.cpu().clone() for target in targets]
    for source, target in zip(sources, expected, strict=True):
        target[target_rows] = source.cpu()[source_rows]

    on_device = source_rows.to(DEVICE), target_rows.to(DEVICE)
    copy_rows(addresses(sources), addresses(targets), *on_device, row_bytes=row_bytes, num_blocks=2)
    if DEVICE == "cuda":
        torch.cuda.synchronize()

    assert all(torch.equal(target.cpu(), right) for target, right in zip(targets, expected, strict=True))


def test_no_rows_are_no_copy():
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    copy_rows(none, none, none, none, row_bytes=16, num_blocks=1)
    copy_engine.copy_runs(*[np.empty(0, np.int64)] * 3, stream=0)


@on_gpu
@pytest.mark.parametrize("to_host", [False, True])
def test_runs_are_copied_by_the_copy_engine(to_host):
    if not copy_engine.available():
        pytest.skip("the driver is older than CUDA 12.8")
    gen = torch.Generator().manual_seed(1)
    host = torch.randint(256, (1 << 20,), dtype=torch.uint8, generator=gen).pin_memory()
    device = torch.randint(256, (1 << 20,), dtype=torch.uint8, generator=gen).to(DEVICE)
    source, target = (device, host) if to_host else (host, device)
    sizes = np.random.default_rng(2).integers(1, 3000, 300)
    starts = np.cumsum(sizes) - sizes
    shuffled = np.random.default_rng(3).permutation(300)
    places = np.empty(300, np.int64)
    places[shuffled] = np.cumsum(sizes[shuffled]) - sizes[shuffled]
    expected = target.cpu().clone()
    for start, place, size in zip(starts, places, sizes, strict=True):
        expected[place : place + size] = source.cpu()[start : start + size]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copy_engine.copy_runs(starts + source.data_ptr(), places + target.data_ptr(), sizes, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target.cpu(), expected)


class Driver:
    """A driver that copies at once, or refuses the copy of this number."""

    def __init__(self, refused=None):
        self.refused = refused

    def __call__(self, targets, sources, sizes, count, attributes, starts, num_attributes, failed, stream):
        lists = [(ctypes.c_uint64 * count).from_address(address) for address in (targets, sources, sizes)]
        assert (num_attributes, starts._obj.value, attributes._obj.flags, stream) == (1, 0, 1, 7)
        for number, (target, source, size) in enumerate(zip(*lists, strict=True)):
            if number == self.refused:
                failed._obj.value = number
                return 1
            ctypes.memmove(target, source, size)
        return 0


def test_the_driver_gets_targets_sources_and_sizes(monkeypatch):
    monkeypatch.setattr(copy_engine, "_batch_copy", Driver)
    source, target = np.arange(40, dtype=np.uint8), np.zeros(40, np.uint8)
    places, sizes = np.array([30, 0]), np.array([5, 7])
    copy_engine.copy_runs(source.ctypes.data + np.array([3, 10]), target.ctypes.data + places, sizes, stream=7)
    assert target[30:35].tolist() == [3, 4, 5, 6, 7] and target[:7].tolist() == [*range(10, 17)]
    assert not target[7:30].any() and not target[35:].any()


def test_a_refused_copy_is_named(monkeypatch):
    monkeypatch.setattr(copy_engine, "_batch_copy", lambda: Driver(refused=1))
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(RuntimeError, match="returned 1 for copy 1 of 2"):
        copy_engine.copy_runs(
            source.ctypes.data + np.array([0, 4]), target.ctypes.data + np.array([0, 4]), np.array([4, 4]), stream=7
        )


def test_a_driver_without_batches_says_so(monkeypatch):
    monkeypatch.setattr(copy_engine, "_batch_copy", lambda: None)
    assert not copy_engine.available()
    with pytest.raises(RuntimeError, match=r"CUDA 12\.8"):
        copy_engine.copy_runs(*[np.ones(1, np.int64)] * 3, stream=7)
