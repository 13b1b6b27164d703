"""Prefill on FlashInfer: an item is a range of KV tokens, with the query rows from the first that sees it."""

import dataclasses
import functools

import numpy
import torch

from benchmark.kernels.flashinfer.common import Kernel, check_supported, merge, rotate
from benchmark.kernels.flashinfer.items import cut_items, list_items
from sgl_kernel_lazy.device import num_sms
from sgl_kernel_lazy.layer import Layer, check_queries
from sgl_kernel_lazy.rows import ExtendRows

# fa3 has tiles of 128 rows of one head, fa2 packs the heads of a group: short items suit fa2.
FA3_ROWS = 64
# Partial rows that are merged at a time; a row has about as many as its prompt has chunks.
MERGED = 8


@dataclasses.dataclass
class Launch:
    """One run of FlashInfer over the expanded rows `rows`."""

    kernel: Kernel
    rows: slice
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor


@dataclasses.dataclass
class Plan:
    """A batch's items for all layers: expanded row i is query row `rows[i]` rotated back by `offsets[i]`.

    Query row r merges the expanded rows parts[first[r] .. first[r + 1]].
    """

    launches: list[Launch]
    rows: torch.Tensor
    offsets: torch.Tensor
    first: torch.Tensor
    parts: torch.Tensor


def plan_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    rows: ExtendRows,
) -> Plan:
    """The plan of a batch, made on the host, which synchronizes with the device; arguments as for `link_extend`."""
    listed, order = list_items(
        *(t.cpu().numpy() for t in (rows.qo_indptr, rows.q_positions, rows.kv_indptr, rows.kv_positions)),
        rows.num_segments.tolist(), rows.segment_ends.tolist(), rows.segment_offsets.tolist(),
    )  # fmt: skip
    # Both launches list all slots, so that either list is an indptr.
    items = numpy.array(listed, dtype=numpy.int32).reshape(-1, 5)
    backends = [_backend(q, items[(items[:, 1] > 0) & (items[:, 4] == causal), 1]) for causal in (0, 1)]
    items = cut_items(items, backends[0], q.shape[1], k_cache.shape[1], num_sms(q.device))
    first_row, num_rows, slots, offset, causal = items.T
    counts = [numpy.where(causal == 1, 0, num_rows), numpy.where(causal == 1, num_rows, 0)]
    kv = _indptr(slots)
    launches: list[Launch] = []
    begin = 0
    for is_causal, count in enumerate(counts):
        total = int(count.sum())
        if total:
            qo = _indptr(count)
            kernel = Kernel(backends[is_causal], q, k_cache.shape[1], qo, kv, causal=bool(is_causal), split=False)
            device = (t.to(q.device, non_blocking=True) for t in (qo, kv))
            launches.append(Launch(kernel, slice(begin, begin + total), *device))
            begin += total
    described = torch.from_numpy(numpy.concatenate([first_row, offset, *counts, order])).to(q.device, non_blocking=True)
    first_rows, offsets, plain, causals, rows_in_order = described.split([len(items)] * 4 + [len(order)])
    lengths = torch.cat([plain, causals])
    item = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths, output_size=begin)
    place = torch.arange(begin, device=q.device) - (lengths.cumsum(0) - lengths)[item]
    item = item % len(items)
    expanded = rows_in_order[first_rows[item] + place]
    in_order, parts = expanded.sort(stable=True)
    first = torch.searchsorted(in_order, torch.arange(len(q) + 1, dtype=torch.int32, device=q.device), out_int32=True)
    return Plan(launches, expanded, offsets[item], first, parts.to(torch.int32))


def _indptr(lengths: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32))


def _backend(q: torch.Tensor, rows: numpy.ndarray) -> str:
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    return "fa3" if hopper and len(rows) and float(rows.mean()) >= FA3_ROWS else "fa2"


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def link_extend(
    q: torch.Tensor,
    layer: Layer,
    rows: ExtendRows,
    *,
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same contract as `sgl_kernel_lazy.torch_impl.link_extend`, caches in fp16 or bf16, head_dim 64, 128 or 256.

    plan: this batch's, from `plan_extend`, for all layers; if None, made here, which synchronizes with the device.
    """
    check_queries(q, layer, rows, out, lse)
    check_supported("link_extend", layer)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if len(q) == 0:
        return out
    if plan is None:
        plan = plan_extend(q, layer.k_cache, rows)
    if not plan.launches:  # no row sees anything
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out
    rotated = rotate(q, plan.rows, plan.offsets, layer)
    partial_out = torch.empty_like(rotated)
    partial_lse = torch.empty(rotated.shape[:2], dtype=torch.float32, device=q.device)
    slots = rows.kv_indices.to(torch.int32)

    def run(launch: Launch) -> None:
        launch.kernel.run(
            rotated[launch.rows], layer.k_cache, layer.v_cache, launch.qo_indptr, launch.kv_indptr, slots,
            partial_out[launch.rows], partial_lse[launch.rows], layer.sm_scale,
        )  # fmt: skip

    if q.is_cuda and len(plan.launches) == 2:
        # Attention within the new text is short: run it in parallel with the rest.
        stream, side = torch.cuda.current_stream(q.device), _side_stream(q.device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            run(plan.launches[1])
        run(plan.launches[0])
        stream.wait_stream(side)
    else:
        for launch in plan.launches:
            run(launch)
    merge(partial_out, partial_lse, plan.first, plan.parts, out, lse, at_once=MERGED)
    return out
