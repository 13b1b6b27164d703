"""The measurements of probes: attention from the text after the last chunk, or properties of keys."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sgl_kernel_lazy import rotate_queries
from sgl_kernel_lazy.rows import ExtendRows
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.core.device import ints_to_device, to_device
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.policy import Measure
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import ChunkNodes, as_linked

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the tensor-parallel ranks, each of which has part of the heads."""


def deviating_layer(model: ServedModel) -> int:
    """The layer whose keys a deviation probe compares: the second, the first whose keys depend on context."""
    return sorted(model.kv_buffers)[1]


def probed_layers(layers: Mapping[int, AttentionLayer]) -> set[int]:
    """The layers whose attention is summed: the last third of those without a window.

    They choose as well as all layers together (docs/results/policies). The first layers would not do: they attend to
    nearby tokens rather than to the answer.
    """
    whole = sorted(layer_id for layer_id, layer in layers.items() if layer.window is None)
    return set(whole[-math.ceil(len(whole) / 3) :])


class ProbeSums:
    """The attention that probes in a prefill batch sum.

    layers: ids of the layers to sum over.
    tokens: int32 [nnz_qo], the queries among the batch's new tokens.
    qo_indptr, q_positions, max_extend_len: these queries, as in `ExtendRows`; most linked rows have none.
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
        """The sums for a batch about to run; None if it has no such probe."""
        if current is None or not any(row.probe is not None for row in current.rows):
            return None
        return cls(current, layers, torch.device(device))

    def rows(self, linked: ExtendRows) -> ExtendRows:
        """The batch's linked rows with these queries; most rows have none."""
        return dataclasses.replace(
            linked, qo_indptr=self.qo_indptr, q_positions=self.q_positions, max_extend_len=self.max_extend_len
        )

    def deliver(self, reqs: Sequence[Request], all_reduce: AllReduce) -> None:
        """Add the sums to each probe of the batch."""
        sums, place = all_reduce(self.sums), 0
        for row in self._rows:
            if row.probe is not None:
                prompt = as_linked(reqs[row.request]).prompt
                row.probe.add("attention", sums[place : place + prompt.num_chunk_tokens])
            place += len(row.positions)


def measure_deviation(req: Request, chunks: ChunkNodes, model: ServedModel, rows: Any, all_reduce: AllReduce) -> None:
    """Compare a probe's keys with the cached ones, in `chunks`, after its last pass.

    Cached keys are rotated to their positions in the prompt first. Where the first layer has seen the same tokens, they
    differ by rounding alone, which is no deviation.  rows: the cache's `RowCache`.
    """
    state, probe = as_linked(req), as_linked(req).probe
    assert probe is not None
    layer, window = deviating_layer(model), model.layers[min(model.kv_buffers)].window
    keys, rope, slices = model.kv_buffers[layer][0], model.layers[layer].rope, state.prompt.chunks
    places = np.concatenate([chunk.positions for chunk in slices]).astype(np.int64)
    offsets = np.repeat(model.rotations([chunk.offset for chunk in slices]), [chunk.num_kept for chunk in slices])
    fresh = keys[rows.read(req, 0, state.prompt.spans[-1].end)[to_device(places, keys.device)]]
    cached = keys[torch.cat(rows.chunk_slots(state, chunks))]
    offsets = to_device(offsets, keys.device)
    expected = rotate_queries(cached.float(), offsets, rope.cos_sin_cache, is_neox=rope.is_neox)
    deviation = all_reduce((fresh.float() - expected).square().sum((1, 2)))
    probe.add("deviation", deviation * to_device(np.concatenate([sees_others(c, window) for c in slices]), keys.device))


def sees_others(chunk: ChunkSlice, window: int | None) -> np.ndarray:
    """Whether each kept token, in a layer with this window, sees other tokens in the prompt than when its KV was
    computed after the preamble; bool [num_kept]."""
    length = min(chunk.start, len(chunk.preamble))
    before = np.asarray(chunk.prompt_ids[chunk.start - length : chunk.start])
    differing = np.flatnonzero(before != np.asarray(chunk.preamble[len(chunk.preamble) - length :]))
    num_same = length - 1 - int(differing[-1]) if len(differing) else length
    if num_same == chunk.start == len(chunk.preamble):
        return np.zeros(chunk.num_kept, dtype=bool)
    return np.ones(chunk.num_kept, dtype=bool) if window is None else chunk.indices + num_same < window - 1


def measure_key_size(req: Request, chunks: ChunkNodes, model: ServedModel, rows: Any, all_reduce: AllReduce) -> None:
    """Measure the size of a probe's cached keys (see `Policy.choose`), in `chunks`, after its last pass."""
    state, probe = as_linked(req), as_linked(req).probe
    assert probe is not None
    slots = torch.cat(rows.chunk_slots(state, chunks))
    # Window layers may have lost keys, unless all layers have windows.
    whole = [layer_id for layer_id, layer in model.layers.items() if layer.window is None] or model.layers
    caches = [model.kv_buffers[layer_id][0] for layer_id in whole]
    sizes = torch.stack([keys[slots].float().square().sum((1, 2)) for keys in caches])
    by_chunk = all_reduce(sizes).split([chunk.num_kept for chunk in state.prompt.chunks], 1)
    probe.add("key size", torch.cat([(part / part.mean(1, keepdim=True)).sum(0) for part in by_chunk]))


_MEASURES: dict[Measure, Callable] = {"deviation": measure_deviation, "key size": measure_key_size}
"""The measurements taken after the last pass; attention is summed layer by layer during each."""


def measure(req: Request, chunks: ChunkNodes, model: ServedModel, rows: Any, all_reduce: AllReduce) -> None:
    """Take the measurements of a probe whose last pass has run, and send them to whoever waits for them."""
    state = as_linked(req)
    if state.probe is not None:
        for name in _MEASURES.keys() & state.policy.probes:
            _MEASURES[name](req, chunks, model, rows, all_reduce)
        state.probe.send()
