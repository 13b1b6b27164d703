"""Makes SGLang draft on a CPU, as `speculation_on_cpu` does, what followed a token when it was last verified. A draft
with random weights is hardly ever right; these are in an answer that is given again, and sometimes in others. The
model that drafts still runs."""

from collections.abc import Callable
from typing import Any

import torch

from fakes import speculation_on_cpu


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPDraftWorker

    speculation_on_cpu.load()
    following: dict[int, int] = {}
    verify = spec_tree.verify_tree_greedy_func
    speculation_on_cpu.replace(spec_tree, "verify_tree_greedy_func", _remembering(verify, following))
    for worker in (EagleDraftWorker, FrozenKVMTPDraftWorker):
        worker.draft_forward = _recalling(worker.draft_forward, following)


def _remembering(verify: Callable, following: dict[int, int]) -> Callable:
    def run(*args: Any, candidates: torch.Tensor, target_predict: torch.Tensor, **kwargs: Any) -> Any:
        result = verify(*args, candidates=candidates, target_predict=target_predict, **kwargs)
        for tokens, choices, accepted in zip(
            candidates.tolist(), target_predict.view(candidates.shape).tolist(), result[2].tolist(), strict=True
        ):
            following.update(zip(tokens[: accepted + 1], choices, strict=False))
        return result

    return run


def _recalling(draft: Callable, following: dict[int, int]) -> Callable:
    def run(worker: Any, forward_batch: Any) -> Any:
        spec_info = forward_batch.spec_info
        last = spec_info.bonus_tokens.tolist()
        parents, scores, tokens, *rest = draft(worker, forward_batch)
        for row, token in enumerate(last):
            for step in range(tokens.shape[1]):
                if (token := following.get(token)) is None:
                    break
                tokens[row, step] = token
        return parents, scores, tokens, *rest

    return run
