"""The kernels as cross layers use them: the queries are not among their rows' KV tokens, and see all of them,
unrotated.

The reference is softmax over dense matrices in fp64.
"""

import pytest
import torch
from ragged import DEVICE, NAN, relative_error

from sgl_kernel_lazy import get_implementation, rope_cos_sin
from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rows import ExtendRows, Rows

HEADS, KV_HEADS, DIM = 8, 2, 64
AFTER_ALL = 2**30
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
IMPLEMENTATIONS = [
    ("torch", torch.float32),
    ("triton", torch.float32),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")),
]
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
implementations = pytest.mark.parametrize("name, dtype", IMPLEMENTATIONS)


class Problem:
    """Rows with `queries[b]` queries over `keys[b]` KV tokens anywhere in the caches."""

    def __init__(self, queries, keys, dtype):
        generator = torch.Generator().manual_seed(0)
        num_slots = sum(keys) + 9
        self.queries, self.keys = queries, keys
        self.q = torch.randn(sum(queries), HEADS, DIM, generator=generator).to(DEVICE, dtype)
        caches = torch.randn(2, num_slots, KV_HEADS, DIM, generator=generator).to(DEVICE, dtype)
        self.slots = torch.randperm(num_slots, generator=generator)[: sum(keys)].to(DEVICE)
        unused = torch.ones(num_slots, dtype=torch.bool, device=DEVICE)
        unused[self.slots] = False
        caches[:, unused] = NAN
        self.k_cache, self.v_cache = caches
        self.layer = Layer(
            num_qo_heads=HEADS,
            dtype=dtype,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            cos_sin_cache=rope_cos_sin(torch.zeros(16), 4, 8).to(DEVICE),
            is_neox=True,
            sm_scale=DIM**-0.5,
        )

    @property
    def expected(self):
        q, keys, values = self.q.double(), self.k_cache.double(), self.v_cache.double()
        parts = []
        rows = zip(q.split(self.queries), self.slots.split(self.keys), strict=True)
        for part, slots in rows:
            k, v = (cache[slots].repeat_interleave(HEADS // KV_HEADS, 1) for cache in (keys, values))
            weights = torch.einsum("qhd,khd->hqk", part, k).mul(DIM**-0.5).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def indptr(lens):
    return torch.cumsum(torch.tensor([0, *lens]), 0).to(DEVICE, torch.int32)


@implementations
def test_prefill(name, dtype):
    """More queries than keys, fewer queries than keys, and many of both."""
    problem = Problem([5, 40, 1, 70, 130], [200, 3, 1, 70, 300], dtype)
    none = torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)
    out = get_implementation(name).link_extend(
        problem.q,
        problem.layer,
        ExtendRows(
            qo_indptr=indptr(problem.queries),
            q_positions=torch.full((len(problem.q),), AFTER_ALL, dtype=torch.int32, device=DEVICE),
            kv_indptr=indptr(problem.keys),
            kv_indices=problem.slots.int(),
            kv_positions=torch.cat([torch.arange(n, device=DEVICE, dtype=torch.int32) for n in problem.keys]),
            num_segments=none[:, 0],
            segment_ends=none,
            segment_offsets=none,
            max_extend_len=130,
        ),
    )
    assert relative_error(out, problem.expected) < BUDGET[dtype]


@implementations
def test_decode(name, dtype):
    """Segments reach to the end of each row; a row without KV tokens gives exactly zero."""
    problem = Problem([1, 1, 1, 1], [60, 0, 35, 90], dtype)
    ops = get_implementation(name)
    ends = ints([[20, 60, 0], [0, 0, 0], [35, 0, 0], [1, 50, 90]])
    rows = Rows(
        kv_indptr=indptr(problem.keys),
        kv_indices=problem.slots.int(),
        num_segments=ints([2, 0, 1, 3]),
        segment_ends=ends,
        segment_offsets=ints([[0, 3, 0], [0, 0, 0], [2, 0, 0], [5, 1, 11]]),
        segment_ids=ints([[0, 1, 0], [0, 0, 0], [2, 0, 0], [3, 4, 5]]),
    )
    dims = dict(num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    workspace = ops.decode_workspace(4, 3, **dims, device=DEVICE)
    ops.plan_decode(workspace, rows, **dims)
    out = ops.link_decode(problem.q, problem.layer, rows, workspace=workspace)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    reads = [0, 2, 3]
    expected = problem.expected.nan_to_num()
    assert relative_error(out[reads], expected[reads]) < BUDGET[dtype]
