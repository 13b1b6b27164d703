"""The baseline: FlashInfer's own attention over the same lists of slots, without any rotation."""

from typing import Any

import torch

from benchmark.kernels.problem import Problem

PAGE_SIZE = 1
WORKSPACE_BYTES = 512 << 20


class Baseline:
    """FlashInfer's fa2 or fa3 on one problem, causal if there is new text: the least cost of these lengths.

    New text in several spans is treated as one span at the end. Sinks are left out.
    """

    rotated, graph, stepped = False, True, True

    @staticmethod
    def refusal(backend: str, problem: Problem) -> str | None:
        """Why a backend does not take a problem, or None."""
        most = 256 if backend == "fa3" else 512
        return f"{backend} has heads of at most {most}" if problem.dims.head_dim > most else None

    def __init__(self, backend: str, problem: Problem):
        import flashinfer

        self.name, self.problem = backend, problem
        dims, tables = problem.dims, problem.tables
        self.decode = problem.shape.op == "decode"
        buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=dims.device)
        self.indptr_host = tables["kv_indptr"].cpu()
        self.last_page_len = torch.ones(problem.bs, dtype=torch.int32, device=dims.device)
        self.caches = [tuple(cache.unsqueeze(1) for cache in pair) for pair in problem.caches]
        types = dict(
            q_data_type=dims.dtype, kv_data_type=dims.dtype, sm_scale=dims.head_dim**-0.5,
            logits_soft_cap=problem.shape.logit_cap,
        )  # fmt: skip
        heads = (dims.num_qo_heads, dims.num_kv_heads, dims.head_dim, PAGE_SIZE)
        kv = (self.indptr_host, tables["kv_indices"], self.last_page_len.cpu())
        self.wrapper: Any
        if self.decode and backend == "fa2":
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, use_tensor_cores=True, backend="fa2")
            self.wrapper.plan(*kv, *heads, **types)
            # Plan like servers from their second step: lengths are known on the host, tables stay on the device.
            device_kv = (tables["kv_indptr"], tables["kv_indices"], self.last_page_len)
            self.replan = lambda: flashinfer.fast_decode_plan(
                self.wrapper, *device_kv, *heads, **types, global_override_indptr_cpu=self.indptr_host
            )
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, backend=backend)
            qo_indptr = torch.arange(problem.bs + 1, dtype=torch.int32) if self.decode else tables["qo_indptr"].cpu()
            window_left = -1 if problem.shape.window is None else problem.shape.window - 1
            self.replan = lambda: self.wrapper.plan(
                qo_indptr, *kv, *heads, **types, causal=not self.decode, window_left=window_left
            )

        self.planned: list[list[torch.Tensor]] = []

    def plan(self) -> None:
        # A new plan frees the last one's tensors, which graphs captured under it still read: keep the first few.
        if len(self.planned) < 4:
            self.planned.append([value for value in vars(self.wrapper).values() if isinstance(value, torch.Tensor)])
        self.replan()

    def call(self, i: int, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        self.wrapper.run(self.problem.q, self.caches[i], out=out)
        if lse is not None:
            base_2 = self.wrapper.run(self.problem.q, self.caches[i], return_lse=True)[1]
            torch.mul(base_2, torch.log(torch.tensor(2.0)).item(), out=lse)


def backends(device: torch.device) -> dict[str, Any]:
    """The baselines that run here, or why none does."""
    if device.type != "cuda":
        return dict(missing="FlashInfer needs a GPU")
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return dict(missing=f"flashinfer: {error}")
    return dict(names=["fa2", "fa3"] if torch.cuda.get_device_capability(device)[0] == 9 else ["fa2"])
