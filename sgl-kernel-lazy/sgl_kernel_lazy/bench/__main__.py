"""Check every implementation on every shape against the formula, then time it; what fails its check is not timed.

    python -m sgl_kernel_lazy.bench --out results            # everything, on a GPU
    python -m sgl_kernel_lazy.bench --shapes decode --implementations triton --quick

Times are milliseconds of one layer: CUDA-graph replays with keys and values cold in L2, p20, p50, p80. fa2 and fa3 are
FlashInfer's own kernels without rotation; ratio is to the better of them. GB is 1e9 bytes, of keys and values that must
be read. plan_ms is host time of planning a batch, step_ms wall time of a decode step: planning and 32 layers.
"""

import argparse
import pathlib
import sys

import torch

from sgl_kernel_lazy import IMPLEMENTATIONS, get_implementation
from sgl_kernel_lazy.bench import report, timing
from sgl_kernel_lazy.bench.candidates import Link
from sgl_kernel_lazy.bench.shapes import FAMILIES, Dims, build, shapes
from sgl_kernel_lazy.bench.stock import Stock, backends
from sgl_kernel_lazy.bench.verify import Reference, check

DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)


def parse(arguments=None) -> argparse.Namespace:
    def names(known):
        def parsed(text):
            given = text.split(",")
            if unknown := sorted(set(given) - set(known)):
                raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {','.join(unknown)}")
            return given

        return parsed

    parser = argparse.ArgumentParser(prog="python -m sgl_kernel_lazy.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=names(FAMILIES), default=list(FAMILIES), help="families, comma-separated")
    parser.add_argument("--implementations", type=names(IMPLEMENTATIONS), help="all that run here when not given")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=pathlib.Path, help="folder for bench.json and bench.png")
    parser.add_argument("--plot", action="store_true", help="also draw bench.png")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the header, where git cannot tell")
    parsed = parser.parse_args(arguments)
    if parsed.plot and not parsed.out:
        parser.error("--plot needs --out")
    return parsed


def measure(kind, name: str, reference: Reference, repetitions: int) -> dict:
    """One row: the check, then the times; `failed` says why there are none."""
    problem = reference.problem
    row = dict(
        family=problem.shape.family, shape=problem.shape.name, op=problem.shape.op, bs=problem.bs,
        implementation=name, stock=kind is Stock, bytes=problem.bytes, caches=len(problem.caches),
    )  # fmt: skip
    out = torch.full_like(problem.q, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), dtype=torch.float32, device=out.device)
    try:
        candidate = kind(name, problem)
        candidate.plan()
        candidate.call(0, out, lse)
        row |= check(out, lse, reference, candidate.rotated)
    except Exception as error:  # whatever went wrong, the others can still be measured
        return row | dict(failed=f"{type(error).__name__}: {error}"[:300])

    def call(i):
        candidate.call(i, out)

    sizes = dict(graph=candidate.graph, repetitions=repetitions)
    row |= timing.time_launches(call, len(problem.caches), **sizes)
    if problem.shape.op == "decode":
        return row | timing.time_step(candidate.plan, call, len(problem.caches), **sizes)
    return row | timing.time_plan(candidate.plan, repetitions)


def main(arguments=None) -> int:
    given = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    repetitions = 3 if given.quick else 30
    result = dict(header=report.header(given, device), bandwidth=timing.bandwidth(repetitions), skipped={}, rows=[])
    print("\n".join(f"{key}: {value}" for key, value in (result["header"] | result["bandwidth"]).items()))

    implementations = given.implementations or (list(IMPLEMENTATIONS) if device.type == "cuda" else ["torch"])
    for name in list(implementations):
        try:
            get_implementation(name)
        except ImportError as error:
            implementations.remove(name)
            result["skipped"][name] = str(error)
    stock = backends(device)
    if "missing" in stock:
        result["skipped"]["stock"] = stock["missing"]
    for name, reason in result["skipped"].items():
        print(f"skipped: {name}: {reason}")

    size = {} if device.type == "cuda" else dict(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    dims = Dims(DTYPES[given.dtype], device, **size)
    for shape in shapes(given.shapes, tiny=device.type == "cpu", seed=given.seed):
        problem = build(shape, dims, given.seed, timing.cold_bytes(device))
        reference = Reference(problem)
        rows = [measure(Stock, name, reference, repetitions) for name in stock.get("names", [])]
        rows += [measure(Link, name, reference, repetitions) for name in implementations]
        report.finish_rows(rows, result["bandwidth"])
        report.print_rows(rows)
        result["rows"] += rows
        if given.out:
            report.write_json(given.out / "bench.json", result)
        del problem, reference
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if given.plot:
        report.plot(given.out / "bench.png", result)
    failed = sum("failed" in row for row in result["rows"])
    print(f"\n{len(result['rows']) - failed} measured, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
