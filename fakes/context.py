"""Global state that SGLang's modules need outside a server."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.mem_cache.pool_host import base as host_pool
from sglang.srt.server_args import ServerArgs

from sglang_lazy.port import plugin


@contextlib.contextmanager
def published(device: str = "cpu") -> Iterator[None]:
    """Set the globals that SGLang's modules read: default flags for `device`, and a group of one rank. Host tiers start
    however little memory is free; SGLang leaves 10 GB to others."""
    plugin.provide_rotary_import()
    backend = "torch_native" if device == "cpu" else "triton"
    flags = ServerArgs(model_path="dummy", device=device, attention_backend=backend)
    runtime_context.publish(flags, role="scheduler")
    group = SimpleNamespace(all_reduce=lambda tensor: tensor, world_size=1)
    try:
        with (
            mock.patch.object(parallel_state, "_TP", group),
            mock.patch.object(torch.distributed, "get_world_size", lambda group=None: 1),
            mock.patch.object(host_pool, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0),
            runtime_context.get_parallel().override(tp_rank=0, attn_cp_size=1),
        ):
            yield
    finally:
        runtime_context.reset_context()
