"""Makes SGLang draft what followed a token when it was last verified. A draft with random weights is hardly ever right;
these are in an answer that is given again, and sometimes in others. The model that drafts still runs."""

from collections.abc import Callable
from typing import Any

import torch

from fakes import speculation_on_cpu


def load() -> None:
    """The SGLang plugin for a CPU, with what `speculation_on_cpu` replaces; runs in each process that SGLang starts."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPDraftWorker

    speculation_on_cpu.load()
    following = _remembered()
    for worker in (EagleDraftWorker, FrozenKVMTPDraftWorker):
        worker.draft_forward = _recalling(worker.draft_forward, following)


def load_on_gpu() -> None:
    """The same on a GPU, where graphs draft, for models that draft as EAGLE's do."""
    from sglang.srt.speculative import eagle_worker_v2

    following, verify_input = _remembered(), eagle_worker_v2.build_eagle_verify_input

    def build(batch: Any, draft_input: Any, parents: Any, scores: Any, tokens: torch.Tensor, *args, **kwargs) -> Any:
        if not batch.forward_mode.is_idle():
            _recall(draft_input.bonus_tokens, tokens, following)
        return verify_input(batch, draft_input, parents, scores, tokens, *args, **kwargs)

    eagle_worker_v2.build_eagle_verify_input = build


def _remembered() -> dict[int, int]:
    """What followed each token, from now on."""
    from sglang.kernels.ops.speculative import spec_tree

    following: dict[int, int] = {}
    verify = spec_tree.verify_tree_greedy_func
    speculation_on_cpu.replace(spec_tree, "verify_tree_greedy_func", _remembering(verify, following))
    return following


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
        bonus_tokens = forward_batch.spec_info.bonus_tokens.clone()
        parents, scores, tokens, *rest = draft(worker, forward_batch)
        _recall(bonus_tokens, tokens, following)
        return parents, scores, tokens, *rest

    return run


def _recall(last: torch.Tensor, tokens: torch.Tensor, following: dict[int, int]) -> None:
    """last: [bs], the tokens before the drafts.  tokens: the drafts, [bs, n], replaced where more is known."""
    for row, token in enumerate(last.tolist()):
        for step in range(tokens.shape[1]):
            if (token := following.get(token)) is None:
                break
            tokens[row, step] = token
