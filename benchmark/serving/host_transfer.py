"""Measures the bandwidth of SGLang's copies of chunks between host memory and a GPU.

    python -m benchmark.serving.host_transfer --out host_transfer.jsonl

Rows are GB/s for one prompt's KV: layer by layer to the GPU, as the server loads it, and all layers at once to the
host, with consecutive or scattered slots. `block_quota` limits the thread blocks of SGLang's copy kernels; `plain` is a
single copy of as many bytes. Rows with `beside` have what forward passes lose to concurrent scattered copies, in ms per
GB. Needs a GPU.
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

from benchmark.serving.beside import NUM_TOKENS, Copy, beside, passes
from benchmark.serving.environment import describe_environment
from benchmark.serving.models import DENSE

POOL_TOKENS = 40_000
REPETITIONS = 20
BACK_UP_TOKENS = 1024
"""Tokens copied to the host at once, concurrently with passes."""


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
    parser.add_argument("--model", choices=DENSE, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=10_240, help="of the prompt")
    parser.add_argument("--block-quotas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = DENSE[args.model]
    num_layers = shape["num_hidden_layers"]
    device_pool = MHATokenToKVPool(
        POOL_TOKENS, 1, torch.bfloat16, shape["num_key_value_heads"], shape["head_dim"], num_layers, "cuda", False
    )
    info = device_pool.get_device_pool_infos()[0].buffer_info
    bounds = dict(device_capacity_tokens=POOL_TOKENS, start_layer=0, end_layer=num_layers)
    host_pool = MHATokenToKVPoolHost(info, 2, 0, 1, "layer_first", **bounds)
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

    def part(copy: Callable, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """One layer of a load, or all layers of some tokens of a back-up."""
        if copy is load:
            return Copy(
                lambda i: host_pool.load_to_device_per_layer(device_pool, host, device, i % num_layers, "kernel"),
                num_bytes // num_layers,
            )
        few = host[:BACK_UP_TOKENS], device[:BACK_UP_TOKENS]
        return Copy(lambda _: back_up(*few), BACK_UP_TOKENS * host_pool.size_per_token)

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

        computing = {name: passes(shape, num_tokens) for name, num_tokens in NUM_TOKENS.items()}

        def note_beside(repeated: Copy, alone_gb_per_s: float, **row) -> None:
            for name, run in computing.items():
                cost, rate = beside(run, repeated, alone_gb_per_s)
                note(**row, beside=name, ms_per_gb=round(cost, 3), gb_per_s=round(rate, 2))

        for name, to, source in (("load", device_bytes, host_bytes), ("back_up", host_bytes, device_bytes)):
            plain = functools.partial(to.copy_, source, non_blocking=True)
            note(copy=f"plain {name}", gb_per_s=(rate := speed(plain)))
            note_beside(Copy(lambda _, copy=plain: copy(), num_bytes), rate, copy=f"plain {name}")
        for quota, scattered, copy in itertools.product(args.block_quotas, (False, True), (load, back_up)):
            hicache.DEFAULT_BLOCK_QUOTA = quota
            host, device = slots(scattered), slots(scattered)
            rate = speed(functools.partial(copy, host, device))
            note(copy=copy.__name__, block_quota=quota, scattered=scattered, gb_per_s=rate)
            if scattered:
                note_beside(part(copy, host, device), rate, copy=copy.__name__, block_quota=quota)


if __name__ == "__main__":
    main()
