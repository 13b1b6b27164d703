"""Thread blocks of the copies between host and device: each kernel is compiled before a request can wait for it."""

import ctypes
import functools
import inspect
import pkgutil

import pytest
import torch
from sglang.kernels.ops.kvcache import hicache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import mha

from sglang_lazy.port.cache import host_pool

pytestmark = pytest.mark.usefixtures("sglang_context")

HEADS, DIM, LAYERS = 2, 16, 3
ROW = HEADS * DIM * 4
DEVICE, HOST = torch.tensor([3, 1, 6]), torch.tensor([0, 5, 2])


class Kernels:
    """SGLang's compiled kernels for one number of blocks, on a CPU."""

    def __init__(self, blocks, log):
        self.blocks, self.log = blocks, log

    def launch_one(self, k_dst, v_dst, dst, k_src, v_src, src):
        self.log.append(("load", self.blocks))
        k_dst[dst], v_dst[dst] = k_src[src], v_src[src]

    def launch_all(self, k_dst, v_dst, dst, k_src, v_src, src, src_stride, dst_stride):
        self.log.append(("back up", self.blocks))
        for to, source in ((k_dst, k_src), (v_dst, v_src)):
            for there, here in zip(to.tolist(), source.tolist(), strict=True):
                for i, j in zip(dst.tolist(), src.tolist(), strict=True):
                    ctypes.memmove(there + i * dst_stride, here + j * src_stride, ROW)


@pytest.fixture
def log(monkeypatch):
    """What was compiled and launched, with the number of blocks; hooks are on."""
    log, compiled = [], {}

    def compile_kernels(*, element_size, unroll, block_quota):
        if block_quota not in compiled:
            assert element_size == ROW
            log.append(("compile", block_quota))
            compiled[block_quota] = Kernels(block_quota, log)
        return compiled[block_quota]

    monkeypatch.setattr(hicache, "_jit_hicache_module", compile_kernels)
    monkeypatch.setattr(mha, "_is_cuda", True)
    for hook in host_pool.HOOKS:
        stock = inspect.unwrap(pkgutil.resolve_name(hook.target))  # an engine in this process may have put it on
        monkeypatch.setattr(hook.target, functools.partial(hook.function, stock))
    return log


def test_few_blocks_copy_to_the_host_and_more_copy_back(log):
    device = MHATokenToKVPool(8, 1, torch.float32, HEADS, DIM, LAYERS, "cpu", False, enable_alt_stream=False)
    host = mha.MHATokenToKVPoolHost(device, 2, 0, 1, "layer_first", pin_memory=False)
    assert sorted(log) == [("compile", 1), ("compile", 4)]
    log.clear()
    rows = [torch.randn(3, HEADS, DIM) for _ in range(2 * LAYERS)]
    caches = (*device.k_buffer, *device.v_buffer)
    for cache, row in zip(caches, rows, strict=True):
        cache[DEVICE] = row
    host.backup_from_device_all_layer(device, HOST, DEVICE, "kernel")
    for cache in caches:
        cache.zero_()
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, HOST, DEVICE.flip(0), layer, "kernel")
    assert all(torch.equal(cache[DEVICE.flip(0)], row) for cache, row in zip(caches, rows, strict=True))
    assert log == [("back up", 1)] + [("load", 4)] * LAYERS
