"""Check a result against the formula in fp64 on a sample of rows, within twice plain PyTorch's error."""

import random

import torch

from benchmark.kernels.problem import Problem
from oracle.linked_attention import naive_link_extend

Results = dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]]


class Reference:
    """The formula on a few rows of a problem, with and without rotation, in fp64 and in the problem's dtype."""

    def __init__(self, problem: Problem, *, num_rows: int = 4, seed: int = 0):
        total = len(problem.q)
        picked = random.Random(seed).sample(range(total), min(num_rows, total))
        self.rows = sorted({total - 1, *picked})
        self.problem = problem
        self.results: dict[bool, Results] = {}

    def __call__(self, rotated: bool) -> Results:
        """{dtype: (out, lse)} of the sampled rows. Without rotation, requests are treated as plain causal text, and
        sinks are left out."""
        if rotated not in self.results:
            dtypes = (torch.float64, self.problem.dims.dtype)
            self.results[rotated] = {dtype: self._compute(rotated, dtype) for dtype in dtypes}
        return self.results[rotated]

    def _compute(self, rotated: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        problem = self.problem
        tables, (k_cache, v_cache) = problem.tables, problem.caches[0]
        kv_indptr = tables["kv_indptr"].tolist()
        qo_indptr = tables["qo_indptr"].tolist() if "qo_indptr" in tables else list(range(problem.bs + 1))
        outs, lses = [], []
        for row in self.rows:
            b = next(b for b in range(problem.bs) if row < qo_indptr[b + 1])
            begin, end = kv_indptr[b], kv_indptr[b + 1]
            if problem.shape.op == "decode" or not rotated:
                positions = torch.arange(end - begin, device=problem.dims.device)
                position = positions[-1:] - (qo_indptr[b + 1] - 1 - row)
            else:
                positions, position = tables["kv_positions"][begin:end], tables["q_positions"][row : row + 1]
            out, lse = naive_link_extend(
                problem.q[row : row + 1], k_cache, v_cache, torch.tensor([0, 1]), position,
                torch.tensor([0, end - begin]), tables["kv_indices"][begin:end], positions,
                tables["num_segments"][b : b + 1] * int(rotated),
                tables["segment_ends"][b : b + 1], tables["segment_offsets"][b : b + 1],
                problem.cos_sin_cache, is_neox=problem.dims.is_neox, sm_scale=problem.dims.head_dim**-0.5, dtype=dtype,
                window=problem.shape.window, sinks=problem.sinks if rotated else None,
                logit_cap=problem.shape.logit_cap,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


def check(out: torch.Tensor, lse: torch.Tensor, reference: Reference, rotated: bool) -> dict[str, float]:
    """Errors and budgets of a result. Raises ValueError if an error exceeds its budget."""
    results = reference(rotated)
    dtype = reference.problem.dims.dtype
    exact, exact_lse = results[torch.float64]
    plain, plain_lse = results[dtype]
    eps = torch.finfo(dtype).eps
    found = dict(
        error=relative_error(out[reference.rows], exact),
        budget=2 * max(eps, relative_error(plain, exact)),
        lse_error=(lse[reference.rows] - exact_lse).abs().max().item(),
        lse_budget=2 * max(eps * exact_lse.abs().max().item(), (plain_lse - exact_lse).abs().max().item()),
    )
    # The sample checks only some rows; all rows must at least have been written.
    if not out.isfinite().all() or not lse.isfinite().all():
        raise ValueError("a row was not written, or is not finite")
    for name in ("", "lse_"):
        if not found[f"{name}error"] <= found[f"{name}budget"]:
            raise ValueError(f"{name}error {found[f'{name}error']:.2e} is over {found[f'{name}budget']:.2e}")
    return found


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Worst (token, head) row of ||out - reference|| / ||reference||, in fp64."""
    out, reference = out.double(), reference.double()
    return ((out - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
