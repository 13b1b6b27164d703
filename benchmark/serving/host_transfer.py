"""Measures the bandwidth of SGLang's copies of chunks between host memory and a GPU.

    python -m benchmark.serving.host_transfer --out host_transfer.jsonl

Rows are GB/s for one prompt's KV: layer by layer to the GPU, as the server loads it, and all layers at once to the
host, with consecutive or scattered slots. `block_quota` limits the thread blocks of SGLang's copy kernels; `plain` is a
single copy of as many bytes. Needs a GPU.
"""

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from sglang.kernels.ops.kvcache import hicache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from benchmark.serving.environment import describe_environment
from benchmark.serving.models import SHAPES

POOL_TOKENS = 40_000
REPETITIONS = 20


def milliseconds(copy: Callable[[], object]) -> float:
    """Median GPU time."""
    times = []
    for _ in range(REPETITIONS + 2):  # the first ones compile and warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=10_240, help="of the prompt")
    parser.add_argument("--block-quotas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--commit", help="recorded in the results; where git is absent it has to be given")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.model]
    num_layers = shape["num_hidden_layers"]
    device_pool = MHATokenToKVPool(
        POOL_TOKENS, 1, torch.bfloat16, shape["num_key_value_heads"], shape["head_dim"], num_layers, "cuda", False
    )
    host_pool = MHATokenToKVPoolHost(device_pool, 2, 0, 1, "layer_first")
    num_bytes = args.tokens * host_pool.size_per_token
    generator = torch.Generator("cuda").manual_seed(0)

    def slots(scattered: bool) -> torch.Tensor:
        if scattered:
            return 1 + torch.randperm(POOL_TOKENS - 1, device="cuda", generator=generator)[: args.tokens]
        return torch.arange(1, 1 + args.tokens, device="cuda")

    def load(host: torch.Tensor, device: torch.Tensor) -> None:
        for layer in range(num_layers):
            host_pool.load_to_device_per_layer(device_pool, host, device, layer, "kernel")

    def back_up(host: torch.Tensor, device: torch.Tensor) -> None:
        host_pool.backup_from_device_all_layer(device_pool, host, device, "kernel")

    host_bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device_bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    with open(args.out, "w", encoding="utf-8") as out:

        def note(**row) -> None:
            print(json.dumps(row), file=out)
            print(row, flush=True)

        environment = describe_environment(commit=args.commit, seed=0, server_flags=[])
        note(environment=environment, model=args.model, tokens=args.tokens, bytes=num_bytes)

        def speed(copy: Callable[[], object]) -> float:
            return round(num_bytes / milliseconds(copy) / 1e6, 2)

        note(copy="plain load", gb_per_s=speed(lambda: device_bytes.copy_(host_bytes, non_blocking=True)))
        note(copy="plain back_up", gb_per_s=speed(lambda: host_bytes.copy_(device_bytes, non_blocking=True)))
        for quota, scattered, copy in itertools.product(args.block_quotas, (False, True), (load, back_up)):
            hicache.DEFAULT_BLOCK_QUOTA = quota
            rate = speed(functools.partial(copy, slots(scattered), slots(scattered)))
            note(copy=copy.__name__, block_quota=quota, scattered=scattered, gb_per_s=rate)


if __name__ == "__main__":
    main()
