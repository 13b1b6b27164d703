"""Stops a scheduler if the KV of a running request changes after the pass that computed it."""

from typing import Any

import torch

_seen: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
"""Per request and layer, as of the request's last pass: each token's slot and a digest of its KV."""


def check(_result: Any, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.run_batch`: in a decode step, check that the KV of each token that a request still reads from
    the same slot is unchanged, bit for bit."""
    from sglang_lazy.core.state import is_internal, linked

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    runner = scheduler.tp_worker.model_runner
    pool, model = runner.token_to_kv_pool, runner.attn_backend.link_model
    before = _seen if batch.forward_mode.is_decode() else {}
    for req, seq_len in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
        if is_internal(req) or seq_len < len(req.origin_input_ids):
            continue
        row = batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :seq_len].long()
        state = linked(req)
        ordinary = state is None or state.recomputes
        positions = torch.arange(seq_len) if ordinary else torch.from_numpy(state.row.positions_of(0, seq_len).copy())
        for layer_id, layer in model.layers.items():
            keeps_all = model.keeps_all(layer_id)
            slots = row if keeps_all else model.window_slots[row]
            last_slots, last_digests = before.get((req.rid, layer_id), (slots[:0].cpu(), torch.empty(0, 2)))
            caches = [cache[slots].view(torch.uint8).flatten(1).long() for cache in pool.get_kv_buffer(layer_id)]
            digests = torch.stack([(cache * _weights(cache)).sum(1) for cache in caches], dim=1).cpu()
            slots = slots.cpu()
            _seen[req.rid, layer_id] = slots, digests
            length = len(last_slots)
            changed = (slots[:length] == last_slots) & (digests[:length] != last_digests).any(1)
            if not keeps_all:
                changed &= positions[:length] > seq_len - 1 - layer.window
            if changed.any():
                places = positions[:length][changed].tolist()
                raise AssertionError(f"layer {layer_id} of {req.rid}, {seq_len} tokens: KV changed at {places}")


def _weights(cache: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, cache.shape[1] + 1, device=cache.device)


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", check, HookType.AFTER)
