"""What decode reads under a sliding window: the last tokens by position, wherever they are in the row."""

import dataclasses
import itertools
import logging
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sgl_kernel_lazy import get_implementation, rope_cos_sin, rotate_queries
from sglang_lazy.attention.decode_rows import DecodeRows, StepRows
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.model import AttentionLayer, ServedModel

HEADS, HEAD_DIM, CONTEXT, POOL = 2, 32, 400, 2000
ROPE = SimpleNamespace(cos_sin_cache=rope_cos_sin(10000.0 ** -(torch.arange(16).double() / 16), 1024), is_neox=True)


def chunk(start, *kept):
    """A slice of the chunk at `start` that keeps these ranges of its tokens."""
    positions = np.concatenate([np.arange(start + begin, start + end) for begin, end in kept])
    return SimpleNamespace(start=start, offset=start, positions=positions, num_kept=len(positions))


# Per row: its slices, and the prompt's length.
ROWS = {
    "plain": ([], 120),
    "copied chunks": ([], 70),
    "the question is longer than the window": ([chunk(5, (0, 60)), chunk(70, (0, 20))], 200),
    "chunks at the end": ([chunk(5, (0, 60)), chunk(70, (0, 30))], 101),
    "text between chunks": ([chunk(40, (0, 9)), chunk(60, (0, 9)), chunk(72, (0, 1)), chunk(74, (0, 20))], 96),
    "chunks alone": ([chunk(0, (0, 50)), chunk(50, (0, 12))], 63),
    "holes": ([chunk(10, (2, 40), (45, 50), (55, 56)), chunk(70, (0, 1), (2, 3), (4, 5), (9, 17))], 90),
    "a prompt within the window": ([chunk(2, (0, 3)), chunk(6, (0, 2))], 9),
    "text first and last": ([chunk(100, (0, 10))], 111),
}
WINDOWS = [1, 8, 33]
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter, which takes a CPU's tensors, is off"
)
KERNELS = ["torch", pytest.param("triton", marks=INTERPRETED)]


def layout(chunks, prompt_len, rng):
    """The positions of a row's tokens: chunks, cached text, computed text."""
    in_chunks = [p for chunk in chunks for p in chunk.positions]
    text = np.setdiff1d(np.arange(prompt_len), in_chunks)
    cached = np.sort(rng.choice(text, size=rng.integers(0, len(text)), replace=False))
    return np.array([*in_chunks, *cached, *np.setdiff1d(text, cached)], dtype=np.int32)


def build(windows, seed, kernels="torch"):
    """A pool with a row for each of ROWS, prompt and generated tokens, and NaN in all other slots."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    ops = get_implementation(kernels)
    layers = {i: AttentionLayer(HEADS, HEADS, HEAD_DIM, ROPE, window, kernels=ops) for i, window in enumerate(windows)}
    model = ServedModel({}, layers)
    table = SegmentTable(len(ROWS) + 1, 8, "cpu", model)
    pool = SimpleNamespace(req_to_token=torch.zeros(len(ROWS) + 1, CONTEXT, dtype=torch.int32))
    keys, values = (torch.full((POOL, HEADS, HEAD_DIM), float("nan")) for _ in range(2))
    slots, seq_lens, exact = iter(rng.permutation(np.arange(1, POOL)).tolist()), [], []
    orders, chunks_of = {}, {}
    for row, (name, (chunks, prompt_len)) in enumerate(ROWS.items(), 1):
        n = prompt_len + int(rng.integers(1, 60))
        order = np.arange(prompt_len, dtype=np.int32) if name == "plain" else layout(chunks, prompt_len, rng)
        position = np.concatenate([order, np.arange(prompt_len, n)])
        own = torch.tensor([next(slots) for _ in range(n)])
        pool.req_to_token[row, :n] = own
        k, v = (torch.randn(n, HEADS, HEAD_DIM, generator=generator) for _ in range(2))
        offsets = np.concatenate([np.repeat([c.offset for c in chunks], [c.num_kept for c in chunks]), np.zeros(n)])[:n]
        local = torch.from_numpy(position - offsets).long()
        keys[own], values[own] = rotate_queries(k, local, ROPE.cos_sin_cache, is_neox=True), v
        exact.append(
            (position, rotate_queries(k, torch.from_numpy(position).long(), ROPE.cos_sin_cache, is_neox=True), v)
        )
        seq_lens.append(n)
        chunks_of[row] = chunks
        if name != "plain":
            orders[row] = order
    table.assign(
        chunks_of, {row: [1000 * row + chunk.start for chunk in chunks] for row, chunks in chunks_of.items()}, orders
    )
    return table, pool, (keys, values), torch.tensor(seq_lens), exact


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("for_graph", [False, True])
@pytest.mark.parametrize("seed, num_queries", [*((seed, 1) for seed in range(6)), (0, 2), (1, 8)])
def test_each_row_reads_its_window(seed, num_queries, for_graph, kernels):
    """Several windows beside layers without one; each row, or each token of a chain of drafts, against softmax over the
    last positions of its prompt."""
    windows = [None, *WINDOWS]
    table, pool, (keys, values), seq_lens, exact = build(windows, seed, kernels)
    rows = DecodeRows(table, pool.req_to_token, table.model, num_queries)
    rows.allocate_for_graphs((len(ROWS) + 3) * num_queries)
    batch = StepRows(len(ROWS), torch.arange(1, len(ROWS) + 1), seq_lens, seq_lens)
    if num_queries > 1:  # SGLang counts them once they are verified
        batch = batch._replace(seq_lens=seq_lens - num_queries, seq_lens_cpu=None, first=1, num_queries=num_queries)
    planned = rows.of(batch, for_graph)
    seen = [range(n - num_queries + 1, n + 1) for n in seq_lens.tolist()]
    seq_lens = torch.tensor(list(itertools.chain(*seen)))
    q = torch.randn(len(seq_lens), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    assert {plan.window for plan in planned} == set(windows)
    layer = table.model.layers[0].with_caches((keys, values), q.dtype, HEAD_DIM**-0.5)
    for (window, *_), (listed, workspace) in planned.items():
        out = get_implementation("torch").link_decode(
            rotate_queries(q, seq_lens - 1, ROPE.cos_sin_cache, is_neox=True),
            layer,
            listed,
            workspace=workspace if kernels == "torch" else None,  # each plans in its own way
        )
        lens = listed.kv_indptr.diff()
        assert lens.tolist() == [min(n, window or n) for n in seq_lens.tolist()]
        for row, n in enumerate(seq_lens.tolist()):
            position, k, v = (each[:n] for each in exact[row // num_queries])
            turned = rotate_queries(q[row : row + 1], n - 1, ROPE.cos_sin_cache, is_neox=True)[0].double()
            scores = torch.einsum("hd,nhd->hn", turned, k.double()) * HEAD_DIM**-0.5
            if window is not None:
                scores[:, torch.from_numpy(position < n - window)] = -torch.inf
            expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), v.double())
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)


def test_memory_is_logged(caplog):
    """What decode allocates beside SGLang's pool: the workspace at once, and what graphs read."""
    table, pool, _, _, _ = build([None], 0, "torch")
    kernels = Mock(wraps=get_implementation("torch"), decode_workspace=lambda *_, **__: torch.empty(3 << 18))
    table.model.layers = {i: dataclasses.replace(one, kernels=kernels) for i, one in table.model.layers.items()}
    with caplog.at_level(logging.INFO):
        DecodeRows(table, pool.req_to_token, table.model).allocate_for_graphs(1 << 12)
    assert "3 MiB of workspace for decode" in caplog.text
    assert re.search(r"\d+ MiB of decode metadata", caplog.text)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_that_pads_a_batch(kernels):
    """A padding row has one token, and stale contents from whichever request had the row before."""
    table, pool, _, _, _ = build(WINDOWS, 0, kernels)
    rows = DecodeRows(table, pool.req_to_token, table.model)

    def of(rows_and_lens):
        row_ids, lens = (torch.tensor(column) for column in zip(*rows_and_lens, strict=True))
        return rows.of(StepRows(len(lens), row_ids, lens, lens))

    alone = of([(5, 102)])
    for plan, (listed, _) in of([(4, 1), (5, 102), (6, 1)]).items():
        window = plan.window
        assert listed.kv_indptr.diff().tolist() == [1, window, 1]
        assert (listed.segment_ends <= listed.kv_indptr.diff()[:, None]).all()
        assert torch.equal(listed.kv_indices[1 : 1 + window], alone[plan].rows.kv_indices[:window])


def test_layers_of_two_shapes():
    """Rows are described once per window, and planned once per window, head shape and implementation."""
    table, pool, _, seq_lens, _ = build([8], seed=0)
    one, other = (Mock(**{"decode_workspace.return_value": torch.empty(1)}) for _ in range(2))
    narrow = dataclasses.replace(table.model.layers[0], kernels=one)
    few = dataclasses.replace(narrow, num_kv_heads=1)
    wide = dataclasses.replace(narrow, window=None, num_kv_heads=1, head_dim=64, kernels=other)
    table.model.layers = {0: narrow, 1: wide, 2: narrow, 5: wide, 6: few}
    lens = seq_lens[:1]
    batch = StepRows(1, torch.tensor([1]), lens, lens)
    planned = DecodeRows(table, pool.req_to_token, table.model).of(batch)
    assert list(planned) == [layer.decode_plan for layer in (narrow, wide, few)]
    rows = [listed for listed, _ in planned.values()]
    assert rows[0] is rows[2] is not rows[1]
    [listing] = one.window_rows.mock_calls
    written, tables, queries = listing.args
    assert written is rows[0] and tables.window == 8 and (queries.first, queries.num_queries) == (0, 1)
    assert not other.window_rows.called
    dims = [dict(num_qo_heads=2, num_kv_heads=kv, head_dim=dim) for kv, dim in ((2, 32), (1, 64), (1, 32))]
    assert [call.kwargs for call in one.plan_decode.mock_calls] == [dims[0], dims[2]]
    assert [call.kwargs for call in other.plan_decode.mock_calls] == [dims[1]]


def test_a_row_that_is_used_again():
    """Nothing is left of the request that had the row before."""
    table, *_ = build(WINDOWS, seed=0)
    assert (table.tail_positions[4] >= 0).any() and 4 in table.linked_rows
    table.assign({4: (), 5: ()}, {}, {})
    assert (table.tail_positions[4:6] < 0).all() and table.linked_rows.isdisjoint({4, 5})
