"""The memory of Python objects in the scheduler for each chunk on the host, besides its KV.

Compares caches with the same resident chunks but more or fewer chunks on the host, as in host_time.py, by tracemalloc.
Slot numbers, 8 bytes per token of a chunk, are tensors, which tracemalloc does not see.

    python -m benchmark.scheduler.host_memory --out host_memory.jsonl
"""

import argparse
import gc
import json
import tracemalloc
from pathlib import Path

import torch

from benchmark.scheduler.host import Host
from benchmark.scheduler.traffic import Tiered
from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment
from fakes.context import published


def traced(args: argparse.Namespace, on_host: int) -> int:
    """Bytes of a cache whose host tier holds `on_host` chunks per resident one."""
    num_tokens = args.resident * args.chunk_len
    options = argparse.Namespace(seed=args.seed, alpha=1.0, separator_len=0)
    gc.collect()
    tracemalloc.start()
    try:
        host = Host(Tiered.reuses, num_tokens + args.chunk_len, 64, "cpu", (on_host + 1) * num_tokens)
        traffic = Tiered(options, (1, args.chunk_len), args.resident)
        traffic.on_host = on_host
        before, _ = tracemalloc.get_traced_memory()
        traffic.fill(host, args.resident)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = typed(positive)
    parser.add_argument("--resident", type=count, default=1000, help="chunks on the device")
    parser.add_argument("--on-host", type=count, nargs=2, default=(5, 50), help="host chunks per device chunk")
    parser.add_argument("--chunk-len", type=count, default=128, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are written to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fewer, more = sorted(args.on_host)
    with published("cpu"), open(args.out, "w", encoding="utf-8") as out:
        environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=[])
        print(json.dumps({"environment": environment}), file=out, flush=True)
        added = traced(args, more) - traced(args, fewer)
        each = added / ((more - fewer) * args.resident)
        what = f"Python objects of a chunk of {args.chunk_len:,} tokens on the host"
        row = {"what": what, "bytes_per_chunk": round(each), "chunks": more * args.resident}
        print(json.dumps(row), file=out, flush=True)
        print(row)


if __name__ == "__main__":
    main()
