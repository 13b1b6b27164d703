"""Measure the cost of copying a prompt's chunks and rotating their keys, all layers at once, instead of linking them.

    python -m benchmark.kernels.copies          # on a GPU

Times are milliseconds: of the work on the GPU, and wall time of the call. GB (1e9 bytes) counts reads and writes; the
header has the bandwidth of a plain copy of device memory. Results are checked against the torch implementation first.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from benchmark.kernels import report, timing
from sgl_kernel_lazy import get_implementation, rope_cos_sin
from sgl_kernel_lazy.caches import Caches

NUM_KV_HEADS, HEAD_DIM, CHUNK_LEN = 8, 128, 2048
TOKENS = (2048, 10240, 40960)


def measure(
    num_tokens: int, layers: int, dtype: torch.dtype, device: torch.device, repetitions: int
) -> dict[str, float]:
    """Copies of `num_tokens` KV tokens in chunks of CHUNK_LEN between shuffled slots, as a row of results."""
    gen = torch.Generator(device).manual_seed(0)
    size = (2 * num_tokens + 1, NUM_KV_HEADS, HEAD_DIM)
    k_caches, v_caches = (
        [torch.randn(size, dtype=dtype, device=device, generator=gen) for _ in range(layers)] for _ in "kv"
    )
    slots = torch.randperm(2 * num_tokens, device=device, generator=gen)
    source, target = slots[:num_tokens], slots[num_tokens:]
    offsets = torch.arange(num_tokens, device=device) // CHUNK_LEN * CHUNK_LEN
    inv_freq = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    table = rope_cos_sin(inv_freq, num_tokens).to(device)

    caches = Caches(k_caches=k_caches, v_caches=v_caches, cos_sin_cache=table, is_neox=True)

    def copy(name: str) -> None:
        get_implementation(name).copy_rotated(caches, source, target, offsets)

    name = "triton" if device.type == "cuda" else "torch"
    copy(name)
    results = [cache[target].clone() for cache in (k_caches[-1], v_caches[-1])]
    copy("torch")
    for result, cache in zip(results, (k_caches[-1], v_caches[-1]), strict=True):
        torch.testing.assert_close(result, cache[target])

    walls, works = [], []
    for _ in range(repetitions):
        timing.synchronize()
        begin = time.perf_counter()
        work = timing.event_ms(lambda: copy(name)) if device.type == "cuda" else timing.wall_ms(lambda: copy(name))
        works.append(work)
        walls.append((time.perf_counter() - begin) * 1e3)
    moved = 2 * 2 * layers * num_tokens * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    median = timing.quantiles(works)
    wall_ms = timing.quantiles(walls)["p50"]
    return dict(tokens=num_tokens, layers=layers, **median, wall_ms=wall_ms, gb_per_s=moved / median["p50"] / 1e6)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.kernels.copies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--commit", help="recorded in the header, where git cannot tell")
    parser.add_argument("--quick", action="store_true", help="few tokens, layers and repetitions")
    given = parser.parse_args(arguments)
    given.seed = 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = report.header(given, device) | dict(command=" ".join(sys.argv))
    facts |= timing.bandwidth(3 if given.quick else 30)
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    print("tokens  layers    p20 ms    p50 ms    p80 ms   wall ms     GB/s")
    for num_tokens in TOKENS[:1] if given.quick else TOKENS:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        layers, repetitions = (2, 3) if given.quick else (32, 30)
        row = measure(num_tokens, layers, dtype, device, repetitions)
        print(
            f"{row['tokens']:6} {row['layers']:7} {row['p20']:9.3f} {row['p50']:9.3f} {row['p80']:9.3f} "
            f"{row['wall_ms']:9.3f} {row['gb_per_s']:8.0f}"
        )


if __name__ == "__main__":
    main()
