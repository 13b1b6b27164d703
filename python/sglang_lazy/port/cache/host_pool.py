"""The host tier's memory on a CPU, where memory cannot be pinned and SGLang's transfer kernels do not run."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang_lazy.port.hooks import Hook


class CpuHostPool(MHATokenToKVPoolHost):
    """SGLang's host pool with the CPU as the device, and synchronous transfers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs, pin_memory=False)

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend) -> None:
        device_pool.k_buffer[layer_id][device_indices] = self.k_data_refs[layer_id][host_indices]
        device_pool.v_buffer[layer_id][device_indices] = self.v_data_refs[layer_id][host_indices]

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend) -> None:
        for layer_id in range(self.layer_num):
            self.k_data_refs[layer_id][host_indices] = device_pool.k_buffer[layer_id][device_indices]
            self.v_data_refs[layer_id][host_indices] = device_pool.v_buffer[layer_id][device_indices]


def host_pool_class(original: Callable, device_pool: Any) -> type:
    """Around `get_mha_host_pool_cls`, as called by the cache."""
    return CpuHostPool if torch.device(device_pool.device).type == "cpu" else original(device_pool)


HOOKS = (Hook("sglang.srt.mem_cache.hiradix_cache.get_mha_host_pool_cls", host_pool_class, "AROUND"),)
