"""Check the Triton kernels on this GPU against the formula, then time them; nothing is timed until all checks pass.

    python benchmark/kernel/check_and_bench.py --out result.json            # checks, then the tables
    python benchmark/kernel/check_and_bench.py --out result.json --sweep    # also other tile sizes and depths

Times are CUDA-graph replays with a cold L2 (triton.testing.do_bench), in milliseconds: p20, p50, p80. `plain` is the
same call with num_segments = 0, which reads the same bytes and turns nothing. GB is 1e9 bytes, of keys and values only;
TF/s counts every (row, entry) pair, seen or not.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import pathlib
import subprocess
import sys
import time

import torch
import triton

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "sgl-kernel-lazy"), str(ROOT / "test" / "kernel")]

import cases  # noqa: E402
import ragged  # noqa: E402

from sgl_kernel_lazy import get_implementation, rope_cos_sin  # noqa: E402

kernels = get_implementation("triton")
decode_module = importlib.import_module("sgl_kernel_lazy.triton.link_decode")
extend_module = importlib.import_module("sgl_kernel_lazy.triton.link_extend")

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE, MAX_POSITION, SEED = 32, 8, 128, torch.bfloat16, 131072, 0
PROMPTS = {"5x2048+64": (5, 2048, 64), "10x512+64": (10, 512, 64), "20x128+64": (20, 128, 64)}
SWEEPS = {
    "decode": (decode_module, dict(TILE_BYTES=[8192, 16384], NUM_STAGES=[3, 5, 7, 9], FILL=[2, 4], FINE=[8, 16])),
    "extend": (extend_module, dict(TILE_BYTES=[16384, 32768], NUM_STAGES=[3, 5, 7], MAX_BLOCK_M=[64, 128])),
}


def check_all() -> int:
    """Every test case in every dtype, two larger shapes, and graph replay; returns how many checks passed."""
    done = 0
    large = ragged.Shape(32, 8, 128, 128, dtype=DTYPE, bs=3, max_chunk_len=700, max_text_len=64, max_position=8192)
    wide = dataclasses.replace(large, num_qo_heads=28, num_kv_heads=4, max_segments=12, is_neox=False)
    shapes = [(name, *case) for name, case in cases.CASES.items()]
    shapes += [(f"large {seed}", seed, shape, None) for seed in (1, 2) for shape in (large, wide)]
    for name, seed, shape, layout in shapes:
        for dtype in cases.DTYPES:
            batch = ragged.random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)
            for op in ("decode", "extend"):
                try:
                    ragged.check(op, kernels, batch)
                except Exception as error:
                    raise RuntimeError(f"link_{op}, case {name!r}, {dtype}") from error
                done += 1
    return done + check_replay(large)


def check_replay(shape) -> int:
    """One decode graph, captured over an all-empty batch, replayed over batches that differ in every length."""
    batches = [ragged.random_batch(seed, dataclasses.replace(shape, max_segments=seed + 1)) for seed in range(4)]
    inputs = [dict(b.decode, kv_indices=b.decode["kv_indices"].long()) for b in batches]
    static = {}
    for key, tensor in inputs[0].items():
        sizes = [max(sizes) for sizes in zip(*(i[key].shape for i in inputs), strict=True)]
        static[key] = torch.zeros(sizes, dtype=tensor.dtype, device="cuda")
    heads = (shape.num_qo_heads, shape.num_kv_heads)
    workspace = kernels.decode_workspace(shape.bs + 7, *heads, shape.head_dim, "cuda").fill_(ragged.NAN)
    out = torch.full_like(static["q"], ragged.NAN)
    options = dict(batches[0].options, workspace=workspace, out=out)
    kernels.link_decode(**static, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.link_decode(**static, **options)
    for batch, values in zip(batches, inputs, strict=True):
        for key, tensor in values.items():
            static[key][tuple(slice(n) for n in tensor.shape)] = tensor
        graph.replay()
        exact, plain = (ragged.naive("decode", batch, dtype)[0] for dtype in (torch.float64, shape.dtype))
        error, budget = ragged.relative_error(out, exact), 2 * ragged.relative_error(plain, exact)
        if not error <= budget:
            raise RuntimeError(f"graph replay: error {error:.2e} is over the budget {budget:.2e}")
    return len(batches)


def inputs_for(bs: int, prompt: tuple, tail: int = 0, spans: int = 1):
    """Arguments of `link_extend` for bs equal prompts, each over its own shuffled slots.

    prompt: (number of chunks, tokens of each, cached text behind them); tail new tokens follow in `spans` equal parts,
    the last at the end and the others each before a chunk.
    """
    count, length, text = prompt
    kv_length = count * length + text + tail
    gen = torch.Generator("cuda").manual_seed(SEED)
    size = (bs * kv_length, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(size, generator=gen, device="cuda", dtype=DTYPE) for _ in range(2))
    parts = [tail // spans + (i >= spans - tail % spans) for i in range(spans)]
    position, chunk_positions, new_positions, offsets = 0, [], [], []
    for i in range(count):
        if i < spans - 1:
            new_positions += range(position, position + parts[i])
            position += parts[i]
        offsets.append(position)
        chunk_positions += range(position, position + length)
        position += length
    text_positions = list(range(position, position + text))
    position += text
    new_positions += range(position, position + parts[-1])
    row = torch.tensor(chunk_positions + text_positions + new_positions, dtype=torch.int32)
    inv_freq = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    return {
        "q": torch.randn(bs * max(tail, 1), NUM_QO_HEADS, HEAD_DIM, generator=gen, device="cuda", dtype=DTYPE),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "qo_indptr": torch.arange(bs + 1, dtype=torch.int32, device="cuda") * tail,
        "q_positions": torch.tensor(new_positions, dtype=torch.int64).repeat(bs).cuda(),
        "kv_indptr": torch.arange(bs + 1, dtype=torch.int32, device="cuda") * kv_length,
        "kv_indices": torch.randperm(bs * kv_length, generator=gen, device="cuda"),
        "kv_positions": row.repeat(bs).cuda(),
        "num_segments": torch.full((bs,), count, dtype=torch.int32, device="cuda"),
        "segment_ends": (torch.arange(1, count + 1, dtype=torch.int32) * length).repeat(bs, 1).cuda(),
        "segment_offsets": torch.tensor(offsets, dtype=torch.int32).repeat(bs, 1).cuda(),
        "cos_sin_cache": rope_cos_sin(inv_freq, MAX_POSITION).cuda(),
    }  # fmt: skip


def time_call(call) -> list[float]:
    """p20, p50, p80 in milliseconds of the call replayed from a CUDA graph, with a cold L2."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return triton.testing.do_bench(graph.replay, warmup=50, rep=200, quantiles=[0.2, 0.5, 0.8])


def bench(op: str, name: str, bs: int, prompt: tuple, tail: int = 0, spans: int = 1, plain: bool = True) -> dict:
    """One row of the table."""
    inputs = inputs_for(bs, prompt, tail, spans)
    options = dict(is_neox=True, sm_scale=HEAD_DIM**-0.5, out=torch.empty_like(inputs["q"]))
    if op == "decode":
        inputs = {k: v for k, v in inputs.items() if k not in ("qo_indptr", "q_positions", "kv_positions")}
        options["workspace"] = kernels.decode_workspace(bs, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, "cuda")
    else:
        options["max_extend_len"] = tail
    call = getattr(kernels, f"link_{op}")
    p20, p50, p80 = time_call(lambda: call(**inputs, **options))
    tokens = len(inputs["kv_indices"])
    row = dict(op=op, prompt=name, bs=bs, tail=tail, p20=p20, p50=p50, p80=p80)
    row["gb_per_s"] = tokens * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize * 2 / p50 / 1e6
    row["tflops"] = 4 * tokens * max(tail, 1) * NUM_QO_HEADS * HEAD_DIM / p50 / 1e9
    if plain:
        row["plain"] = time_call(lambda: call(**dict(inputs, num_segments=inputs["num_segments"] * 0), **options))[1]
    return row


def table(title: str, calls) -> list[dict]:
    columns = ("p20", "p50", "p80", "plain")
    head = " ".join(f"{name:>8}" for name in columns)
    print(f"\n{title}\n{'prompt':>14} {'bs':>4} {'tail':>5} {head} {'GB/s':>6} {'TF/s':>6}")
    rows = []
    for call in calls:
        row = bench(**call)
        rows.append(row)
        times = " ".join(f"{row.get(key, float('nan')):8.4f}" for key in columns)
        print(
            f"{row['prompt']:>14} {row['bs']:4} {row['tail']:5} {times} {row['gb_per_s']:6.0f} {row['tflops']:6.1f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    return rows


def sweep(op: str) -> list[dict]:
    """Every combination of the settings in SWEEPS over a few shapes, best total first."""
    module, choices = SWEEPS[op]
    before = {name: getattr(module, name) for name in choices}
    if op == "decode":
        calls = [(name, bs, prompt, 0) for bs in (1, 32) for name, prompt in PROMPTS.items()]
    else:
        calls = [("5x2048", bs, (5, 2048, 0), tail) for bs, tail in ((1, 32), (1, 512), (16, 128))]
        calls.append(("20x128", 1, (20, 128, 0), 51))
    rows = []
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values, strict=True))
        for name, value in settings.items():
            setattr(module, name, value)
        try:
            times = [bench(op, *call, plain=False)["p50"] for call in calls]
        except triton.runtime.errors.OutOfResources:
            continue
        rows.append(dict(op=op, settings=settings, times=times))
    for name, value in before.items():
        setattr(module, name, value)
    best = [min(times) for times in zip(*(row["times"] for row in rows), strict=True)]
    for row in rows:
        row["slowdown"] = sum(t / b for t, b in zip(row["times"], best, strict=True)) / len(best)
    rows.sort(key=lambda row: row["slowdown"])
    print(f"\n{op}: mean slowdown against the best of each shape; shapes {[(c[0], c[1], c[3]) for c in calls]}")
    for row in rows[:12]:
        print(f"{row['slowdown']:6.3f} {row['settings']} {[round(t, 4) for t in row['times']]}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="where to write the results as JSON")
    parser.add_argument("--sweep", action="store_true", help="also time other tile sizes and pipeline depths")
    parser.add_argument("--skip-checks", action="store_true", help="time without checking first")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result = dict(
        gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, commit=commit, seed=SEED
    )
    print(result)
    if not args.skip_checks:
        begin = time.time()
        result["checks"] = check_all()
        print(f"{result['checks']} checks passed in {time.time() - begin:.0f} s", flush=True)
    decode = [dict(op="decode", name=n, bs=bs, prompt=p) for n, p in PROMPTS.items() for bs in (1, 8, 32, 128)]
    extend = [
        dict(op="extend", name="5x2048", bs=bs, prompt=(5, 2048, 0), tail=tail)
        for bs in (1, 4, 16)
        for tail in (32, 128, 512)
    ]
    extend.append(dict(op="extend", name="20x128, spans", bs=1, prompt=(20, 128, 0), tail=51, spans=20))
    extend.append(dict(op="extend", name="plain prefill", bs=1, prompt=(0, 0, 0), tail=8192, plain=False))
    result["decode"] = table("link_decode", decode)
    result["extend"] = table("link_extend", extend)
    pathlib.Path(args.out).write_text(json.dumps(result, indent=1))
    if args.sweep:
        result["sweep"] = [*sweep("decode"), *sweep("extend")]
        pathlib.Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
