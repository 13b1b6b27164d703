"""Check every implementation on every shape against the formula, then time those that pass.

    python -m benchmark.kernels --out results            # everything, on a GPU
    python -m benchmark.kernels --shapes decode --implementations triton --quick

Columns: p20, p50 and p80 are milliseconds of one layer, from CUDA-graph replays with keys and values cold in L2.
gb_per_s counts the keys and values that must be read, in 1e9 bytes; of_read and of_copy are its share of the bandwidth
that a kernel which only reads, and a copy, reach on this GPU. ratio is the p50 relative to that of the faster of fa2
and fa3, FlashInfer's own kernels without rotation, on caches of the queries' type. plan_ms is the host time of planning
a batch, step_ms the wall time of a decode step: planning and 32 layers. Rows named window_rows time that op, which
runs once per step: as part of a graph and, in plan_ms, by itself.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmark.kernels import report, timing
from benchmark.kernels.baseline import Baseline, backends
from benchmark.kernels.candidates import IMPLEMENTATIONS, Link, implementation
from benchmark.kernels.problem import Dims, Problem, Shape, build
from benchmark.kernels.shapes import FAMILIES, shapes
from benchmark.kernels.verify import Reference, check
from benchmark.kernels.window_rows import WindowRows

DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)
FP8 = torch.float8_e4m3fn


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def names(known: Iterable[str]) -> Callable[[str], list[str]]:
        def parsed(text: str) -> list[str]:
            given = text.split(",")
            if unknown := sorted(set(given) - set(known)):
                raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {','.join(unknown)}")
            return given

        return parsed

    parser = argparse.ArgumentParser(
        prog="python -m benchmark.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", type=names(FAMILIES), default=list(FAMILIES), help="families, comma-separated")
    parser.add_argument("--implementations", type=names(IMPLEMENTATIONS), help="all that run here when not given")
    parser.add_argument(
        "--first", action="store_true", help="of --implementations, only the first that takes a shape, as servers do"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--fp8", action="store_true", help="also on e4m3 caches, where an implementation takes them")
    parser.add_argument("--out", type=pathlib.Path, help="folder for bench.json and bench.png")
    parser.add_argument("--plot", action="store_true", help="also draw bench.png")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the header, where git cannot tell")
    parsed = parser.parse_args(arguments)
    if parsed.plot and not parsed.out:
        parser.error("--plot needs --out")
    return parsed


def repetitions(given: argparse.Namespace) -> int:
    return 3 if given.quick else 30


def checked(kind: type[Baseline] | type[Link], name: str, reference: Reference) -> tuple:
    """(row, launch, step): a row, and the functions to time if the result is right; else `refused` or `failed` has the
    reason, and there are none."""
    problem = reference.problem
    caches = len(problem.caches)
    row = dict(
        family=problem.shape.family, shape=problem.shape.name, op=problem.shape.op, bs=problem.bs,
        implementation=f"{name}, e4m3" if problem.dims.kv_dtype else name, baseline=kind is Baseline,
        bytes=problem.bytes, caches=caches, layers=problem.shape.layers,
    )  # fmt: skip
    if kind is WindowRows:
        row |= dict(op="window_rows", implementation=f"window_rows, {name}", bytes=None)
    if reason := kind.refusal(name, problem):
        return row | dict(refused=reason), None, None
    out = torch.full_like(problem.q, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), dtype=torch.float32, device=out.device)
    try:
        candidate = kind(name, problem)
        candidate.plan()
        candidate.call(0, out, lse)
        row |= check(out, lse, reference, candidate.rotated)

        def call(i: int) -> None:
            candidate.call(i, out)

        launch = timing.launches(call, caches, graph=candidate.graph)
        if problem.shape.op == "decode" and candidate.stepped:
            return row, launch, timing.steps(candidate.plan, call, caches, graph=candidate.graph)
        return row, launch, lambda: (timing.wall_ms(candidate.plan), None)
    except Exception as error:  # the others can still be measured
        return row | dict(failed=f"{type(error).__name__}: {error}"[:300]), None, None


def prepared(kinds: Iterable[tuple[type, str]], problem: Problem, first: bool) -> list[tuple]:
    """What `checked` returns for each of these kinds and names; first: up to the first name that takes the problem."""
    reference = Reference(problem)
    results, taken = [], set()
    for kind, name in kinds:
        if first and kind in taken and kind is not Baseline:
            continue
        results.append(checked(kind, name, reference))
        if "refused" not in results[-1][0]:
            taken.add(kind)
    return results


def measure(shape: Shape, dims: Dims, baselines: list[str], names: list[str], given: argparse.Namespace) -> list[dict]:
    """The rows of one shape, timed in turns."""
    problem = build(shape, dims, given.seed, timing.cold_bytes(dims.device))
    beside = [(WindowRows, name) for name in names] if shape.layers else [(Baseline, name) for name in baselines]
    links = [(Link, name) for name in names]
    results = prepared([*beside, *links], problem, given.first)
    if given.fp8:
        results += prepared(links, problem.quantised(FP8), given.first)
    right = [each for each in results if each[1]]
    times = timing.in_turns([launch for _, launch, _ in right], repetitions(given))
    steps = timing.in_turns([step for _, _, step in right], repetitions(given))
    for (row, _, _), launch_ms, step_ms in zip(right, times, steps, strict=True):
        row |= timing.quantiles(launch_ms)
        for name, values in zip(("plan_ms", "step_ms"), zip(*step_ms, strict=True), strict=True):
            if values[0] is not None:
                row[name] = timing.quantiles(list(values))["p50"]
    return [row for row, _, _ in results]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = dict(
        header=report.header(given, device), bandwidth=timing.bandwidth(repetitions(given)), skipped={}, rows=[]
    )
    print("\n".join(f"{key}: {value}" for key, value in (result["header"] | result["bandwidth"]).items()))

    implementations = given.implementations or (list(IMPLEMENTATIONS) if device.type == "cuda" else ["torch"])
    for name in list(implementations):
        try:
            implementation(name)
        except ImportError as error:
            implementations.remove(name)
            result["skipped"][name] = str(error)
    baselines = backends(device)
    if "missing" in baselines:
        result["skipped"]["baseline"] = baselines["missing"]
    for name, reason in result["skipped"].items():
        print(f"skipped: {name}: {reason}")

    dims = Dims(DTYPES[given.dtype], device)
    if device.type != "cuda":
        dims = dataclasses.replace(dims, num_qo_heads=4, num_kv_heads=2, head_dim=64)
    for shape in shapes(given.shapes, tiny=device.type == "cpu", seed=given.seed):
        rows = measure(shape, dims, baselines.get("names", []), implementations, given)
        report.finish_rows(rows, result["bandwidth"])
        report.print_rows(rows)
        result["rows"] += rows
        if given.out:
            report.write_json(given.out / "bench.json", result)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if given.plot:
        report.plot(given.out / "bench.png", result)
    measured, failed = (sum(name in row for row in result["rows"]) for name in ("p50", "failed"))
    print(f"\n{measured} measured, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
