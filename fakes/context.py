"""Global state that SGLang's modules need outside a server."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

from sglang_lazy.port import plugin


@contextlib.contextmanager
def published(device: str = "cpu") -> Iterator[None]:
    """Set the globals that SGLang's modules read: default flags for `device`, and a group of one rank."""
    plugin.provide_rotary_import()
    backend = "torch_native" if device == "cpu" else "triton"
    flags = ServerArgs(model_path="dummy", device=device, attention_backend=backend)
    runtime_context.publish(flags, role="scheduler")
    one_rank = {"world_size": 1, "rank_in_group": 0, "is_first_rank": True, "is_last_rank": True, "device": device}
    group = SimpleNamespace(**one_rank, all_reduce=lambda tensor: tensor)
    groups = dict.fromkeys(("tp_group", "pp_group", "attn_tp_group"), group)
    try:
        with (
            mock.patch.object(torch.distributed, "get_world_size", lambda group=None: 1),
            runtime_context.get_parallel().override(tp_rank=0, pp_rank=0, attn_cp_size=1, **groups),
        ):
            yield
    finally:
        runtime_context.reset_context()
