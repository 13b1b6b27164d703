"""A prefill batch of linked requests, ordinary ones and fills: SGLang's own attention computes its part, ours the rest,
and every row sees exactly the tokens it should."""

import dataclasses
import random
from array import array
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sglang.srt.layers import radix_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

from oracle.linked_attention import naive_link_extend
from sgl_kernel_lazy import get_implementation, rope_cos_sin
from sglang_lazy.attention.probes import ProbeSums
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.keys import ChunkKey, Namespace
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt
from sglang_lazy.core.row_order import FillRow
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.policies import get_policy
from sglang_lazy.port.facts import pass_of
from sglang_lazy.port.model.attention import LinkAttention

pytestmark = pytest.mark.usefixtures("sglang_context")

QO_HEADS, KV_HEADS, HEAD_DIM, MAX_CHUNKS, POOL, CONTEXT = 4, 2, 32, 4, 4000, 600
ROPE = SimpleNamespace(cos_sin_cache=rope_cos_sin(10000.0 ** -(torch.arange(16).double() / 16), 4096), is_neox=True)


class ReadingBackend(TorchNativeAttnBackend):
    """SGLang's backend, which reads rows while it prepares a batch, as those for GPUs do."""

    def init_forward_metadata(self, forward_batch):
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        self.prepared = [row[:n].tolist() for row, n in zip(rows, forward_batch.seq_lens.tolist(), strict=True)]


class LinkedTorchBackend(LinkAttention, ReadingBackend):
    """As `with_link_path` makes it, without what it would read from a model."""

    def __init__(self, runner, window):
        super().__init__(runner)
        layer = AttentionLayer(QO_HEADS, KV_HEADS, HEAD_DIM, ROPE, window, kernels=get_implementation("torch"))
        self.link_model, self.link_fp8 = ServedModel({}, {0: layer}), False
        self.link_pool, self.link_window_slots, self.link_layers = runner.token_to_kv_pool, None, {}
        self.link_rows = runner.req_to_token_pool
        self.link_table = SegmentTable(len(self.link_rows.req_to_token), MAX_CHUNKS, "cpu", self.link_model)


def piece(start, num_tokens, *kept):
    """A chunk at `start`, kept whole or in these ranges of its tokens."""
    key = ChunkKey(b"", Namespace("chunk", None, None), b"")
    return ChunkSlice(key, 0, array("q", range(start + num_tokens)), start, num_tokens, kept or ((0, num_tokens),))


def request(prefix_len, extend_len, chunks=(), positions=None, fill=None):
    """A request of the batch.  positions: of its row's tokens; None if they are in order."""
    return SimpleNamespace(prefix_len=prefix_len, extend_len=extend_len, chunks=chunks, positions=positions, fill=fill)


def ordinary(prefix_len, extend_len):
    return request(prefix_len, extend_len)


def fill(chunk_lens, cached, computed=0, extend_len=None):
    """A fill with these numbers of cached tokens per chunk, which has computed some of the others in earlier
    batches."""
    chunks = [piece(0, n) for n in chunk_lens]
    prefix_len = sum(cached) + computed
    extend_len = sum(chunk_lens) - prefix_len if extend_len is None else extend_len
    state = Fill(chunks, None)
    state.row = FillRow([chunk.num_tokens for chunk in chunks], cached, has_preamble=False)
    return request(prefix_len, extend_len, fill=state)


def linked(chunk_lens, text_before, between, extend_len, kept=()):
    """Text, partly cached, alternating with chunks: the row has the kept tokens first, then the text by position.

    kept: the kept ranges of every chunk.
    """
    position, chunks = text_before, []
    for length in chunk_lens:
        chunks.append(piece(position, length, *kept))
        position += length + between
    in_chunks = [p for chunk in chunks for p in chunk.positions.tolist()]
    text = [p for p in range(position + extend_len) if p not in in_chunks]
    row = np.array(in_chunks + text, dtype=np.int32)
    return request(len(row) - extend_len, extend_len, tuple(chunks), row)


def cached_later(chunk_lens, text_before, between, extend_len):
    """As `linked`, but the text between the last two chunks stands in front of the rest of the cached text."""
    req = linked(chunk_lens, text_before, between, extend_len)
    start, last = sum(chunk_lens), req.chunks[-1]
    text = req.positions[start : req.prefix_len]
    first = (text >= last.start - between) & (text < last.start)
    req.positions[start : req.prefix_len] = [*text[first], *text[~first]]
    return req


def out_of_order(length, spans):
    """A request without segments that computes these spans of text between cached ones, as with copied chunks."""
    new = [position for begin, end in spans for position in range(begin, end)]
    row = [position for position in range(length) if position not in new] + new
    return request(length - len(new), len(new), positions=np.array(row, dtype=np.int32))


COLD = [ordinary(0, 90), ordinary(0, 33), linked([90, 33], 0, 0, 7)]
BATCHES = {
    "chunks, then their prompt": COLD,
    "two prompts": [*COLD, ordinary(0, 120), linked([33, 120, 90], 5, 3, 12)],
    "the prompt in front": [linked([60], 0, 0, 9), ordinary(40, 1), ordinary(0, 70)],
    "new text longer than all it is linked to": [ordinary(3, 4), linked([2], 0, 0, 80), ordinary(100, 50)],
    "rows out of order without segments": [
        ordinary(7, 30),
        out_of_order(50, [(5, 15), (40, 50)]),
        ordinary(0, 5),
        linked([8, 8], 1, 1, 2),
    ],
    "cached text behind what it precedes": [
        request(35, 25, positions=np.array([*range(20, 50), *range(20), *range(50, 60)], dtype=np.int32)),
        linked([8, 8], 1, 1, 2),
    ],
    "a cached span in front of one that precedes it": [cached_later([40, 25, 30], 9, 12, 8), ordinary(3, 30)],
    "chunks with holes": [
        linked([40, 25, 30], 3, 1, 9, [(0, 7), (12, 20)]),
        ordinary(5, 12),
        linked([30], 4, 0, 20, [(10, 11), (17, 29)]),
    ],
    "linked alone": [linked([60, 20], 3, 2, 9), linked([5], 0, 0, 40)],
    "a fill of one chunk": [fill([90], [20]), linked([90], 0, 0, 7)],
    "a fill of several chunks": [fill([90, 1, 33], [0, 0, 0]), linked([90, 1, 33], 0, 0, 7)],
    "cached beginnings": [fill([90, 33, 20, 2], [20, 0, 19, 1]), ordinary(4, 9), linked([90, 33], 2, 1, 7)],
    "a fill that is cut within a chunk": [ordinary(0, 9), fill([40, 30, 50], [0, 5, 0], 10, 50), linked([9], 0, 0, 3)],
    "the end of such a fill": [fill([40, 30, 50, 7], [0, 5, 0, 6], 60), linked([40, 30, 50, 7], 3, 0, 8)],
    "two fills": [fill([40, 30], [0, 0]), linked([40, 30], 0, 0, 8), fill([20, 60], [5, 5]), linked([20, 60], 0, 0, 1)],
    "a prompt in front of a fill that is cut": [linked([9], 0, 0, 3), fill([40, 30], [7, 0], 0, 50)],
    "fills alone": [fill([40, 30], [0, 9]), fill([200, 100], [0, 0], 100, 150)],
}


def build(requests, seed, window=None):
    """A pool with all cached KV in shuffled slots and NaN elsewhere, and the batch as SGLang describes it."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = ReqToTokenPool(16, CONTEXT, "cpu", enable_memory_saver=False)
    pool = MHATokenToKVPool(POOL, 1, torch.float32, KV_HEADS, HEAD_DIM, 1, "cpu", enable_memory_saver=False)
    for cache in pool.get_kv_buffer(0):
        cache.fill_(float("nan"))
    backend = LinkedTorchBackend(
        SimpleNamespace(device="cpu", req_to_token_pool=rows, token_to_kv_pool=pool, sliding_window_size=None), window
    )
    slots = iter(rng.sample(range(1, POOL), POOL - 1))
    places = rng.sample(range(16), len(requests))
    new_slots = []
    for place, req in zip(places, requests, strict=True):
        own = torch.tensor([next(slots) for _ in range(req.prefix_len + req.extend_len)])
        rows.req_to_token[place, : len(own)] = own
        for cache in pool.get_kv_buffer(0):
            cache[own[: req.prefix_len]] = torch.randn(req.prefix_len, KV_HEADS, HEAD_DIM, generator=generator)
        new_slots.append(own[req.prefix_len :])
    chunks = {place: req.chunks for place, req in zip(places, requests, strict=True)}
    backend.link_table.assign(chunks, {row: [0] * len(held) for row, held in chunks.items()}, {})
    prefix_lens, extend_lens = [req.prefix_len for req in requests], [req.extend_len for req in requests]
    seq_lens = torch.tensor(prefix_lens) + torch.tensor(extend_lens)
    forward_batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(requests),
        req_pool_indices=torch.tensor(places),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.clone(),
        seq_lens_sum=int(seq_lens.sum()),
        extend_seq_lens=torch.tensor(extend_lens, dtype=torch.int32),
        extend_seq_lens_cpu=extend_lens,
        extend_prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32),
        extend_prefix_lens_cpu=prefix_lens,
        out_cache_loc=torch.cat(new_slots),
        positions=torch.cat([entries_of(req)[1][req.prefix_len :] for req in requests]),
        encoder_lens=None,
        _attn_output=None,
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        reqs=[as_req(r) for r in requests],
    )
    q, k, v = (torch.randn(sum(extend_lens), h * HEAD_DIM, generator=generator) for h in (QO_HEADS, KV_HEADS, KV_HEADS))
    k, v = (x.view(-1, KV_HEADS, HEAD_DIM) for x in (k, v))
    return backend, batch, forward_batch, (q, k, v)


def entries_of(req):
    """For each entry of the row so far: the index of its chunk in a fill, and its position there or in the prompt."""
    if req.fill is not None:
        lens, cached = [len(chunk.tokens) for chunk in req.fill.chunks], req.fill.row.cached
        beginnings = [(i, position) for i, count in enumerate(cached) for position in range(count)]
        rest = [(i, position) for i, length in enumerate(lens) for position in range(cached[i], length)]
        return torch.tensor(beginnings + rest)[: req.prefix_len + req.extend_len].T
    positions = torch.arange(req.prefix_len + req.extend_len)
    if req.positions is not None:
        positions = torch.from_numpy(req.positions).long()
    return torch.stack([torch.zeros_like(positions), positions])


def stock_rows(req, row):
    """The slots that SGLang's attention should read for a request: as few as possible for a linked one."""
    if req.positions is not None:
        return [row[: req.extend_len].tolist()]
    chunks = entries_of(req)[0]
    return [row[: len(chunks)][chunks == chunk].tolist() for chunk in chunks[req.prefix_len :].unique()]


def as_req(req):
    if req.fill is not None:
        return SimpleNamespace(lazy=req.fill)
    if req.positions is None:
        return SimpleNamespace()
    chunks = req.chunks or (piece(0, 1),)
    prompt = LinkedPrompt(chunks, (), sum(chunk.num_kept for chunk in chunks))
    state = LinkedRequest(prompt, get_policy("block" if req.chunks else "copy"), [], [])
    state.row = SimpleNamespace(positions_of=lambda start, end: req.positions[start:end])
    return SimpleNamespace(lazy=state)


def expected(backend, forward_batch, requests, q, **options):
    """The formula in fp64 for every row alike, from SGLang's pools; each chunk of a fill is a row of its own."""
    table, slots, q_positions, kv_positions, places = backend.link_table, [], [], [], []
    for place, req in zip(forward_batch.req_pool_indices.tolist(), requests, strict=True):
        chunks, positions = entries_of(req)
        own = backend.link_rows.req_to_token[place, : len(chunks)]
        for chunk in chunks[req.prefix_len :].unique():
            slots.append(own[chunks == chunk])
            kv_positions.append(positions[chunks == chunk])
            q_positions.append(positions[req.prefix_len :][chunks[req.prefix_len :] == chunk])
            places.append(place)
    out, _ = naive_link_extend(
        q.view(-1, QO_HEADS, HEAD_DIM),
        *backend.link_pool.get_kv_buffer(0),
        torch.tensor([0, *map(len, q_positions)]).cumsum(0),
        torch.cat(q_positions),
        torch.tensor([0, *map(len, slots)]).cumsum(0),
        torch.cat(slots),
        torch.cat(kv_positions),
        table.num_segments[places],
        table.ends[places],
        table.offsets[places],
        ROPE.cos_sin_cache,
        is_neox=True,
        sm_scale=HEAD_DIM**-0.5,
        window=backend.link_model.layers[0].window,
        **options,
    )
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("memory_given", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_meets_what_it_sees(name, apart, memory_given, window):
    requests = BATCHES[name]
    backend, batch, forward_batch, (q, k, v) = build(requests, seed=len(name), window=window)
    layer = RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, 0)
    layer.sliding_window_size = -1 if window is None else window - 1
    current = LinkedBatch.of(pass_of(batch), apart, windows=window is not None)
    assert current.q_positions.tolist() == forward_batch.positions.tolist()
    all_ordinary = all(req.positions is None for req in requests)
    ours = [req for req in requests if req.positions is not None or not (apart or all_ordinary)]
    with backend.link_table.running(current):
        backend.init_forward_metadata(forward_batch)
        assert (backend.link_stock_part is None) == (len(ours) == len(requests))
        assert (backend.link_prefill is None) == (not ours)
        if ours:
            assert backend.link_prefill.rows.num_queries == sum(req.extend_len for req in ours)
        if len(ours) < len(requests):
            assert backend.prepared == [
                row
                for req, place in zip(requests, forward_batch.req_pool_indices.tolist(), strict=True)
                for row in stock_rows(req, backend.link_rows.req_to_token[place])
            ]
        if memory_given:
            forward_batch._attn_output = torch.full_like(q, float("nan"))
        out = backend.forward_extend(q, k, v, layer, forward_batch)
    assert out.shape == q.shape
    torch.testing.assert_close(out.double(), expected(backend, forward_batch, requests, q), rtol=0, atol=1e-5)
    # SGLang's description of the batch, and its rows, must be as before.
    assert backend.req_to_token_pool.req_to_token.shape == (17, CONTEXT)
    assert forward_batch.extend_prefix_lens_cpu == [req.prefix_len for req in requests]
    assert forward_batch.seq_lens.tolist() == [req.prefix_len + req.extend_len for req in requests]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", [name for name in BATCHES if any(req.positions is not None for req in BATCHES[name])])
def test_padding_with_a_batch_dimension(monkeypatch, name, apart):
    """As Gemma 3 has it in a prefill graph, through SGLang's layer, which cuts the first dimension."""
    requests = BATCHES[name]
    backend, batch, forward_batch, (q, k, v) = build(requests, seed=0)
    layer, num_tokens = RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, 0), len(q)
    padded = [torch.nn.functional.pad(x.flatten(1), (0, 0, 0, 8), value=float("nan")) for x in (q, k, v)]
    padded = [x.view(1, num_tokens + 8, -1, HEAD_DIM) for x in padded]
    forward_batch.global_num_token_non_padded_cpu, forward_batch.mha_return_lse = num_tokens, False
    monkeypatch.setattr(radix_attention, "is_in_breakable_cuda_graph", lambda: True)
    with (
        backend.link_table.running(LinkedBatch.of(pass_of(batch), apart)),
        forward_context(ForwardContext(attn_backend=backend)),
        set_forward_batch(forward_batch),
        prefill_graph_scope(full_graph=False, raw_num_tokens=num_tokens),
    ):
        backend.init_forward_metadata(forward_batch)
        out = layer(*padded, forward_batch)
    assert out.shape == padded[0].shape
    out = out[0, :num_tokens].flatten(1)
    torch.testing.assert_close(out.double(), expected(backend, forward_batch, requests, q), rtol=0, atol=1e-5)
    assert torch.equal(backend.link_pool.get_kv_buffer(0)[0][forward_batch.out_cache_loc], k)


def test_rows_are_checked_once_for_all_layers():
    """And once more for probes, which measure with other queries."""
    backend, batch, forward_batch, (q, k, v) = build(BATCHES["chunks, then their prompt"], seed=0)
    kernels, model, num_layers = Mock(wraps=get_implementation("torch")), backend.link_model, 4
    kinds = [dataclasses.replace(model.layers[0], kernels=kernels, window=window) for window in (None, 8)]
    model.layers = {layer_id: kinds[layer_id % 2] for layer_id in range(num_layers)}
    sizes = (POOL, 1, torch.float32, KV_HEADS, HEAD_DIM, num_layers)
    backend.link_pool = MHATokenToKVPool(*sizes, "cpu", enable_memory_saver=False)
    current = LinkedBatch.of(pass_of(batch), max_rows=0, windows=True)
    with backend.link_table.running(current, ProbeSums(current, {0, 2}, torch.device("cpu"))):
        backend.init_forward_metadata(forward_batch)
        for layer_id in model.layers:
            layer = RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id)
            backend.forward_extend(q, k, v, layer, forward_batch)
    rows, probed = backend.link_prefill.rows, backend.link_probe_rows
    assert [call.args[2] is rows for call in kernels.link_extend.mock_calls] == [True] * num_layers
    assert [call.args[3] is probed for call in kernels.accumulate_attention.mock_calls] == [True] * 2
    assert probed is not rows


@pytest.mark.parametrize("name", ["chunks, then their prompt", "fills alone"])
def test_sglang_gets_new_keys_and_values_unscaled(monkeypatch, name):
    """Its Triton and FlashInfer backends attend to those they are given. An fp8 pool with scales divides them in
    place when it stores them."""
    backend, batch, forward_batch, (q, k, v) = build(BATCHES[name], seed=0)
    pool = MHATokenToKVPool(POOL, 1, torch.float8_e4m3fn, KV_HEADS, HEAD_DIM, 1, "cpu", enable_memory_saver=False)
    backend.link_pool, backend.link_fp8 = pool, True
    layer = RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, 0)
    layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(4.0)
    layer.k_scale_float, layer.v_scale_float = 0.5, 4.0
    given = []

    def forward_extend(_, q, k, v, *args, **kwargs):
        given.extend([k.clone(), v.clone()])
        return torch.empty_like(q)

    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", forward_extend)
    exact = [k.clone(), v.clone()]
    with backend.link_table.running(LinkedBatch.of(pass_of(batch))):
        backend.init_forward_metadata(forward_batch)
        backend.forward_extend(q, k, v, layer, forward_batch)
    assert all(map(torch.equal, given, exact)) and len(given) == 2
    slots = forward_batch.out_cache_loc
    for cache, stored in zip(pool.get_kv_buffer(0), (exact[0] / 0.5, exact[1] / 4.0), strict=True):
        assert torch.equal(cache[slots].float(), stored.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["chunks, then their prompt", "two fills", "rows out of order without segments"])
def test_what_sglang_cannot_compute_is_ours(name):
    """With attention sinks that its backend does not support, the link path computes every row."""
    requests = BATCHES[name]
    backend, batch, forward_batch, (q, k, v) = build(requests, seed=len(name))
    layer = RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, 0)
    sinks = torch.linspace(-3, 3, QO_HEADS).bfloat16()
    with backend.link_table.running(LinkedBatch.of(pass_of(batch), max_rows=0)):
        backend.init_forward_metadata(forward_batch)
        out = backend.forward_extend(q, k, v, layer, forward_batch, sinks=sinks.float())
    exact = expected(backend, forward_batch, requests, q, sinks=sinks)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
    for rows in ([ordinary(5, 9)], [fill([7], [0])]):
        _, batch, *_ = build(rows, seed=0)
        assert len(LinkedBatch.of(pass_of(batch), max_rows=0).linked) == 1 and LinkedBatch.of(pass_of(batch)) is None
        batch.forward_mode = ForwardMode.DECODE
        assert LinkedBatch.of(pass_of(batch), max_rows=0) == LinkedBatch() and LinkedBatch.of(pass_of(batch)) is None


def test_windows_need_rows_in_order():
    """A window is cut by index, so a row out of order is ordinary only in layers that see all of it."""
    row = np.array([*range(20, 40), *range(20), *range(40, 50)], dtype=np.int32)
    _, batch, *_ = build([request(40, 10, positions=row)], seed=0)
    batch.reqs[0].lazy.row.keeps_order = False
    assert LinkedBatch.of(pass_of(batch)) is None and LinkedBatch.of(pass_of(batch), windows=True).linked == [0]
    batch.forward_mode = ForwardMode.DECODE
    assert LinkedBatch.of(pass_of(batch)) is None and LinkedBatch.of(pass_of(batch), windows=True) == LinkedBatch()


def test_ordinary_requests_are_left_to_sglang():
    """Requests without chunks, and with copied chunks if all text to compute follows what it sees."""
    _, batch, *_ = build([ordinary(5, 9), out_of_order(3, [(0, 3)])], seed=0)
    for apart in (False, True):
        assert LinkedBatch.of(pass_of(batch), apart) is None


def test_batches_with_more_rows_than_sglangs_buffers_are_ours():
    """Its buffers have a row for each request; a fill's chunks are further rows, and a batch with too many is all
    ours."""
    _, batch, *_ = build([ordinary(5, 9), fill([4, 4, 4], [0, 0, 0])], seed=0)
    for max_rows, linked in ((4, []), (3, [0, 1, 2, 3])):
        for apart in (False, True):
            assert LinkedBatch.of(pass_of(batch), apart, max_rows).linked == linked


@pytest.mark.parametrize("min_width, width", [(8192, 8192), (16, 64)])
def test_batches_whose_rows_take_too_large_a_table_are_ours(monkeypatch, min_width, width):
    """SGLang's attention reads a table with a row for each chunk, all as wide as the longest prompt, a power of two."""
    backend, batch, forward_batch, _ = build([ordinary(50, 9), fill([4, 4, 4], [0, 0, 0])], seed=0)
    monkeypatch.setattr("sglang_lazy.attention.rows.MIN_TABLE_WIDTH", min_width)
    monkeypatch.setattr("sglang_lazy.attention.rows.MAX_TABLE_SIZE", 4 * width)
    current = LinkedBatch.of(pass_of(batch))
    with backend.link_table.running(current):
        backend.init_forward_metadata(forward_batch)
    assert backend.link_stock_part.req_to_token.numel() == 4 * width and not current.linked
    monkeypatch.setattr("sglang_lazy.attention.rows.MAX_TABLE_SIZE", 4 * width - 1)
    assert LinkedBatch.of(pass_of(batch)).linked == [0, 1, 2, 3]
