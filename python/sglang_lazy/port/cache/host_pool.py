"""The host tier's memory: how many thread blocks copy to and from it, and a stand-in for it on a CPU, where memory
cannot be pinned and SGLang's transfer kernels do not run."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang_lazy.port.hooks import Hook

LOAD_BLOCKS, BACK_UP_BLOCKS = 4, 1
"""Thread blocks of the transfer kernels. Each occupies an SM that concurrent passes could use. Requests wait for loads;
only eviction may wait for copies to the host, and with one block running requests do not notice them
(docs/results/tiers)."""


class CpuHostPool(MHATokenToKVPoolHost):
    """SGLang's host pool with the CPU as the device, and synchronous transfers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs, pin_memory=False)

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend) -> None:
        for device, host in ((device_pool.k_buffer, self.k_data_refs), (device_pool.v_buffer, self.v_data_refs)):
            _copy(host[layer_id], host_indices, device[layer_id], device_indices)

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend) -> None:
        for layer_id in range(self.layer_num):
            for device, host in ((device_pool.k_buffer, self.k_data_refs), (device_pool.v_buffer, self.v_data_refs)):
                _copy(device[layer_id], device_indices, host[layer_id], host_indices)


def _copy(source: torch.Tensor, source_slots: torch.Tensor, target: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Indexing would start PyTorch's threads however few the slots are, twice for each layer; on a busy machine that
    takes longer than prefill."""
    target.index_copy_(0, target_slots, source.index_select(0, source_slots))


def host_pool_class(original: Callable, device_pool: Any) -> type:
    """Around `get_mha_host_pool_cls`, as called by the cache."""
    return CpuHostPool if torch.device(device_pool.device).type == "cpu" else original(device_pool)


def compile_kernels(compile_kernel: Callable[..., bool], *, element_size: int) -> bool:
    """Around `can_use_hicache_jit_kernel`, as called by pools: what is compiled later keeps requests waiting."""
    return all(compile_kernel(element_size=element_size, block_quota=n) for n in (LOAD_BLOCKS, BACK_UP_BLOCKS))


def load(transfer: Callable, **kwargs: Any) -> None:
    """Around the transfer of one layer to the device."""
    transfer(**kwargs, block_quota=LOAD_BLOCKS)


def back_up(transfer: Callable, **kwargs: Any) -> None:
    """Around the transfer of all layers to the host."""
    transfer(**kwargs, block_quota=BACK_UP_BLOCKS)


HOOKS = (
    Hook("sglang.srt.mem_cache.hiradix_cache.get_mha_host_pool_cls", host_pool_class, "AROUND"),
    Hook("sglang.srt.mem_cache.pool_host.mha.can_use_hicache_jit_kernel", compile_kernels, "AROUND"),
    Hook("sglang.srt.mem_cache.pool_host.mha.jit_transfer_hicache_one_layer", load, "AROUND"),
    Hook("sglang.srt.mem_cache.pool_host.mha.jit_transfer_hicache_all_layer", back_up, "AROUND"),
)
