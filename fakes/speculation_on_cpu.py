"""Makes SGLang speculate on a CPU, for which it has no kernels: those of chains of drafts (top-k 1) are replaced by
plain PyTorch, and its attention for CPUs learns to verify a chain and to draft one.

Answers are greedy, whatever a request's temperature. `OPTIONS` are those of a server that drafts three tokens.
"""

import copy
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

OPTIONS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}

OPS = "sglang.kernels.ops.speculative"


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_lazy.port import cpu

    cpu.has_draft_kernels = lambda device: True
    for home, new in KERNELS.items():
        replace(importlib.import_module(home.rpartition(".")[0]), home.rpartition(".")[2], new)
    eagle_utils._is_cpu = True  # verifies by the best token, without kernels that sample
    speculative_hook._disable_overlap_schedule_for_cpu = lambda args: None
    MHATokenToKVPool._init_kv_copy_and_warmup = _copies_nothing
    torch.cuda.synchronize = lambda device=None: None  # GLM's layer that drafts waits for it, whatever the device
    TorchNativeAttnBackend.needs_cpu_seq_lens = (
        False  # as of most on GPUs: with overlap, lengths are on the device only
    )
    TorchNativeAttnBackend.forward_extend = _extending(TorchNativeAttnBackend.forward_extend)
    DraftBackendFactory.create_decode_backend = _draft_steps
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchNativeAttnBackend(factory.draft_model_runner)


def replace(home: ModuleType, name: str, new: Callable) -> None:
    """Replace home.name, and what other modules have already imported of it."""
    old = getattr(home, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("sglang.")]:
        for attribute in [key for key, value in vars(module).items() if value is old]:
            setattr(module, attribute, new)


def _copies_nothing(pool: Any) -> None:
    """Accepted drafts of a chain are where they belong."""
    pool._kv_copy_config = None


# Slots of tokens in rows


def _slots(rows, req_to_token, starts, ends):
    """The slots [start, end) of each row, one after the other."""
    parts = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in parts])


def _draft_slots(rows, req_to_token, seq_lens, out, topk, num_cols, positions=None, mrope=None):
    out.copy_(_slots(rows, req_to_token, seq_lens, seq_lens + topk * num_cols))
    for given in (positions, mrope):
        if given is not None:
            given.copy_(seq_lens.expand_as(given))


def _verified_slots(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
    return _slots(req_pool_indices, req_to_token, start_offset, end_offset).long()


def _enter_slots(rows, req_to_token, starts, ends, slots, batch_size):
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[place : place + end - start].to(req_to_token.dtype)
        place += end - start


# Chains


def _build_chain(
    parents, best, seq_lens, mask, positions, retrieve_index, next_token, next_sibling, topk, steps, num_tokens, mode
):
    """A chain's mask is causal, and nobody reads it."""
    assert topk == 1
    depth = torch.arange(num_tokens)
    positions.view(-1, num_tokens).copy_(seq_lens[:, None] + depth)
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    next_token.copy_(torch.where(depth < num_tokens - 1, depth + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def _verify_chain(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    target_predict, topk=-1,
):  # fmt: skip
    """Accept drafts while they are the target's own choice.

    candidates, target_predict: [bs, n], the token before each choice and the choice; candidate 0 is no draft.
    """
    assert topk == 1
    accepted = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1).sum(1)
    accept_token_num.copy_(accepted)
    predicts.copy_(target_predict.flatten())
    depth = torch.arange(accept_index.shape[1])
    accept_index.copy_(retrieve_index[:, : len(depth)].where(depth <= accepted[:, None], -1))
    return predicts, accept_index, accept_token_num


def _last_accepted(accept_tokens, accept_lens, out, stride, batch_size):
    out.copy_(accept_tokens.flatten()[torch.arange(batch_size) * stride + accept_lens - 1])


def _gather(indices, *buffers):
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


KERNELS = {
    f"{OPS}.cache_locs.assign_draft_cache_locs_contiguous_func": _draft_slots,
    f"{OPS}.cache_locs.assign_extend_cache_locs_func": _verified_slots,
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": _enter_slots,
    f"{OPS}.spec_tree.build_tree_kernel_efficient_func": _build_chain,
    f"{OPS}.spec_tree.verify_tree_greedy_func": _verify_chain,
    f"{OPS}.eagle.fill_bonus_tokens_func": _last_accepted,
    f"{OPS}.gather_spec_extras.gather_spec_extras": _gather,
}
"""By the path of SGLang's function, its replacement."""


# Attention


def _extending(forward_extend: Callable) -> Callable:
    """`TorchNativeAttnBackend.forward_extend`, which takes chains to verify as well."""

    def extend(backend, q, k, v, layer, forward_batch, *args, **kwargs):
        if forward_batch.forward_mode.is_target_verify():
            batch, num_tokens = copy.copy(forward_batch), forward_batch.spec_info.draft_token_num
            batch.extend_prefix_lens = forward_batch.seq_lens
            batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, num_tokens)
            batch.seq_lens = forward_batch.seq_lens + num_tokens
            forward_batch = batch
        return forward_extend(backend, q, k, v, layer, forward_batch, *args, **kwargs)

    return extend


class DraftSteps:
    """The attention of a chain's drafting passes: a backend for each."""

    def __init__(self, runner: Any, num_passes: int):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class Step(TorchNativeAttnBackend):
            """One pass. num_drafted: how many drafts a row has with this one's."""

            def __init__(self, num_drafted: int):
                super().__init__(runner)
                self.num_drafted = num_drafted

            def forward_decode(self, q, k, v, layer, forward_batch, *args, **kwargs):
                batch = copy.copy(forward_batch)
                batch.seq_lens = forward_batch.seq_lens + self.num_drafted
                return super().forward_decode(q, k, v, layer, batch, *args, **kwargs)

        self.attn_backends = [Step(i + 1) for i in range(num_passes)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _draft_steps(factory: Any) -> DraftSteps | None:
    """In place of `DraftBackendFactory.create_decode_backend`: the first draft needs no pass."""
    steps = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, steps - 1) if steps > 1 else None
