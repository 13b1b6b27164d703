"""The measured batches: prompts by family, and their tensors over shuffled slots."""

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sgl_kernel_lazy.rope import rope_cos_sin

FAMILIES = ("decode", "extend", "spans", "shared", "ragged", "heads", "windows")
# (chunks, tokens of each, pool, alpha, batch); alpha None: groups of 8 requests use the same chunks.
SHARED = (
    (5, 2048, 10000, 0.0, 64),
    (5, 2048, 1000, 0.67, 128),
    (5, 2048, 100, 1.1, 64),
    (5, 2048, 100, 1.1, 128),
    (5, 2048, None, None, 64),
    (5, 2048, None, None, 128),
    (20, 128, 2000, 0.67, 16),
    (20, 128, 2000, 0.67, 64),
    (20, 128, 2000, 0.67, 128),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Dims:
    """Heads, dtype and device of one run; by default the attention of an 8B Llama."""

    dtype: torch.dtype
    device: torch.device
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: torch.dtype | None = None  # of the caches, if it differs from dtype

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
    """

    name: str
    family: str
    op: str
    requests: list
    heads: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of Dims that differ from the run's
    window: int | None = None
    sinks: bool = False


@dataclasses.dataclass
class Problem:
    """The tensors of a shape. Several caches of one layout are used in turns, so that L2 is cold for each."""

    shape: Shape
    dims: Dims
    tables: dict[str, torch.Tensor]
    segment_ids: torch.Tensor
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

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        """The arguments of `plan_decode`."""
        names = ("kv_indptr", "kv_indices", "num_segments", "segment_ends", "segment_offsets")
        return {name: self.tables[name] for name in names} | dict(segment_ids=self.segment_ids)

    def quantised(self, kv_dtype: torch.dtype) -> "Problem":
        """The same with keys and values rounded to kv_dtype."""
        caches = [(k_cache.to(kv_dtype), v_cache.to(kv_dtype)) for k_cache, v_cache in self.caches]
        return dataclasses.replace(self, caches=caches, dims=dataclasses.replace(self.dims, kv_dtype=kv_dtype))


def shapes(families: Iterable[str], *, tiny: bool = False, seed: int = 0) -> list[Shape]:
    """The shapes of these families; tiny ones of the same kinds for a machine without a GPU."""
    rng = random.Random(seed)
    of = dict(
        decode=_decode, extend=_extend, spans=_spans, shared=_shared, ragged=_ragged, heads=_heads, windows=_windows
    )
    return [shape for family in families for shape in of[family](rng, tiny)]


def _decode(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    prompts = [(2, 16, 4)] if tiny else [(5, 2048, 64), (10, 512, 64), (20, 128, 64)]
    for count, length, tail in prompts:
        for bs in (1, 2) if tiny else (1, 8, 32, 64, 128):
            requests = [_chunks(b, count, length) + [("text", tail)] for b in range(bs)]
            yield Shape(f"{count}x{length}+{tail}, batch {bs}", "decode", "decode", requests)


def _extend(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    sizes = [(1, 4), (2, 4)] if tiny else [(1, 32), (4, 32), (16, 32), (1, 128), (4, 128), (16, 128), (16, 512)]
    count, length = (2, 16) if tiny else (5, 2048)
    for bs, tail in sizes:
        requests = [_chunks(b, count, length) + [("new", tail)] for b in range(bs)]
        yield Shape(f"{count}x{length}, batch {bs}, {tail} new", "extend", "extend", requests)


def _spans(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    count, length, tail = (4, 8, 5) if tiny else (20, 128, 51)
    chunks = _chunks(0, count, length)
    spread = []
    for i, chunk in enumerate(chunks):
        spread += [chunk, ("new", tail // count + (i >= count - tail % count))]
    yield Shape(f"{count}x{length}, {tail} new in 1 span", "spans", "extend", [chunks + [("new", tail)]])
    yield Shape(f"{count}x{length}, {tail} new in {count} spans", "spans", "extend", [spread])


def _shared(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    for count, length, pool, alpha, bs in [(2, 8, 4, 1.1, 3), (2, 8, None, None, 9)] if tiny else SHARED:
        if pool is None or alpha is None:
            kind = "groups of 8"
            drawn = [[(b // 8, i) for i in range(count)] for b in range(bs)]
        else:
            kind = f"pool {pool}, alpha {alpha:g}"
            gen = torch.Generator().manual_seed(rng.randrange(2**31))
            weights = torch.arange(1, pool + 1).double().pow(-alpha)
            drawn = [torch.multinomial(weights, count, generator=gen).tolist() for _ in range(bs)]
        for ids in drawn:
            rng.shuffle(ids)
        requests = [[*(("chunk", i, length) for i in ids), ("text", 4 if tiny else 64)] for ids in drawn]
        yield Shape(f"{count}x{length}, {kind}, batch {bs}", "shared", "decode", requests)


def _ragged(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    """Requests with and without chunks, of any length, some of which use the same chunk."""
    longest = 20 if tiny else 3000
    for op, bs in [("decode", 3), ("extend", 3)] if tiny else [("decode", 7), ("decode", 50), ("extend", 3)]:
        pool = [("chunk", i, rng.randint(1, longest)) for i in range(3 * bs)]
        requests = []
        for _ in range(bs):
            parts: list[tuple] = [("text", rng.randint(0, 50))]
            for chunk in rng.sample(pool, rng.choice([0, 1, rng.randint(1, min(20, len(pool)))])):
                parts += [chunk, ("new" if op == "extend" else "text", rng.randint(0, 3))]
            requests.append([*parts, ("new" if op == "extend" else "text", rng.randint(1, longest // 10))])
        yield Shape(f"ragged {op}, batch {bs}", "ragged", op, requests)


def _heads(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    """Prefills of unlike requests with one or two query heads per KV head, over up to 20 chunks of any length."""
    longest = 20 if tiny else 1500
    for num_qo_heads, num_kv_heads, bs in [(2, 2, 2)] if tiny else [(16, 8, 9), (32, 32, 5)]:
        for tail in (5,) if tiny else (150, 500):
            for draw in range(1 if tiny else 3):
                requests = []
                for b in range(bs):
                    parts: list[tuple] = [("text", rng.randint(0, 50))]
                    for i in range(rng.randint(0, 3 if tiny else 20)):
                        parts += [("chunk", (b, i), rng.randint(1, longest)), ("new", rng.randint(0, 3))]
                    requests.append([*parts, ("new", rng.randint(1, tail))])
                name = f"{num_qo_heads}/{num_kv_heads} heads, batch {bs}, up to {tail} new, draw {draw}"
                heads = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
                yield Shape(name, "heads", "extend", requests, heads)


def _windows(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    """The layers of gpt-oss, with a window and without."""
    window, count, length = (8, 2, 16) if tiny else (128, 5, 2048)
    heads = dict(num_qo_heads=4, num_kv_heads=2) if tiny else dict(num_qo_heads=64, num_kv_heads=8, head_dim=64)
    for bs in (2,) if tiny else (1, 8, 32, 128):
        seen = [[("chunk", (b, 0), window // 2), ("text", window // 2)] for b in range(bs)]
        yield Shape(f"window {window}, batch {bs}", "windows", "decode", seen, heads, sinks=True)
        whole = [_chunks(b, count, length) + [("text", 4)] for b in range(bs)]
        yield Shape(f"{count}x{length}+4 with sinks, batch {bs}", "windows", "decode", whole, heads, sinks=True)
    for bs, tail in [(2, 4)] if tiny else [(1, 32), (16, 32), (1, 512), (16, 512), (1, 4096)]:
        requests = [_chunks(b, count, length) + [("new", tail)] for b in range(bs)]
        for each in (window, None):
            name = f"{count}x{length}, batch {bs}, {tail} new, " + (f"window {each}" if each else "with sinks")
            yield Shape(name, "windows", "extend", requests, heads, each, sinks=True)


def _chunks(b, count, length):
    return [("chunk", (b, i), length) for i in range(count)]


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
    inv_freq = 500000.0 ** -(torch.arange(0, dims.head_dim, 2).double() / dims.head_dim)
    device_gen = torch.Generator(dims.device).manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, dims.head_dim, generator=device_gen, dtype=dims.dtype, device=dims.device)

    sets = max(1, -(-cold_bytes // (num_slots * dims.token_bytes)))
    return Problem(
        shape, dims,
        {name: tensor.to(torch.int32).to(dims.device) for name, tensor in host.items()},
        torch.tensor(pad[2::3], dtype=torch.int32, device=dims.device),
        randn(sum(qo_lens) if shape.op == "extend" else len(kv_lens), dims.num_qo_heads),
        [(randn(num_slots, dims.num_kv_heads), randn(num_slots, dims.num_kv_heads)) for _ in range(sets)],
        num_slots,
        rope_cos_sin(inv_freq, longest + 1).to(dims.device),
        torch.linspace(-2, 4, dims.num_qo_heads, device=dims.device).to(dims.dtype) if shape.sinks else None,
    )  # fmt: skip
