"""What probes measure of each kept token: attention of the text behind the last chunk, or something of its key."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sgl_kernel_lazy import rotate_queries
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.core.device import ints_to_device, to_device
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.state import as_linked

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the tensor-parallel ranks, which have a part of the heads each."""


def deviating_layer(model: ServedModel) -> int:
    """Whose keys the probe of a deviation compares: the second's are the first that depend on context."""
    return sorted(model.kv_buffers)[1]


def probed_layers(layers: Mapping[int, AttentionLayer]) -> set[int]:
    """The layers whose attention is summed up: of those without a window the last third, which chooses as well as all
    do (docs/results/policies).

    Not the first ones alone: they attend to what is near rather than to what answers.
    """
    whole = sorted(layer_id for layer_id, layer in layers.items() if layer.window is None)
    return set(whole[-math.ceil(len(whole) / 3) :])


class ProbeSums:
    """The query rows of a prefill batch whose attention counts, as `accumulate_attention` takes them, and the sums.

    layers: ids of the layers that count.
    tokens: int32 [nnz_qo], which of the batch's new tokens they are.
    qo_indptr, q_positions, max_extend_len: as of `link_extend`, for all linked rows; most have no query row here.
    sums: float32, for each KV token of the linked rows, in their order.
    """

    def __init__(self, current: LinkedBatch, layers: Collection[int], device: torch.device):
        self.layers = layers
        self._rows = [current.rows[i] for i in current.linked]
        begins = np.cumsum([0, *(row.num_new for row in current.rows)])
        queries = []
        for i, row in zip(current.linked, self._rows, strict=True):
            new = row.positions[row.prefix_len :] if row.probe is not None else row.positions[:0]
            queries.append(begins[i] + np.flatnonzero(row.probe is not None and new >= row.probe.query_start))
        lens = [len(tokens) for tokens in queries]
        tokens = np.concatenate(queries)
        self.max_extend_len = max(lens)
        self.tokens, self.q_positions, self.qo_indptr = ints_to_device(
            [tokens, current.q_positions[tokens], np.cumsum([0, *lens])], device
        )
        num_kv = sum(len(row.positions) for row in self._rows)
        self.sums = torch.zeros(num_kv, dtype=torch.float32, device=device)

    @classmethod
    def of(cls, current: LinkedBatch | None, layers: Collection[int], device: str | torch.device) -> "ProbeSums | None":
        """For a batch about to run; None if no probe is in it."""
        if current is None or not any(row.probe is not None for row in current.rows):
            return None
        return cls(current, layers, torch.device(device))

    def deliver(self, reqs: Sequence[Any], all_reduce: AllReduce) -> None:
        """Give each probe among `reqs`, the batch, its sums, and start sending those of complete ones to the host."""
        sums, place = all_reduce(self.sums), 0
        for row in self._rows:
            if row.probe is not None:
                prompt = as_linked(reqs[row.request]).prompt
                row.probe.add(sums[place : place + prompt.num_chunk_tokens])
                if len(row.positions) == prompt.spans[-1].end:
                    row.probe.send()
            place += len(row.positions)


def measure_deviation(req: Any, model: ServedModel, rows: Any, all_reduce: AllReduce) -> None:
    """Behind the pass that ended the prompt of a probe: compare keys, and start sending the result to the host.

    Cached keys are rotated to their positions in the prompt. rows: the cache's `RowCache`.
    """
    state, probe = as_linked(req), as_linked(req).probe
    assert probe is not None
    layer = deviating_layer(model)
    keys, rope, chunks = model.kv_buffers[layer][0], model.layers[layer].rope, state.prompt.chunks
    places = np.concatenate([chunk.positions for chunk in chunks]).astype(np.int64)
    offsets = np.repeat(model.rotations([chunk.offset for chunk in chunks]), [chunk.num_kept for chunk in chunks])
    fresh = keys[rows.read(req, 0, state.prompt.spans[-1].end)[to_device(places, keys.device)]]
    cached = keys[torch.cat(rows.chunk_slots(state, req.last_node.chunks))]
    offsets = to_device(offsets, keys.device)
    expected = rotate_queries(cached.float(), offsets, rope.cos_sin_cache, is_neox=rope.is_neox)
    probe.add(all_reduce((fresh.float() - expected).square().sum((1, 2))))
    probe.send()


def measure_key_size(req: Any, model: ServedModel, rows: Any, all_reduce: AllReduce) -> None:
    """Behind such a pass: the size of cached keys, see `Policy.choose`; the same."""
    state, probe = as_linked(req), as_linked(req).probe
    assert probe is not None
    slots = torch.cat(rows.chunk_slots(state, req.last_node.chunks))
    # Layers with windows may have lost keys; where each has one, they have not.
    whole = [layer_id for layer_id, layer in model.layers.items() if layer.window is None] or model.layers
    caches = [model.kv_buffers[layer_id][0] for layer_id in whole]
    sizes = torch.stack([keys[slots].float().square().sum((1, 2)) for keys in caches])
    by_chunk = all_reduce(sizes).split([chunk.num_kept for chunk in state.prompt.chunks], 1)
    probe.add(torch.cat([(part / part.mean(1, keepdim=True)).sum(0) for part in by_chunk]))
    probe.send()
