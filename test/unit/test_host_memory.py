"""Copies between a device's pool and host memory: bitwise, in any slots, and never read before they have come."""

import ctypes
import functools
import importlib

import numpy as np
import pytest
import torch

from fakes import streams
from fakes.late_copies import LateCopier
from sgl_kernel_lazy import copy_engine
from sglang_lazy.cache import host_memory, turns
from sglang_lazy.cache.host_memory import CpuCopier, GpuCopier, HostMemory, Piece
from sglang_lazy.cache.transfers import Transfers

kernels = importlib.import_module("sgl_kernel_lazy.triton.copy_rows")
DEVICE_SLOTS, HOST_SLOTS, LAYERS = 40, 60, 3
SHAPES = {
    "keys and values": [((2, 8), torch.bfloat16)] * 2,
    "values of another size": [((2, 12), torch.float16), ((2, 8), torch.float16)],
    "latents": [((1, 18), torch.bfloat16)],
    "rows without heads": [((9,), torch.float32)],
    "bytes and their scales": [((2, 5), torch.uint8), ((2, 5), torch.uint8), ((2,), torch.float32)],
}


@pytest.fixture
def engine(monkeypatch):
    """The copy engine of a CPU, on the streams of `fakes.streams`; lists the sizes of its runs."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton's interpreter is off; the tests at the end run there")
    sizes_copied = []

    def copy_runs(sources, targets, sizes, stream):
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            stream.do(functools.partial(ctypes.memmove, target, source, size))
        if len(sizes):
            sizes_copied.append(sizes.tolist())

    monkeypatch.setattr(copy_engine, "available", lambda: True)
    monkeypatch.setattr(copy_engine, "copy_runs", copy_runs)
    monkeypatch.setattr(host_memory, "MIN_RUN_BYTES", 4 * 32)
    return sizes_copied


def random_layers(parts, gen, num_slots=DEVICE_SLOTS):
    """The buffers of a pool in which no two slots are alike."""
    layers = []
    for _ in range(LAYERS):
        layers.append([])
        for shape, dtype in parts:
            numbers = torch.randint(0, 256, (num_slots, *shape, dtype.itemsize), dtype=torch.uint8, generator=gen)
            layers[-1].append(numbers.view(dtype).squeeze(-1))
    return layers


def as_bytes(layers, slots):
    return [buffer.reshape(len(buffer), -1).view(torch.uint8)[slots].clone() for layer in layers for buffer in layer]


def piece(host, device, known=True):
    """One piece, whose device slots the CPU may know."""
    return [Piece(host, device, device.cpu() if known else None)]


def poison(layers):
    for layer in layers:
        for buffer in layer:
            buffer.reshape(len(buffer), -1).view(torch.uint8).fill_(0x7F)


@pytest.mark.parametrize("parts", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("copies", [CpuCopier, lambda memory: GpuCopier(memory, streams)], ids=["CPU", "GPU"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_copied_comes_back_to_other_slots(engine, parts, copies, seed):
    """Slots are ragged: runs of random lengths at random places, on both sides."""
    gen = torch.Generator().manual_seed(seed)
    layers = random_layers(parts, gen)
    memory = HostMemory(layers, HOST_SLOTS)
    transfers = Transfers(memory, copies(memory), streams)

    def ragged(num_slots, count):
        places = torch.randperm(num_slots // 5, generator=gen)
        pieces = [torch.arange(place * 5, place * 5 + 1 + i % 5) for i, place in enumerate(places.tolist())]
        return torch.cat(pieces)[:count]

    count = 17
    source, host, target = ragged(DEVICE_SLOTS, count), ragged(HOST_SLOTS, count), ragged(DEVICE_SLOTS, count)
    expected = as_bytes(layers, source)
    before = memory.groups[0].host.clone()
    transfers.back_up(piece(host, source)).finish()
    untouched = torch.ones(HOST_SLOTS, dtype=torch.bool)
    untouched[host] = False
    assert torch.equal(memory.groups[0].host[:, untouched], before[:, untouched])

    poison(layers)
    transfers.load(piece(host, target)).finish()
    assert all(map(torch.equal, as_bytes(layers, target), expected))
    others = torch.ones(DEVICE_SLOTS, dtype=torch.bool)
    others[target] = False
    assert all((values == 0x7F).all() for values in as_bytes(layers, others))


def test_long_runs_go_to_the_copy_engine_and_the_rest_to_the_kernel(engine):
    gen = torch.Generator().manual_seed(4)
    memory = HostMemory(random_layers(SHAPES["keys and values"], gen), HOST_SLOTS)
    kernel, rows = GpuCopier(memory, streams), []
    copy_rows = kernel._copy_rows
    kernel._copy_rows = lambda *args: rows.append((len(args[0]), len(args[2]), args[5])) or copy_rows(*args)
    host = torch.cat([torch.arange(10, 16), torch.tensor([3, 1]), torch.arange(30, 34), torch.tensor([50, 51, 52])])
    device = torch.arange(15)
    transfers = Transfers(memory, kernel, streams)
    transfers.back_up(piece(host, device)).finish()
    assert engine == [[6 * 32, 4 * 32] * (2 * LAYERS)] and rows == [(2 * LAYERS, 5, 1)]
    engine.clear(), rows.clear()
    transfers.load(piece(host, device)).finish()
    assert engine == [[6 * 32, 4 * 32] * 2] * LAYERS and rows == [(2, 5, 2)] * LAYERS


def test_copies_to_the_host_go_in_small_batches(engine, monkeypatch):
    """And are complete once the ticket says so, although other streams make them. Those to the device stay whole."""
    monkeypatch.setattr(turns, "BATCH_BYTES", 5 * 32)
    gen = torch.Generator().manual_seed(12)
    layers = random_layers(SHAPES["keys and values"], gen)
    memory = HostMemory(layers, HOST_SLOTS)
    transfers = Transfers(memory, GpuCopier(memory, streams), streams)
    slots = torch.arange(12)
    expected = as_bytes(layers, slots)
    transfers.back_up(piece(slots + 7, slots)).finish()
    assert list(map(sum, engine)) == [5 * 32] * 14 + [2 * 32], "of 2 x 3 x 12 rows"
    engine.clear()
    poison(layers)
    transfers.load(piece(slots + 7, slots)).finish()
    assert engine == [[12 * 32] * 2] * LAYERS and all(map(torch.equal, as_bytes(layers, slots), expected))


def test_slots_that_the_cpu_does_not_know_go_to_the_kernel(engine):
    """Each piece by itself, in any order; nothing waits for the numbers."""
    gen = torch.Generator().manual_seed(10)
    layers = random_layers(SHAPES["keys and values"], gen)
    memory = HostMemory(layers, HOST_SLOTS)
    transfers = Transfers(memory, GpuCopier(memory, streams), streams)
    slots = torch.randperm(8, generator=gen) * 5
    source, host = ((slots[:, None] + torch.arange(4)).flatten() for _ in range(2))
    pieces = [
        Piece(host[i : i + 8], source[i : i + 8], source[i : i + 8] if known else None)
        for i, known in ((8, False), (0, True), (24, True), (16, False))
    ]
    expected = as_bytes(layers, source)
    transfers.back_up(pieces).finish()
    assert engine == [[4 * 32] * 4 * (2 * LAYERS)]
    poison(layers)
    transfers.load(pieces[::-1]).finish()
    assert all(map(torch.equal, as_bytes(layers, source), expected))


def test_kernels_are_compiled_before_anybody_waits(engine, monkeypatch):
    """One for each row size."""
    sizes, copy_rows = [], kernels.copy_rows
    monkeypatch.setattr(kernels, "copy_rows", lambda *args: sizes.append(args[4]) or copy_rows(*args))
    gen = torch.Generator().manual_seed(11)
    GpuCopier(HostMemory(random_layers(SHAPES["bytes and their scales"], gen), HOST_SLOTS), streams)
    assert sorted(sizes) == [8, 10] and not engine


def test_numbers_are_read_without_waiting():
    memory = HostMemory([[torch.zeros(8, 1)]], 8)
    transfers = Transfers(memory, streams=streams)
    late = streams.Stream()
    with streams.stream(late):
        numbers = transfers.numbers(torch.tensor([3, 1, 2]))
        part = numbers.part(1, 3)
        late.queued.appendleft(lambda: None)
        assert part.known is None and numbers.known.tolist() == [3, 1, 2] and part.known.tolist() == [1, 2]


def test_without_batched_copies_the_kernel_copies_everything(engine, monkeypatch):
    monkeypatch.setattr(copy_engine, "available", lambda: False)
    gen = torch.Generator().manual_seed(5)
    layers = random_layers(SHAPES["latents"], gen)
    memory = HostMemory(layers, HOST_SLOTS)
    expected = as_bytes(layers, torch.arange(20))
    transfers = Transfers(memory, GpuCopier(memory, streams), streams)
    transfers.back_up(piece(torch.arange(20), torch.arange(20))).finish()
    poison(layers)
    transfers.load(piece(torch.arange(20), torch.arange(20))).finish()
    assert not engine and all(map(torch.equal, as_bytes(layers, torch.arange(20)), expected))


def test_a_layer_is_read_only_once_it_has_come():
    """`LateCopier` copies when something waits, and poisons targets until then."""
    gen = torch.Generator().manual_seed(6)
    layers = random_layers(SHAPES["keys and values"], gen)
    memory = HostMemory(layers, HOST_SLOTS)
    transfers = Transfers(memory, LateCopier(CpuCopier(memory), memory), streams)
    slots = torch.arange(8)
    expected = as_bytes(layers, slots)
    transfers.back_up(piece(slots, slots)).finish()
    poison(layers)
    tickets = [transfers.load(piece(slots[:4], slots[:4])), transfers.load(piece(slots[4:], slots[4:]))]
    transfers.wait(0)
    assert all(map(torch.equal, as_bytes(layers[:1], slots), expected[:2]))
    assert not any(map(torch.equal, as_bytes(layers[2:], slots[4:]), [each[4:] for each in expected[4:]]))
    transfers.wait_all()
    assert all(map(torch.equal, as_bytes(layers, slots), expected)) and all(ticket.done for ticket in tickets)
    transfers.wait(1)
    assert transfers._last_load is None, "later passes ask no event"


def test_a_ticket_tells_when_its_copy_has_ended():
    gen = torch.Generator().manual_seed(7)
    memory = HostMemory(random_layers(SHAPES["latents"], gen), HOST_SLOTS)
    transfers = Transfers(memory, LateCopier(CpuCopier(memory), memory), streams)
    first = transfers.back_up(piece(torch.arange(4), torch.arange(4)))
    second = transfers.back_up(piece(torch.arange(4, 9), torch.arange(4, 9)))
    asked = 0
    while not second.done:  # each question lets one step of work pass
        asked += 1
    assert asked and first.done


def test_a_cpu_copies_at_once():
    memory = HostMemory([[torch.arange(8.0).reshape(8, 1)]], 8)
    transfers = Transfers(memory)
    assert transfers.back_up(piece(torch.tensor([2]), torch.tensor([5]))).done
    ticket = transfers.load(piece(torch.tensor([2]), torch.tensor([0])))
    transfers.wait_all()
    assert ticket.done and memory.groups[0].device[0].view(torch.float32)[0] == 5


def test_copies_wait_for_the_passes_launched_before(monkeypatch):
    waited = []
    monkeypatch.setattr(streams.Stream, "wait_stream", lambda self, stream: waited.append((self, stream)))
    memory = HostMemory([[torch.zeros(8, 1)]], 8)
    transfers = Transfers(memory, streams=streams)
    transfers.forward_stream = passes = streams.Stream()
    transfers.back_up(piece(torch.tensor([0]), torch.tensor([0])))
    transfers.load(piece(torch.tensor([0]), torch.tensor([0])))
    both = transfers._back_up_stream, transfers._load_stream
    assert waited == [(stream, before) for stream in both for before in (streams.MAIN, passes)]


def test_storage_gathers_rows_of_all_buffers_in_one_call():
    """Keys of all layers, then values of all layers, as in stored objects."""
    gen = torch.Generator().manual_seed(8)
    layers = random_layers(SHAPES["keys and values"], gen)
    memory = HostMemory(layers, HOST_SLOTS)
    host = torch.tensor([7, 3, 11])
    Transfers(memory).back_up(piece(host, torch.arange(3)))
    table, starts = memory.groups[0].table
    stored = np.take(table, starts + host.numpy())
    assert stored.shape == (2 * LAYERS, 3) and stored.itemsize == 32 and memory.token_bytes == 2 * LAYERS * 32
    for index, (place, layer) in enumerate((place, layer) for place in range(2) for layer in range(LAYERS)):
        assert stored[index].tobytes() == as_bytes([[layers[layer][place]]], torch.arange(3))[0].numpy().tobytes()
    table[starts + np.array([20, 21, 22])] = stored
    assert torch.equal(memory.groups[0].host[:, 20:23], memory.groups[0].host[:, host])


def test_buffers_must_be_contiguous():
    with pytest.raises(ValueError, match=r"layers\[0\]\[1\]: expected a contiguous buffer"):
        HostMemory([[torch.zeros(4, 2), torch.zeros(2, 4).T]], 8)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def device_layers(parts, gen, num_slots):
    return [[buffer.cuda() for buffer in layer] for layer in random_layers(parts, gen, num_slots)]


@on_gpu
@pytest.mark.parametrize("parts", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("min_run_bytes", [1, 1 << 15, 1 << 60], ids=["engine", "both", "kernel"])
def test_a_gpu_copies_bitwise(monkeypatch, parts, min_run_bytes):
    """Runs of 1 to 3,000 tokens, in another order on each side; batches end anywhere within them."""
    monkeypatch.setattr(host_memory, "MIN_RUN_BYTES", min_run_bytes)
    monkeypatch.setattr(turns, "BATCH_BYTES", 33_333)
    gen = torch.Generator().manual_seed(9)
    layers = device_layers(parts, gen, 9000)
    memory = HostMemory(layers, 9000)
    transfers = Transfers(memory)
    lengths = [1, 3000, 7, 1, 700, 64, 33, 1, 1, 200]

    def ragged():
        order = torch.randperm(len(lengths), generator=gen).tolist()
        starts, begin = {}, 3
        for piece in order:
            starts[piece] = begin
            begin += lengths[piece] + piece
        return torch.cat([torch.arange(starts[piece], starts[piece] + n) for piece, n in enumerate(lengths)])

    source, host, target = ragged(), ragged(), ragged()
    expected = as_bytes(layers, source.cuda())
    first = transfers.back_up(piece(host, source.cuda()))
    ticket = transfers.back_up(piece(torch.tensor([0, 1]), torch.tensor([0, 1]).cuda()))
    ticket.finish()
    assert ticket.done and first.done
    poison(layers)
    transfers.load(piece(host, target.cuda()))
    for layer in range(LAYERS):
        transfers.wait(layer)
        places = slice(layer * len(parts), (layer + 1) * len(parts))
        assert all(map(torch.equal, as_bytes(layers[layer : layer + 1], target.cuda()), expected[places]))
    others = torch.ones(9000, dtype=torch.bool)
    others[target] = False
    assert all((values == 0x7F).all() for values in as_bytes(layers, others.cuda()))


@on_gpu
@pytest.mark.parametrize("min_run_bytes", [1, 1 << 60], ids=["engine", "kernel"])
def test_copies_of_a_gpu_wait_for_passes_and_passes_for_loads(monkeypatch, min_run_bytes):
    """Nothing waits on the host: each side is still busy when the other is told to go on."""
    monkeypatch.setattr(host_memory, "MIN_RUN_BYTES", min_run_bytes)
    layers = [[torch.zeros(5000, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(LAYERS)]
    memory = HostMemory(layers, 5000)
    transfers = Transfers(memory)
    transfers.forward_stream = passes = torch.cuda.Stream()
    slots = torch.arange(4000)
    on_device = slots.cuda()
    transfers.back_up(piece(slots, on_device)).finish()  # compiles the kernel
    transfers.load(piece(slots, on_device)).finish()
    torch.cuda.synchronize()
    cycles = 200_000_000
    with torch.cuda.stream(passes):  # computes what is copied
        torch.cuda._sleep(cycles)
        for number, buffer in enumerate(buffer for layer in layers for buffer in layer):
            buffer.fill_(number + 1)
    backed_up = transfers.back_up(piece(slots, on_device))
    assert not backed_up.done
    backed_up.finish()
    with torch.cuda.stream(passes):  # writes a last time to slots that are free by now
        torch.cuda._sleep(cycles)
        for layer in layers:
            for buffer in layer:
                buffer.fill_(float("nan"))
    loaded = transfers.load(piece(slots, on_device))
    assert not loaded.done
    read = []
    with torch.cuda.stream(passes):
        for layer, buffers in enumerate(layers):
            transfers.wait(layer)
            read += [(buffer[:4000] == 2 * layer + place + 1).all() for place, buffer in enumerate(buffers)]
    passes.synchronize()  # `item` waits for the current stream alone
    assert all(each.item() for each in read)


@on_gpu
def test_other_copies_to_the_host_pass_those_of_chunks():
    """Five small ones one after another, as tokens of steps are, while a gigabyte is copied."""
    if not copy_engine.available():
        pytest.skip("the driver is older than CUDA 12.8")
    num_slots = 1 << 19
    layers = [[torch.ones(num_slots, 64, device="cuda") for _ in "kv"] for _ in range(4)]
    memory = HostMemory(layers, num_slots)
    transfers, other = Transfers(memory), torch.cuda.Stream()
    slots = torch.arange(num_slots).reshape(8, -1)[torch.randperm(8)].flatten()
    on_device = slots.cuda()
    token, read = torch.zeros(1, device="cuda"), torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()
    backed_up = transfers.back_up(piece(slots, on_device))
    with torch.cuda.stream(other):
        for number in range(1, 6):
            token.fill_(number)
            read.copy_(token, non_blocking=True)
            other.synchronize()
            assert read.item() == number
    assert not backed_up.done
    backed_up.finish()
    assert all((rows.view(torch.float32) == 1).all() for rows in memory.groups[0].host)
