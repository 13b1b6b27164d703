"""Makes SGLang draft on a CPU, as `speculation_on_cpu` does, what it finds in earlier answers: trees, for whose kernels
stand plain PyTorch, and an attention with the tree's mask."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from fakes import speculation_on_cpu

OPTIONS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6, "speculative_ngram_max_bfs_breadth": 3}


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    kernels = ModuleType("sgl_kernel.speculative")
    kernels.reconstruct_indices_from_tree_mask = _links
    sys.modules["sgl_kernel.speculative"] = kernels  # the wheels have none for CPUs
    speculation_on_cpu.load()

    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import ngram_worker

    speculation_on_cpu.replace(spec_tree, "verify_tree_greedy_func", _verify)
    ngram_worker.move_accept_tokens_to_target_kvcache = _move
    ngram_worker.reconstruct_indices_from_tree_mask_func = _links
    TorchNativeAttnBackend.forward_extend = _extending(TorchNativeAttnBackend.forward_extend)
    MHATokenToKVPool.move_kv_cache = _copy


def _links(mask, seq_lens, positions, index, next_token, next_sibling, batch_size, num_nodes):
    """Of each node: its position, its first child and its parent's next one."""
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row, tree in enumerate(mask.view(-1, num_nodes, num_nodes)[:batch_size].tolist()):
        seen: dict[int, int] = {}  # by parent, its last child so far
        for node, ancestors in enumerate(tree):
            before = [i for i in range(node) if ancestors[i]]
            positions[row * num_nodes + node] = seq_lens[row] + len(before)
            if before:
                links = next_sibling[row] if before[-1] in seen else next_token[row]
                links[seen.get(before[-1], before[-1])] = node
                seen[before[-1]] = node


def _verify(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    target_predict, topk=-1,
):  # fmt: skip
    """Accept drafts while a child of the last one is the target's own choice."""
    predicts.copy_(target_predict.flatten())
    accept_index.fill_(-1)
    for row in range(len(candidates)):
        node, count = 0, 0
        accept_index[row, 0] = retrieve_index[row, 0]
        child = int(retrieve_next_token[row, 0])
        while child >= 0 and count + 1 < accept_index.shape[1]:
            if candidates[row, child] != target_predict[row, node]:
                child = int(retrieve_next_sibling[row, child])
                continue
            node, count = child, count + 1
            accept_index[row, count] = retrieve_index[row, node]
            child = int(retrieve_next_token[row, node])
        accept_token_num[row] = count
    return predicts, accept_index, accept_token_num


def _move(batch: Any, accept_index: torch.Tensor, num_correct: torch.Tensor, allocator: Any) -> None:
    """Accepted nodes' KV to the front of their request's slots."""
    slots = batch.out_cache_loc.view(len(accept_index), -1)
    for row, count in enumerate((num_correct + 1).tolist()):
        allocator.get_kvcache().move_kv_cache(slots[row, :count], batch.out_cache_loc[accept_index[row, :count].long()])


def _copy(pool: Any, to: torch.Tensor, from_: torch.Tensor) -> None:
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[to] = buffer[from_]


def _extending(forward_extend: Callable) -> Callable:
    """`TorchNativeAttnBackend.forward_extend`, which takes trees as well."""

    def extend(backend, q, k, v, layer, forward_batch, *args, **kwargs):
        if not forward_batch.forward_mode.is_target_verify():
            return forward_extend(backend, q, k, v, layer, forward_batch, *args, **kwargs)
        num_nodes, pool = forward_batch.spec_info.draft_token_num, backend.token_to_kv_pool
        pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        queries = q.view(-1, num_nodes, layer.tp_q_head_num, layer.qk_head_dim)
        out, begin = torch.empty_like(queries), 0
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        for i, (row, length) in enumerate(rows):
            num_keys = length + num_nodes
            mask = forward_batch.spec_info.custom_mask[begin : (begin := begin + num_nodes * num_keys)]
            slots = backend.req_to_token_pool.req_to_token[row, :num_keys]
            attended = F.scaled_dot_product_attention(
                queries[i].transpose(0, 1)[None],
                *(x[slots].transpose(0, 1)[None] for x in (keys, values)),
                attn_mask=mask.view(num_nodes, num_keys).bool(),
                scale=layer.scaling,
                enable_gqa=True,
            )
            out[i] = attended[0].transpose(0, 1)
        return out.view(q.shape[0], -1)

    return extend
