"""Time calls: CUDA-graph replays over alternating caches, wall time of steps, and the memory's own bandwidth."""

import time
from collections.abc import Callable, Iterable

import torch

LAYERS = 32


def cold_bytes(device: torch.device) -> int:
    """The number of bytes to read before a cache is read again: eight times the L2."""
    return 8 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def quantiles(times: list[float]) -> dict[str, float]:
    """p20, p50, p80."""
    ranks = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return dict(zip(("p20", "p50", "p80"), ranks.tolist(), strict=True))


def captured(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """A function that replays these calls as one CUDA graph; each call has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def launches(
    call: Callable[[int], None], num_caches: int, *, graph: bool, least_ms: float = 2.0
) -> Callable[[], float]:
    """A function that makes one repetition and returns its milliseconds per call(i), with i going round the caches.

    A repetition uses every cache at least once and takes at least least_ms.
    """
    if not torch.cuda.is_available():
        return lambda: wall_ms(lambda: call(0))
    for i in range(num_caches):
        call(i)
    torch.cuda.synchronize()
    every = [lambda i=i: call(i) for i in range(num_caches)]
    rough = event_ms(lambda: [one() for one in every]) / num_caches
    rounds = max(1, min(200, round(least_ms / rough / num_caches)))
    calls = every * rounds
    replay = captured(calls) if graph else lambda: [one() for one in calls]
    replay()
    return lambda: event_ms(replay) / len(calls)


def steps(
    plan: Callable[[], None], call: Callable[[int], None], num_caches: int, *, graph: bool
) -> Callable[[], tuple[float, float]]:
    """A function that makes one decode step of LAYERS layers and returns (plan_ms, step_ms).

    plan_ms is host time until plan() returns, step_ms wall time from its beginning to the last layer's result.
    """
    layers = [lambda i=i: call(i % num_caches) for i in range(LAYERS)]
    run = captured(layers) if graph else lambda: [layer() for layer in layers]

    def step() -> tuple[float, float]:
        synchronize()
        begin = time.perf_counter()
        plan()
        planned = time.perf_counter()
        run()
        synchronize()
        return (planned - begin) * 1e3, (time.perf_counter() - begin) * 1e3

    step()
    return step


def in_turns(functions: list[Callable], repetitions: int, longest_ms: float = 500.0) -> list[list]:
    """The results of each function, called in turns, so that a change of clocks affects them all.

    A slow one is called at least three times, and not again after longest_ms of wall time.
    """
    results: list[list] = [[] for _ in functions]
    spent = [0.0] * len(functions)
    for turn in range(repetitions):
        for i, function in enumerate(functions):
            if turn < 3 or spent[i] < longest_ms:
                begin = time.perf_counter()
                results[i].append(function())
                spent[i] += (time.perf_counter() - begin) * 1e3
    return results


def event_ms(function: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def wall_ms(function: Callable[[], object]) -> float:
    synchronize()
    begin = time.perf_counter()
    function()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bandwidth(repetitions: int) -> dict[str, float]:
    """GB/s of a large copy, counting bytes read and written, and of reading alone; GB is 1e9 bytes."""
    if not torch.cuda.is_available():
        return {}
    from benchmark.kernels.read import read

    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    moved = dict(copy=(lambda: target.copy_(source), 2), read=(lambda: read(source, target), 1))
    found = {}
    for name, (function, times) in moved.items():
        function()
        found[name] = times * source.nbytes / 1e6 / quantiles([event_ms(function) for _ in range(repetitions)])["p50"]
    return found
