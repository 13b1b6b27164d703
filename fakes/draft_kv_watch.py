"""Stops a scheduler, whose model drafts on a CPU as `remembered_drafts` has it, if the draft's keys of a chunk are not
those of its adapter: the same whenever that reads the chunk, and others for each adapter."""

from collections.abc import Callable
from typing import Any

import torch

from fakes import remembered_drafts


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    remembered_drafts.load()
    EagleDraftWorker.draft = _watching(EagleDraftWorker.draft, {})


def _watching(draft: Callable, seen: dict[tuple, dict[str | None, torch.Tensor]]) -> Callable:
    """seen: by the tokens of a chunk and adapter, the draft's keys, float32 [number of tokens, heads, head_dim]."""

    def run(worker: Any, batch: Any) -> Any:
        from sglang_lazy.core.state import linked

        keys = worker.draft_runner.token_to_kv_pool.get_key_buffer(0)
        for req in batch.reqs:
            if (state := linked(req)) is None:
                continue
            row, start = batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx].long(), 0
            for chunk in state.segments:
                tokens = tuple(req.origin_input_ids[chunk.offset : chunk.offset + chunk.num_kept])
                found = keys[row[start : start + chunk.num_kept]]
                start += chunk.num_kept
                of_adapters = seen.setdefault(tokens, {})
                expected = of_adapters.setdefault(req.lora_id, found.clone())
                assert torch.allclose(found, expected, atol=1e-4), "a chunk's keys have changed"
                others = [other for adapter, other in of_adapters.items() if adapter != req.lora_id]
                assert not any(torch.allclose(found, other, atol=1e-2) for other in others), "another adapter's keys"
        return draft(worker, batch)

    return run
