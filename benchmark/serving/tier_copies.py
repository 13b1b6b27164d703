"""Measures the host tier's copies between host memory and a GPU, by the length of the runs that slots lie in.

    python -m benchmark.serving.tier_copies --out tier_copies.jsonl

First every way to copy is checked bitwise. Rows are then GB/s for one prompt's KV, from the call until the copy has
ended, layer by layer to the GPU, as the server loads it, and all layers at once to the host; and `call_ms`, for which
the scheduler's thread is busy. `by` is the copy engine or the kernel, with its number of thread blocks. Rows with
`beside` have what forward passes lose to concurrent copies, in ms per GB; those with `small_copies`, how long eight
bytes of another stream take to the host meanwhile, as the tokens of a step do. `plain` is a single copy of as many
bytes. Compare with `host_transfer`, SGLang's copies, on the same machine. Needs a GPU.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmark.serving.beside import NUM_TOKENS, Copy, beside, passes
from benchmark.serving.environment import describe_environment
from benchmark.serving.models import DENSE
from sglang_lazy.cache import host_memory, turns
from sglang_lazy.cache.host_memory import GpuCopier, HostMemory, Piece
from sglang_lazy.cache.transfers import Ticket, Transfers

POOL_TOKENS = 40_000
RUNS = (1, 8, 32, 128, 512, 2048)
"""Tokens that lie together."""
REPETITIONS = 20
BACK_UP_TOKENS = 1024
"""Tokens copied to the host at once, concurrently with passes."""
ALWAYS, NEVER = 1, 1 << 60
"""Bytes from which a run goes to the copy engine, or of a batch."""


class Way(NamedTuple):
    """To copy; see `host_memory` and `turns`."""

    name: str
    min_run_bytes: int
    blocks: int = 4
    batch_bytes: int = turns.BATCH_BYTES

    def choose(self) -> None:
        """Have copiers made from now on, and copies, use it."""
        host_memory.MIN_RUN_BYTES, turns.BATCH_BYTES = self.min_run_bytes, self.batch_bytes
        host_memory.LOAD_BLOCKS = host_memory.BACK_UP_BLOCKS = self.blocks


def ragged(num_tokens: int, run: int, generator: torch.Generator) -> torch.Tensor:
    """`num_tokens` slots of the pool in runs of `run` tokens, in random order and never side by side."""
    places = torch.randperm((POOL_TOKENS - 1) // (run + 1), generator=generator)[: -(-num_tokens // run)]
    return (1 + places[:, None] * (run + 1) + torch.arange(run)).flatten()[:num_tokens]


def timed(copy: Callable[[], Ticket]) -> tuple[float, float]:
    """Median milliseconds until a copy has ended, and of its call."""
    totals, calls = [], []
    for _ in range(REPETITIONS + 2):  # the first ones compile and warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        ticket = copy()
        called = time.perf_counter()
        ticket.finish()
        totals.append(time.perf_counter() - start)
        calls.append(called - start)
    return statistics.median(totals[2:]) * 1e3, statistics.median(calls[2:]) * 1e3


def small_copies(copy: Callable[[], Ticket]) -> dict:
    """Milliseconds that eight bytes of another stream take to the host while a copy is under way."""
    other, taken = torch.cuda.Stream(), []
    token, read = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.empty(1, dtype=torch.int64, pin_memory=True)
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        ticket = copy()
        while not ticket.done:
            start = time.perf_counter()
            with torch.cuda.stream(other):
                read.copy_(token, non_blocking=True)
            other.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
            time.sleep(0.0005)
    return dict(count=len(taken), median_ms=round(statistics.median(taken), 3), max_ms=round(max(taken), 3))


def check(memory: HostMemory, transfers: Transfers, source: torch.Tensor, host: torch.Tensor, run: int) -> None:
    """Copy all layers to the host and back to other slots, and compare every byte."""
    device = [rows for group in memory.groups for rows in group.device]
    target = source.roll(run)
    expected = [rows[source.cuda()].cpu() for rows in device]
    transfers.back_up([Piece(host, source.cuda(), source)]).finish()
    for rows in device:
        rows.fill_(0x7F)
    transfers.load([Piece(host, target.cuda(), target)])
    transfers.wait_all()
    for rows, right in zip(device, expected, strict=True):
        assert torch.equal(rows[target.cuda()].cpu(), right), "copied wrongly"
        rows.random_(0, 256)
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DENSE, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=10_240, help="of the prompt")
    parser.add_argument("--runs", type=int, nargs="+", default=RUNS, help="tokens that lie together")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4], help="of the kernel")
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = DENSE[args.model]
    num_layers = shape["num_hidden_layers"]
    size = (POOL_TOKENS, shape["num_key_value_heads"], shape["head_dim"])
    layers = [[torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in "kv"] for _ in range(num_layers)]
    memory = HostMemory(layers, POOL_TOKENS)
    num_bytes = args.tokens * memory.token_bytes
    generator = torch.Generator().manual_seed(0)
    ways = [Way("engine", ALWAYS), Way("engine, one batch", ALWAYS, batch_bytes=NEVER)]
    ways += [Way(f"kernel, {blocks}", NEVER, blocks) for blocks in args.blocks]
    computing = {name: passes(shape, num_tokens) for name, num_tokens in NUM_TOKENS.items()}

    with open(args.out, "w", encoding="utf-8") as out:

        def note(**row) -> None:
            print(json.dumps(row), file=out, flush=True)
            print(row, flush=True)

        def note_beside(part: Copy, alone_gb_per_s: float, /, **row) -> None:
            for name, run in computing.items():
                cost, rate = beside(run, part, alone_gb_per_s)
                note(**row, beside=name, ms_per_gb=round(cost, 3), gb_per_s=round(rate, 2))

        environment = describe_environment(commit=args.commit, seed=0, server_flags=[])
        note(environment=environment, model=args.model, tokens=args.tokens, bytes=num_bytes)

        host_bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device_bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        for name, to, source in (("load", device_bytes, host_bytes), ("back_up", host_bytes, device_bytes)):
            plain = functools.partial(to.copy_, source, non_blocking=True)

            def ended(copy=plain) -> Ticket:
                copy()
                event = torch.cuda.Event()
                event.record()
                return Ticket(event, None)

            total_ms, call_ms = timed(ended)
            rate = num_bytes / total_ms / 1e6
            note(copy=name, by="plain", gb_per_s=round(rate, 2), call_ms=round(call_ms, 3))
            note_beside(Copy(lambda _, copy=plain: copy(), num_bytes), rate, copy=name, by="plain")
            if name == "back_up":
                note(copy=name, by="plain", small_copies=small_copies(ended))

        for run in args.runs:
            device, host = (ragged(args.tokens, run, generator) for _ in range(2))
            for way in ways:
                if way.min_run_bytes == ALWAYS and run == 1:
                    continue  # a command per row and token is of no use
                way.choose()
                copies = GpuCopier(memory)
                transfers = Transfers(memory, copies)
                check(memory, transfers, device, host, run)
                whole = [Piece(host, device.cuda(), device)]
                few = [Piece(*(slots[:BACK_UP_TOKENS] for slots in whole[0]))]
                plan_whole, plan_few = copies.plan(whole), copies.plan(few)
                parts = {
                    "load": Copy(
                        lambda i, copies=copies, plan=plan_whole: copies.load(plan, i % num_layers),
                        num_bytes // num_layers,
                    ),
                    "back_up": Copy(
                        lambda _, copies=copies, plan=plan_few: copies.back_up(plan),
                        BACK_UP_TOKENS * memory.token_bytes,
                    ),
                }
                for name, copy in (("load", transfers.load), ("back_up", transfers.back_up)):
                    total_ms, call_ms = timed(functools.partial(copy, whole))
                    rate = num_bytes / total_ms / 1e6
                    row = dict(copy=name, by=way.name, run=run)
                    note(**row, gb_per_s=round(rate, 2), call_ms=round(call_ms, 3))
                    note_beside(parts[name], rate, **row)
                    if name == "back_up":
                        note(**row, small_copies=small_copies(functools.partial(copy, whole)))
    print("all copies were right")


if __name__ == "__main__":
    main()
