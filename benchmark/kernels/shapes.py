"""The prompts of the measured batches, by family."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from benchmark.kernels.problem import Shape

FAMILIES = ("decode", "extend", "spans", "shared", "ragged", "heads", "windows", "gemma", "ropes", "rows")
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
GPT_OSS = dict(num_qo_heads=64, num_kv_heads=8, head_dim=64)
GEMMA_2 = GEMMA_3 = dict(num_qo_heads=16, num_kv_heads=8, head_dim=256)
GEMMA_4 = dict(num_qo_heads=32, num_kv_heads=4, head_dim=512)  # of layers without a window
ROPES = {
    "GLM-4.5": dict(num_qo_heads=96, num_kv_heads=8, head_dim=128, rotary_dim=64),
    "GLM-4 9B": dict(num_qo_heads=32, num_kv_heads=2, head_dim=128, rotary_dim=64, is_neox=False),
    "Command R": dict(num_qo_heads=64, num_kv_heads=8, head_dim=128, is_neox=False),
}


def shapes(families: Iterable[str], *, tiny: bool = False, seed: int = 0) -> list[Shape]:
    """The shapes of these families; tiny ones of the same kinds for a machine without a GPU."""
    rng = random.Random(seed)
    of = dict(
        decode=_decode, extend=_extend, spans=_spans, shared=_shared, ragged=_ragged, heads=_heads, windows=_windows,
        gemma=_gemma, ropes=_ropes, rows=_rows,
    )  # fmt: skip
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
    heads = dict(num_qo_heads=4, num_kv_heads=2) if tiny else GPT_OSS
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


def _gemma(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    """Logit caps, and heads of 256 and 512."""
    yield from _model("Gemma 2 9B", "gemma", GEMMA_2, tiny, count=3, logit_cap=50.0)
    for window in (None, 8 if tiny else 1024):
        yield from _model("Gemma 3 12B", "gemma", GEMMA_3, tiny, window=window)
    yield from _model("Gemma 4 31B", "gemma", GEMMA_4, tiny)


def _ropes(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    """Rotations of half a head, and of neighbouring dimensions."""
    for model, heads in ROPES.items():
        yield from _model(model, "ropes", heads, tiny)


def _rows(rng: random.Random, tiny: bool) -> Iterator[Shape]:
    """Rows that a model's layers with a window share in a decode step."""
    models = [("gpt-oss 20B", GPT_OSS, 128, True, 12), ("Gemma 3 12B", GEMMA_3, 1024, False, 40)]
    for model, heads, window, sinks, layers in models:
        heads, window = (_tiny(heads), 8) if tiny else (heads, window)
        for bs in (2,) if tiny else (1, 32, 128):
            requests = [_seen(b, window) for b in range(bs)]
            name = f"{model}, window {window}, batch {bs}"
            yield Shape(name, "rows", "decode", requests, heads, window, sinks=sinks, layers=layers)


def _model(
    model: str, family: str, heads: dict[str, Any], tiny: bool, *, count: int = 5, window: int | None = None, **of: Any
) -> Iterator[Shape]:
    """Decode and prefill in one kind of a model's layers.  of: other fields of `Shape`."""
    heads, length = (_tiny(heads), 16) if tiny else (heads, 2048)
    for bs in (2,) if tiny else (1, 32):
        requests = [_seen(b, window) if window else [*_chunks(b, count, length), ("text", 64)] for b in range(bs)]
        name = f"{model}, window {window}" if window else f"{model}, {count}x{length}+64"
        yield Shape(f"{name}, batch {bs}", family, "decode", requests, heads, **of)
    for bs, tail in [(2, 4)] if tiny else [(1, 32), (16, 128)]:
        requests = [[*_chunks(b, count, length), ("new", tail)] for b in range(bs)]
        name = f"{model}, {count}x{length}, batch {bs}, {tail} new" + (f", window {window}" if window else "")
        yield Shape(name, family, "extend", requests, heads, window, **of)


def _tiny(heads: dict[str, Any]) -> dict[str, Any]:
    """The same with one KV head."""
    return heads | dict(num_qo_heads=heads["num_qo_heads"] // heads["num_kv_heads"], num_kv_heads=1)


def _seen(b: int, window: int) -> list[tuple]:
    """What a request sees within a window: of two chunks and of text."""
    return [("chunk", (b, 0), window // 2), ("chunk", (b, 1), window // 4), ("text", window // 4)]


def _chunks(b, count, length):
    return [("chunk", (b, i), length) for i in range(count)]
