"""A measured batch: its dimensions, its prompts, and their tensors over shuffled slots."""

import dataclasses
import functools
from typing import Any

import torch

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rope import rope_cos_sin
from sgl_kernel_lazy.rows import ExtendRows, Rows


@dataclasses.dataclass(frozen=True)
class Dims:
    """Heads, rope, dtype and device of one run; by default the attention of an 8B Llama."""

    dtype: torch.dtype
    device: torch.device
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: torch.dtype | None = None  # of the caches, if it differs from dtype
    rotary_dim: int | None = None  # if not head_dim
    is_neox: bool = True

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * (self.kv_dtype or self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Shape:
    """One batch: per request its parts in prompt order, ("chunk", id, n), ("text", n) or ("new", n).

    Chunks with the same id share slots. New text is computed by `link_extend`; a decode has none.
    window: of a prefill's rows; the rows of a decode contain only the tokens within it.
    sinks: whether heads have sinks.
    layers: how many of a model's layers share this decode's rows, which `window_rows` lists: it is timed, too.
    """

    name: str
    family: str
    op: str
    requests: list
    heads: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of Dims that differ from the run's
    window: int | None = None
    sinks: bool = False
    logit_cap: float | None = None
    layers: int | None = None


@dataclasses.dataclass
class Problem:
    """The tensors of a shape. Several caches of one layout are used in turns, so that L2 is cold for each."""

    shape: Shape
    dims: Dims
    tables: dict[str, torch.Tensor]
    segment_ids: torch.Tensor | None
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    tokens: int
    cos_sin_cache: torch.Tensor
    sinks: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Of keys and values that one launch has to read, each slot once."""
        return self.tokens * self.dims.token_bytes

    @property
    def bs(self) -> int:
        return len(self.shape.requests)

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows of the batch, which all layers share."""
        if self.shape.op == "decode":
            return Rows(**self.tables, segment_ids=self.segment_ids)
        return ExtendRows(**self.tables, max_extend_len=int(self.tables["qo_indptr"].diff().max()))

    @functools.cached_property
    def layers(self) -> list[Layer]:
        """A layer for each of the caches."""
        return [
            Layer(
                num_qo_heads=self.dims.num_qo_heads,
                dtype=self.dims.dtype,
                k_cache=k_cache,
                v_cache=v_cache,
                cos_sin_cache=self.cos_sin_cache,
                is_neox=self.dims.is_neox,
                sm_scale=self.dims.head_dim**-0.5,
                window=self.shape.window,
                sinks=self.sinks,
                logit_cap=self.shape.logit_cap,
            )
            for k_cache, v_cache in self.caches
        ]

    def quantised(self, kv_dtype: torch.dtype) -> "Problem":
        """The same with keys and values rounded to kv_dtype."""
        caches = [(k_cache.to(kv_dtype), v_cache.to(kv_dtype)) for k_cache, v_cache in self.caches]
        return dataclasses.replace(self, caches=caches, dims=dataclasses.replace(self.dims, kv_dtype=kv_dtype))


def build(shape: Shape, dims: Dims, seed: int, cold_bytes: int) -> Problem:
    """The tensors of a shape, with as many caches as it takes to read cold_bytes before one is read again."""
    dims = dataclasses.replace(dims, **shape.heads)
    gen = torch.Generator().manual_seed(seed)
    chunk_slots: dict[object, torch.Tensor] = {}
    chunk_ids: dict[object, int] = {}
    num_slots, longest = 0, 0
    slots: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    new_positions: list[torch.Tensor] = []
    tables: list[tuple[list[int], ...]] = []
    kv_lens, qo_lens = [], []
    for request in shape.requests:
        at = 0
        ends: list[int] = []
        offsets: list[int] = []
        ids: list[int] = []
        rows: dict[str, list] = dict(chunk=[], text=[], new=[])
        for kind, *which, n in request:
            if kind != "chunk" or which[0] not in chunk_slots:
                fresh = torch.arange(num_slots, num_slots + n)
                num_slots += n
            if kind == "chunk":
                fresh = chunk_slots.setdefault(which[0], fresh)
                ends.append((ends or [0])[-1] + n)
                offsets.append(at)
                ids.append(chunk_ids.setdefault(which[0], len(chunk_ids)))
            rows[kind].append((fresh, torch.arange(at, at + n)))
            at += n
        longest = max(longest, at)
        parts = rows["chunk"] + rows["text"] + rows["new"]
        slots += [s for s, _ in parts]
        positions += [p for _, p in parts]
        new_positions += [p for _, p in rows["new"]]
        kv_lens.append(sum(len(s) for s, _ in parts))
        qo_lens.append(sum(len(p) for _, p in rows["new"]))
        tables.append((ends, offsets, ids))
    width = max(1, *(len(ends) for ends, *_ in tables))
    pad = [row + [0] * (width - len(row)) for lists in tables for row in lists]
    host = dict(
        kv_indptr=torch.tensor([0, *kv_lens]).cumsum(0),
        kv_indices=torch.randperm(num_slots, generator=gen)[torch.cat(slots)],
        num_segments=torch.tensor([len(ends) for ends, *_ in tables]),
        segment_ends=torch.tensor(pad[0::3]),
        segment_offsets=torch.tensor(pad[1::3]),
    )
    if shape.op == "extend":
        host["qo_indptr"] = torch.tensor([0, *qo_lens]).cumsum(0)
        host["q_positions"] = torch.cat(new_positions)
        host["kv_positions"] = torch.cat(positions)
    rotary_dim = dims.rotary_dim or dims.head_dim
    inv_freq = 500000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    device_gen = torch.Generator(dims.device).manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, dims.head_dim, generator=device_gen, dtype=dims.dtype, device=dims.device)

    q = randn(sum(qo_lens) if shape.op == "extend" else len(kv_lens), dims.num_qo_heads)
    if shape.logit_cap is not None:
        q *= shape.logit_cap / 8  # the scores' standard deviation: without the cap, results would be others
    sets = max(1, -(-cold_bytes // (num_slots * dims.token_bytes)))
    return Problem(
        shape, dims,
        {name: tensor.to(torch.int32).to(dims.device) for name, tensor in host.items()},
        torch.tensor(pad[2::3], dtype=torch.int32, device=dims.device),
        q,
        [(randn(num_slots, dims.num_kv_heads), randn(num_slots, dims.num_kv_heads)) for _ in range(sets)],
        num_slots,
        rope_cos_sin(inv_freq, longest + 1).to(dims.device),
        torch.linspace(-2, 4, dims.num_qo_heads, device=dims.device).to(dims.dtype) if shape.sinks else None,
    )  # fmt: skip
