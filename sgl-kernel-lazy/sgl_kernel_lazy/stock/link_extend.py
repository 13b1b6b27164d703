"""Prefill on stock FlashInfer: an entry is a stretch of keys, with the query rows from the first that sees it on."""

import dataclasses
import functools

import numpy
import torch

from sgl_kernel_lazy.stock.common import Kernel, check_supported, merge, rotate
from sgl_kernel_lazy.stock.entries import cut_entries, list_entries
from sgl_kernel_lazy.triton.common import num_multiprocessors
from sgl_kernel_lazy.validation import check_extend_inputs

# fa3 has tiles of 128 rows of one head, fa2 packs the heads of a group: short entries suit fa2.
FA3_ROWS = 64
# Partial rows that are merged at a time: a row has about as many as its prompt has chunks.
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
    """A batch's entries for all layers: expanded row i is query row `rows[i]` turned back by `offsets[i]`.

    Query row r merges the expanded rows parts[first[r] .. first[r + 1]].
    """

    launches: list
    rows: torch.Tensor
    offsets: torch.Tensor
    first: torch.Tensor
    parts: torch.Tensor


def plan_extend(
    q, k_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions, num_segments, segment_ends, segment_offsets
) -> Plan:
    """The plan of a batch, made on the host, which waits for the device; arguments as for `link_extend`."""
    host = [t.cpu().numpy() for t in (qo_indptr, q_positions, kv_indptr, kv_positions)]
    tables = [t.tolist() for t in (num_segments, segment_ends, segment_offsets)]
    entries, order = list_entries(*host, *tables)
    # Both launches list all slots, so that either list is an indptr.
    entries = numpy.array(entries, dtype=numpy.int32).reshape(-1, 5)
    backends = [_backend(q, entries[(entries[:, 1] > 0) & (entries[:, 4] == causal), 1]) for causal in (0, 1)]
    entries = cut_entries(entries, backends[0], q.shape[1], k_cache.shape[1], num_multiprocessors(q.device))
    first_row, rows, slots, offset, causal = entries.T
    counts = [numpy.where(causal == 1, 0, rows), numpy.where(causal == 1, rows, 0)]
    kv = _indptr(slots)
    launches, begin = [], 0
    for is_causal, count in enumerate(counts):
        total = int(count.sum())
        if total:
            qo = _indptr(count)
            kernel = Kernel(backends[is_causal], q, k_cache.shape[1], qo, kv, causal=bool(is_causal), split=False)
            device = (t.to(q.device, non_blocking=True) for t in (qo, kv))
            launches.append(Launch(kernel, slice(begin, begin + total), *device))
            begin += total
    described = torch.from_numpy(numpy.concatenate([first_row, offset, *counts, order])).to(q.device, non_blocking=True)
    first_row, offset, *counts, order = described.split([len(entries)] * 4 + [len(order)])
    lengths = torch.cat(counts)
    entry = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths, output_size=begin)
    place = torch.arange(begin, device=q.device) - (lengths.cumsum(0) - lengths)[entry]
    entry = entry % len(entries)
    expanded = order[first_row[entry] + place]
    in_order, parts = expanded.sort(stable=True)
    first = torch.searchsorted(in_order, torch.arange(len(q) + 1, dtype=torch.int32, device=q.device), out_int32=True)
    return Plan(launches, expanded, offset[entry], first, parts.to(torch.int32))


def _indptr(lengths) -> torch.Tensor:
    return torch.from_numpy(numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32))


def _backend(q, rows) -> str:
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    return "fa3" if hopper and len(rows) and rows.mean() >= FA3_ROWS else "fa2"


@functools.cache
def _side_stream(device):
    return torch.cuda.Stream(device)


def link_extend(
    q, k_cache, v_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
    num_segments, segment_ends, segment_offsets, cos_sin_cache,
    *, max_extend_len, is_neox, sm_scale, plan=None, out=None, lse=None, validate=True,
):  # fmt: skip
    """Same contract as `sgl_kernel_lazy.torch_impl.link_extend`, caches in fp16 or bf16, head_dim 64, 128 or 256.

    plan: this batch's, from `plan_extend`, for all layers; made here when not given, which waits for the device.
    """
    if validate:
        check_extend_inputs(
            q, k_cache, v_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
            num_segments, segment_ends, segment_offsets, cos_sin_cache, max_extend_len, out, lse, sm_scale,
            kv_dtypes=(),
        )  # fmt: skip
    check_supported(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if len(q) == 0:
        return out
    if plan is None:
        tables = (num_segments, segment_ends, segment_offsets)
        plan = plan_extend(q, k_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions, *tables)
    if not plan.launches:  # no row sees anything
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out
    turned = rotate(q, plan.rows, plan.offsets, cos_sin_cache, is_neox)
    partial_out = torch.empty_like(turned)
    partial_lse = torch.empty(turned.shape[:2], dtype=torch.float32, device=q.device)
    slots = kv_indices.to(torch.int32)

    def run(launch):
        launch.kernel.run(
            turned[launch.rows], k_cache, v_cache, launch.qo_indptr, launch.kv_indptr, slots,
            partial_out[launch.rows], partial_lse[launch.rows], sm_scale,
        )  # fmt: skip

    if q.is_cuda and len(plan.launches) == 2:
        # The new text among itself is short: it runs beside the rest.
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
