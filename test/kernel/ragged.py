"""Seeded, ragged batches in the layout of the kernels' contract, and the error metric of the kernel tests."""

import dataclasses
import random

import torch

from oracle.linked_attention import naive_link_decode, naive_link_extend
from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rope import rope_cos_sin, rotate_queries
from sgl_kernel_lazy.rows import ExtendRows, Rows
from sgl_kernel_lazy.validation import FLOATS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
GARBAGE = 2**30 + 7


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of a batch: heads, dimensions, pairing, dtype, the lengths of its prompts, and the local position at which
    stored chunks begin, larger than 0 if they were computed after a preamble."""

    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    is_neox: bool = True
    dtype: torch.dtype = torch.float32
    bs: int = 3
    max_segments: int = 4
    max_chunk_len: int = 40
    max_text_len: int = 12
    max_position: int = 2048
    preamble: int = 0


@dataclasses.dataclass
class Batch:
    """Tensor arguments of both ops, and each request's prompt with unrotated keys."""

    shape: Shape
    extend: dict
    segment_ids: torch.Tensor
    options: dict
    prompts: list

    @property
    def decode(self) -> dict:
        """Arguments of `link_decode`: the last query row of each request, which sees every KV token."""
        skip = ("q", "qo_indptr", "q_positions", "kv_positions")
        return dict(q=self.decode_q, **{k: v for k, v in self.extend.items() if k not in skip})

    @property
    def decode_rows(self) -> Rows:
        """What `plan_decode` and `link_decode` take."""
        return Rows(**_taken(Rows, self.decode), segment_ids=self.segment_ids)

    @property
    def decode_q(self):
        rows = (self.extend["qo_indptr"][1:] - 1).clamp_min(0).long()
        return self.extend["q"][rows] if len(self.extend["q"]) else self.extend["q"].new_ones(0)

    @property
    def max_extend_len(self) -> int:
        return int(self.extend["qo_indptr"].diff().max()) if self.shape.bs else 0


def packed(**arguments) -> dict:
    """Arguments of an op, with those that describe its layer and its rows as one each, which check them."""
    q, k_cache = arguments["q"], arguments["k_cache"]
    dtype = k_cache.dtype if k_cache.dtype in FLOATS else q.dtype
    layer = dict(num_qo_heads=q.shape[1], dtype=dtype) | _taken(Layer, arguments)
    rows = _taken(ExtendRows, arguments)
    return arguments | {"layer": Layer(**layer), "rows": (ExtendRows if "qo_indptr" in rows else Rows)(**rows)}


def _taken(cls, arguments: dict) -> dict:
    return {field.name: arguments.pop(field.name) for field in dataclasses.fields(cls) if field.name in arguments}


def random_batch(seed: int, shape: Shape = Shape(), layout: list | None = None) -> Batch:
    """Prompts of text and chunks in which some text is new: the new text gives the queries, everything else is cached.

    layout: per request a list of ("text" | "new" | "chunk" | "gap", length or chunk id), random if not given. A gap
    advances the position without a KV token. A chunk id names one of the chunks that all requests share; (chunk id,
    indices) keeps only these of its tokens, at their places in the prompt. There are twice as many slots as needed, in
    shuffled order; unused ones hold NaN.
    """
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    chunk_lens = [1, rng.randint(1, shape.max_chunk_len), shape.max_chunk_len, rng.randint(1, shape.max_chunk_len)]
    layout = layout or [random_layout(rng, shape, len(chunk_lens)) for _ in range(shape.bs)]
    cos_sin_cache = rope_cos_sin(
        10000.0 ** -(torch.arange(0, shape.rotary_dim, 2).double() / shape.rotary_dim),
        shape.max_position,
        num_negative=shape.preamble,
    )

    def randn(n, heads):
        return torch.randn(n, heads, shape.head_dim, generator=gen, dtype=torch.float64).to(shape.dtype).double()

    def rotated(x, positions):
        return rotate_queries(x, positions, cos_sin_cache, is_neox=shape.is_neox)

    chunks = [(randn(n, shape.num_kv_heads), randn(n, shape.num_kv_heads)) for n in chunk_lens]
    stored_k = [rotated(k, shape.preamble + torch.arange(len(k))) for k, _ in chunks]
    stored_v = [v for _, v in chunks]
    chunk_slots, next_slot = [], 0
    for n in chunk_lens:
        chunk_slots.append(list(range(next_slot, next_slot + n)))
        next_slot += n

    q, q_positions, kv_rows, kv_positions, tables, prompts = [], [], [], [], [], []
    segment_ids = {}
    for request in layout:
        position, parts = 0, []
        for kind, what in request:
            n = chunk_lens[what[0] if isinstance(what, tuple) else what] if kind == "chunk" else what
            parts.append((kind, what, torch.arange(position, position + n)))
            position += n
        ends, offsets, ids, slots, positions = [], [], [], [], []
        raw_k, raw_v, raw_q, raw_q_positions = [], [], [], []
        for kind, what, at in parts:
            if kind == "chunk":
                chunk, kept = what if isinstance(what, tuple) else (what, range(len(at)))
                kept = list(kept)
                slots += [chunk_slots[chunk][i] for i in kept]
                positions += at[kept].tolist()
                ends.append(len(slots))
                offsets.append((int(at[0]) - shape.preamble) % len(cos_sin_cache))
                ids.append(segment_ids.setdefault(what, 7 * len(segment_ids)))
                raw_k.append(chunks[chunk][0][kept])
                raw_v.append(chunks[chunk][1][kept])
        for wanted in ("text", "new"):
            for kind, _, at in parts:
                if kind != wanted:
                    continue
                k, v = randn(len(at), shape.num_kv_heads), randn(len(at), shape.num_kv_heads)
                stored_k.append(rotated(k, at))
                stored_v.append(v)
                slots += range(next_slot, next_slot + len(at))
                next_slot += len(at)
                positions += at.tolist()
                raw_k.append(k)
                raw_v.append(v)
                if kind == "new":
                    raw_q.append(randn(len(at), shape.num_qo_heads))
                    raw_q_positions += at.tolist()
        empty = torch.zeros(0, shape.num_kv_heads, shape.head_dim, dtype=torch.float64)
        raw_q = torch.cat([torch.zeros(0, shape.num_qo_heads, shape.head_dim, dtype=torch.float64), *raw_q])
        at = torch.tensor(raw_q_positions, dtype=torch.long)
        q.append(rotated(raw_q, at))
        q_positions.append(at)
        kv_rows.append(slots)
        kv_positions += positions
        tables.append((ends, offsets, ids))
        prompts.append(
            dict(
                q=raw_q,
                q_positions=at,
                k=torch.cat([empty, *raw_k]),
                v=torch.cat([empty, *raw_v]),
                positions=torch.tensor(positions, dtype=torch.long),
            )  # fmt: skip
        )

    num_slots = 2 * next_slot + 2
    shuffled = torch.randperm(num_slots, generator=gen)
    caches = []
    for stored in (stored_k, stored_v):
        cache = torch.full((num_slots, shape.num_kv_heads, shape.head_dim), NAN, dtype=torch.float64)
        cache[shuffled[:next_slot]] = torch.cat(stored) if stored else cache[:0]
        caches.append(cache.to(shape.dtype).to(DEVICE))
    width = max(1, *(len(ends) for ends, *_ in tables)) + rng.randint(0, 2)
    segments = torch.full((3, len(layout), width), GARBAGE, dtype=torch.int32)
    for b, lists in enumerate(tables):
        segments[:, b, : len(lists[0])] = torch.tensor(lists, dtype=torch.int32)
    indices = [int(shuffled[s]) for row in kv_rows for s in row]
    index_dtype = rng.choice([torch.int32, torch.int64])
    extend = dict(
        q=torch.cat(q).to(shape.dtype),
        k_cache=caches[0],
        v_cache=caches[1],
        qo_indptr=_indptr(len(rows) for rows in q),
        q_positions=torch.cat(q_positions).to(rng.choice([torch.int32, torch.int64])),
        kv_indptr=_indptr(len(row) for row in kv_rows),
        kv_indices=torch.tensor(indices + [GARBAGE] * 5, dtype=index_dtype),
        kv_positions=torch.tensor(kv_positions + [-1] * 5, dtype=torch.int32),
        num_segments=torch.tensor([len(ends) for ends, *_ in tables], dtype=torch.int32),
        segment_ends=segments[0],
        segment_offsets=segments[1],
        cos_sin_cache=cos_sin_cache,
    )
    options = dict(is_neox=shape.is_neox, sm_scale=shape.head_dim**-0.5)
    on_device = {name: t.to(DEVICE) for name, t in extend.items()}
    return Batch(shape, on_device, segments[2].to(DEVICE), options, prompts)


def random_layout(rng: random.Random, shape: Shape, num_chunks: int) -> list:
    """One prompt: cached text first, then chunks with text between them, whose new parts begin anywhere."""
    count = rng.choice([0, 1, rng.randint(0, shape.max_segments), shape.max_segments])
    new_from = rng.randint(0, count)
    layout = [("text", rng.randint(0, shape.max_text_len))]
    for i in range(count):
        layout.append(("chunk", rng.randrange(num_chunks)))
        layout.append(("new" if i >= new_from else "text", rng.randint(0, 3)))
    return layout + [("new", rng.randint(1, shape.max_text_len))]


def add_sinks(batch: Batch) -> Batch:
    """The batch with a sink per head, from far below to far above its scores; in bf16, as in models."""
    batch.options["sinks"] = torch.linspace(-8, 8, batch.shape.num_qo_heads).bfloat16().to(DEVICE)
    return batch


def cap(batch: Batch) -> Batch:
    """The batch with larger scores, and a logit cap that changes most of them."""
    batch.options |= dict(logit_cap=1.5, sm_scale=3 * batch.options["sm_scale"])
    return batch


def quantise(batch: Batch, fp8: torch.dtype, k_scale: float = 1.0, v_scale: float = 1.0) -> dict:
    """Arguments that replace the batch's caches by fp8 ones; the batch itself gets the dequantised values.

    Keys and values are divided by their scales, powers of two, before they are rounded.
    """
    given = {"sm_scale": batch.options["sm_scale"] * k_scale, "v_scale": v_scale}
    for name, scale in (("k_cache", k_scale), ("v_cache", v_scale)):
        given[name] = (batch.extend[name] / scale).to(fp8)
        batch.extend[name] = given[name].to(batch.shape.dtype) * scale
    return given


def naive(op: str, batch: Batch, dtype: torch.dtype):
    """(out, lse) of the formula in this dtype; rows of the batch are in the op's order."""
    if op == "decode":
        return naive_link_decode(**batch.decode, **batch.options, dtype=dtype)
    return naive_link_extend(**batch.extend, **batch.options, dtype=dtype)


def run(op: str, implementation, batch: Batch, **given):
    """(out, lse) of an implementation, into outputs and a workspace that start as NaN."""
    inputs = batch.decode if op == "decode" else batch.extend
    options = dict(batch.options)
    out = torch.full_like(inputs["q"], NAN)
    lse = torch.full(out.shape[:2], NAN, dtype=torch.float32, device=DEVICE)
    if op == "decode":
        dims = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), sizes(batch), strict=True))
        width = inputs["segment_ends"].shape[1]
        workspace = implementation.decode_workspace(len(out), width, **dims, device=torch.device(DEVICE))
        options["workspace"] = workspace.fill_(NAN) if workspace is not None else None
        inputs["segment_ids"] = batch.segment_ids
        implementation.plan_decode(workspace, batch.decode_rows, **dims)
    else:
        options["max_extend_len"] = batch.max_extend_len
    result = getattr(implementation, f"link_{op}")(**packed(**{**inputs, **options, "out": out, "lse": lse, **given}))
    return result, lse


def sizes(batch: Batch) -> tuple[int, int, int]:
    """num_qo_heads, num_kv_heads and head_dim."""
    return batch.shape.num_qo_heads, batch.shape.num_kv_heads, batch.shape.head_dim


def relative_error(out, reference) -> float:
    """Worst row of ||out - reference|| / ||reference||, in fp64; NaN fails any bound."""
    out, reference = out.double(), reference.double()
    if out.numel() == 0:
        return 0.0
    empty = reference.norm(dim=-1) == 0
    error = (out - reference).norm(dim=-1)
    error = torch.where(empty, torch.where(error == 0, 0.0, torch.inf), error / reference.norm(dim=-1))
    return NAN if error.isnan().any() else error.max().item()


def lse_error(lse, reference) -> float:
    """Largest |lse - reference|; -inf must match -inf."""
    lse, reference = lse.double(), reference.double()
    if lse.numel() == 0:
        return 0.0
    empty = reference == -torch.inf
    if not torch.equal(lse == -torch.inf, empty):
        return torch.inf
    error = (lse - reference)[~empty].abs()
    return NAN if error.isnan().any() else error.max().item() if error.numel() else 0.0


def check(op: str, implementation, batch: Batch, **given) -> None:
    """The error is at most twice that of plain PyTorch in the same dtype, both against the formula in fp64.

    given: arguments that replace the batch's, see `quantise`.

    With few rows plain PyTorch may be exact by luck, so the rounding of one result is always allowed.
    """
    exact, plain = naive(op, batch, torch.float64), naive(op, batch, batch.shape.dtype)
    before = {name: t.clone() for name, t in batch.extend.items()}
    out, lse = run(op, implementation, batch, **given)
    magnitude = exact[1].nan_to_num(neginf=0.0).abs().max().item() if exact[1].numel() else 0.0
    rounding = torch.finfo(batch.shape.dtype).eps
    out_budget = max(rounding, relative_error(plain[0], exact[0]))
    lse_budget = max(rounding * magnitude, lse_error(plain[1], exact[1]))
    assert relative_error(out, exact[0]) <= 2 * out_budget
    assert lse_error(lse, exact[1]) <= 2 * lse_budget
    for name, tensor in batch.extend.items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), f"{name} was changed"


def _indptr(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
