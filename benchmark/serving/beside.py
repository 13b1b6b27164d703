"""Slowdown of forward passes by concurrent host-device copies, per byte."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

NUM_TOKENS = {"prefill": 2048, "decoding": 8}
"""New tokens of a pass, by kind."""
NUM_WEIGHTS = 4
"""Layers with distinct weights: more than the L2 cache holds."""
MIN_MS = 30
QUEUEING_CYCLES = 30_000_000
"""The GPU idles for about 16 ms, so that all work is queued before any of it starts."""
REPETITIONS = 5


class Copy(NamedTuple):
    """Part of a copy, which can be repeated."""

    make: Callable[[int], object]  # takes the number of the repetition
    num_bytes: int


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def passes(shape: dict, num_tokens: int) -> Callable[[], object]:
    """The matrix products of as many forward passes as take MIN_MS, as a CUDA graph."""
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    num_heads, num_kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = [
        (hidden, (num_heads + 2 * num_kv_heads) * head_dim),
        (num_heads * head_dim, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device="cuda")

    inputs = [random(num_tokens, size) for size, _ in sizes]
    layers = [[random(*size) for size in sizes] for _ in range(NUM_WEIGHTS)]

    def forward() -> None:
        for layer in range(shape["num_hidden_layers"]):
            for x, weight in zip(inputs, layers[layer % NUM_WEIGHTS], strict=True):
                x @ weight

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    graph.replay()
    torch.cuda.synchronize()
    start, end = event(), event()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    count = math.ceil(MIN_MS / start.elapsed_time(end))

    def run() -> None:
        for _ in range(count):
            graph.replay()

    run.uses = graph, inputs, layers  # kept alive with the graph
    return run


def beside(run: Callable[[], object], copy: Copy, alone_gb_per_s: float) -> tuple[float, float]:
    """Milliseconds that `run` loses per GB copied concurrently, and the GB/s of these copies; medians."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    alone = _time(run, copy, 0, *streams)[0]
    count = math.ceil(1.4 * alone * alone_gb_per_s * 1e6 / copy.num_bytes)  # enough to outlast it
    costs, rates = [], []
    for repetition in range(REPETITIONS + 1):  # the first one warms up
        without, _ = _time(run, copy, 0, *streams)
        with_copies, num_copied = _time(run, copy, count, *streams)
        if repetition:
            num_gb = num_copied * copy.num_bytes / 1e9
            costs.append((with_copies - without) / num_gb)
            rates.append(num_gb / with_copies * 1e3)
    return statistics.median(costs), statistics.median(rates)


def _time(
    run: Callable[[], object], copy: Copy, count: int, run_stream: torch.cuda.Stream, copy_stream: torch.cuda.Stream
) -> tuple[float, float]:
    """Milliseconds of `run`, and how many of `count` copies were complete at its end, including fractions."""
    start, end, copied = event(), event(), [event() for _ in range(count)]
    with torch.cuda.stream(run_stream):
        torch.cuda._sleep(QUEUEING_CYCLES)
        start.record()
        run()
        end.record()
    with torch.cuda.stream(copy_stream):
        copy_stream.wait_event(start)
        for number, done in enumerate(copied):
            copy.make(number)
            done.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), progress(start.elapsed_time(end), [start.elapsed_time(done) for done in copied])


def progress(moment: float, ends: list[float]) -> float:
    """How many of the consecutive tasks that ended at `ends` were done at `moment`, including a fraction."""
    num_done = sum(end <= moment for end in ends)
    if num_done == len(ends):
        return num_done
    begin = ends[num_done - 1] if num_done else 0.0
    return num_done + (moment - begin) / (ends[num_done] - begin)
