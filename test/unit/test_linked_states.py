"""SGLang's backends of recurrent layers with pieces of a batch mixed in, on PyTorch in place of their kernels, against
the recurrence token by token."""

import contextlib
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers import radix_linear_attention
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend, Mamba2AttnBackend
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton, kda_triton
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata, Mamba2Metadata
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import set_tc_piecewise_forward_context
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope
from sglang.srt.models.nemotron_h import NemotronHMambaDecoderLayer, nemotron_mamba2_with_output

from fakes import recurrent_layers
from fakes.recurrent_batches import NUM_SLOTS, Batch
from oracle.recurrence import Recurrence, Shape, States
from sglang_lazy.port.model.linked_states import LinkDeltaRule, LinkKDA, LinkMamba2
from sglang_lazy.port.model.recurrent import RecurrentLayers
from sglang_lazy.recurrent.pieces import Pieces, Text, TextRow
from sglang_lazy.recurrent.pool import StateLayout, StatePool

SHAPES = {
    "delta": Shape("delta", 4, 2, 8, 12),
    "kda": Shape("kda", 4, 4, 8, 12),
    "mamba": Shape("mamba", 4, 2, 6, 8),
}
STOCK = {"delta": gdn_backend.GDNAttnBackend, "kda": kda_backend.KDAAttnBackend, "mamba": Mamba2AttnBackend}
LINKS = {"delta": LinkDeltaRule, "kda": LinkKDA, "mamba": LinkMamba2}
LAYER, TOLERANCE, BLOCK = 5, 1e-5, 4
BEHIND_CHUNKS = (94, 206, 264, 492, 645, 1458, 1537)
"""Batches of rows with one text each, behind chunks and without."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """As the plugin of the tests on CPUs has them, with blocks that several of fit into a piece."""
    monkeypatch.setattr(recurrent_layers, "BLOCK", BLOCK)
    for name in ("causal_conv1d_fn", "fused_gdn_gating"):
        monkeypatch.setattr(gdn_backend, name, getattr(recurrent_layers, name))
    monkeypatch.setattr(kda_backend, "causal_conv1d_fn", recurrent_layers.causal_conv1d_fn)
    monkeypatch.setattr(kda_triton, "chunk_kda", recurrent_layers.chunk_kda)
    monkeypatch.setattr(gdn_triton, "chunk_gated_delta_rule", recurrent_layers.chunk_gated_delta_rule)
    monkeypatch.setattr(mamba, "mamba_chunk_scan_combined", recurrent_layers.mamba_chunk_scan_combined)
    for name in ("causal_conv1d_fn", "causal_conv1d_fn_triton"):
        monkeypatch.setattr(mamba, name, recurrent_layers.causal_conv1d_fn, raising=False)


class Server:
    """A backend of one layer whose slots are those of a random batch, in another order in SGLang.

    tracked: the tokens that rows without chunks have gone through at their last complete block, by the slot in which
        SGLang's cache wants the state there.
    """

    def __init__(self, kind, seed):
        self.shape = shape = SHAPES[kind]
        self.batch = Batch(seed, longest=20, shortest=shape.width)
        self.layer = Recurrence(shape, max(self.batch.context), seed)
        gates = torch.Generator().manual_seed(seed)
        self.a, self.b = torch.randn(2, len(self.layer.inputs), shape.heads, generator=gates)
        self.bias = self.layer.dt_bias
        rates = torch.empty(shape.heads).uniform_(-7, -2, generator=gates)
        if kind == "kda":
            self.a = torch.randn(len(self.layer.inputs), shape.heads, shape.k, generator=gates)
            self.bias = torch.randn(shape.heads, shape.k, generator=gates).double()
        steps = F.softplus(self.a.double() + self.bias).view(*self.b.shape, -1)
        self.layer.decay = -rates.double().exp()[:, None] * steps
        self.layer.write = self.b.double().sigmoid()
        self.rates = rates
        self.oracle = States(self.layer, self.batch.context)
        self.order = torch.randperm(NUM_SLOTS, generator=gates)  # the slot of each request
        self.rows = [
            row._replace(slot=i) if isinstance(row, TextRow) else row for i, row in enumerate(self.batch.rows)
        ]  # as SGLang counts them in the batch
        self.pool = self.filled_pool(self.batch.chunks)
        self.cache = self.filled_cache(self.batch.requests)
        self.tracked = self.tracked_rows()
        self.forward_batch = self.described()
        metadata = self.metadata()
        pools = dict(
            mamba2_layer_index=lambda layer_id: {LAYER: 1}[layer_id],
            mamba2_layer_cache=lambda layer_id: self.cache.at_layer_idx({LAYER: 1}[layer_id]),
            mamba_pool=SimpleNamespace(mamba_cache=self.cache),
        )
        kernel = kda_triton.TritonKDAKernel() if kind == "kda" else gdn_triton.TritonGDNKernel()
        dispatcher = dict(extend=kernel.extend, extend_kernel=kernel, effective_extend_kernel=lambda *_: kernel)

        class Stock(STOCK[kind]):
            req_to_token_pool = SimpleNamespace(**pools)
            mamba_chunk_size, mis_metadata, _use_strided_target_verify_qkv = BLOCK, None, False
            kernel_dispatcher, accept_lens_pool = SimpleNamespace(**dispatcher), None

            def __init__(self):
                pass

            def init_forward_metadata(self, forward_batch):
                self.forward_metadata = metadata

        self.backend = type("Linked", (LINKS[kind], Stock), {})()
        layers = RecurrentLayers.__new__(RecurrentLayers)
        layers.pool, layers._requests, layers._inputs_last = self.pool, Stock.req_to_token_pool, kind == "kda"
        layers.pieces = Pieces.of(self.rows, shape.width, torch.device("cpu"))
        self.lens = layers.pieces.lens
        self.backend.init_link_states(layers)

    def filled_cache(self, requests, tracked=None):
        """Of two layers, the second one is served."""
        conv = torch.zeros(2, 2 * NUM_SLOTS, sum(self.shape.dims), self.shape.width)
        states = torch.zeros(2, 2 * NUM_SLOTS, self.shape.heads, self.shape.v, self.shape.k)
        kept = {int(self.order[request]): tokens for request, tokens in enumerate(requests)}
        for slot, tokens in {**kept, **(tracked or {})}.items():
            conv[1, slot] = self.layer.last_inputs(tokens)
            states[1, slot] = self.oracle.after(tokens)
        if self.shape.kind == "kda":
            conv = conv.mT.contiguous()
        return MambaPool.State(conv=[conv], temporal=states)

    def lens_of_rows(self):
        """How many tokens each row has."""
        return [sum(part.num_tokens for part in texts(row)) for row in self.rows]

    def described(self):
        """The batch as SGLang knows it, whose rows are requests: text goes on from a state if something is cached."""
        cached = [not isinstance(row, TextRow) or row.resumed or row.parts[0] not in texts(row) for row in self.rows]
        lens, extend = self.lens_of_rows(), ForwardMode.EXTEND
        tracked = [row for row, *_ in self.plain_rows()]
        return SimpleNamespace(
            forward_mode=extend, logical_forward_mode=extend, spec_info=None, seq_lens=lens,
            extend_num_tokens=sum(lens), extend_seq_lens_cpu=lens, extend_prefix_lens=torch.tensor(cached).long(),
            global_num_token_non_padded_cpu=sum(lens), out_cache_loc=torch.arange(2 * sum(lens)),
            mamba_track_mask=torch.tensor([row in tracked for row in range(len(lens))]),
            mamba_track_indices=NUM_SLOTS + torch.arange(len(lens)),
        )  # fmt: skip

    def plain_rows(self):
        """The rows without chunks that have a block: (row, first token in the batch, number of tokens)."""
        begin = 0
        for i, (row, count) in enumerate(zip(self.rows, self.lens_of_rows(), strict=True)):
            if isinstance(row, TextRow) and len(row.parts) == 1 and count >= BLOCK:
                yield i, begin, count
            begin += count

    def tracked_rows(self):
        tracked = {}
        for row, begin, count in self.plain_rows():
            seen = self.batch.context[self.batch.tokens[begin]]
            tracked[NUM_SLOTS + row] = seen + self.batch.tokens[begin : begin + count // BLOCK * BLOCK]
        return tracked

    def metadata(self):
        """As SGLang makes it, which knows rows."""
        rows, lens, by_grid = [*self.plain_rows()], self.lens_of_rows(), self.shape.kind == "mamba"
        ends = {row: begin + count // BLOCK * BLOCK for row, begin, count in rows}
        final = [row for row, _, count in rows if count % BLOCK == 0]
        within = [row for row in ends if row not in final]
        read = [row for row in within if not by_grid or ends[row] % BLOCK == 0]
        recomputed = [row for row in within if row not in read]
        blocks = torch.full((len(lens),), -1, dtype=torch.int32)
        for row in within:
            blocks[row] = lens[row] // BLOCK
        before = np.cumsum([0, *(-(-count // BLOCK) for count in lens)])
        width = torch.arange(-self.shape.width, 0)

        def ints(numbers):
            return torch.tensor(numbers, dtype=torch.int64)

        slots = self.order[ints([row.slot if isinstance(row, TextRow) else 0 for row in self.batch.rows])]
        described = ForwardMetadata(
            query_start_loc=torch.tensor(np.cumsum([0, *lens])).int(),
            mamba_cache_indices=slots,
            has_mamba_track_mask=bool(rows),
            conv_states_mask_indices=NUM_SLOTS + ints([*ends]),
            track_conv_indices=ints([*ends.values()])[:, None] + width,
            track_ssm_final_src=slots[ints(final)],
            track_ssm_final_dst=NUM_SLOTS + ints(final),
            track_chunk_idx=blocks,
            track_ssm_h_batch_src=ints(within),
            track_ssm_h_src=ints([ends[row] // BLOCK if by_grid else before[row] + lens[row] // BLOCK for row in read]),
            track_ssm_h_dst=NUM_SLOTS + ints(read),
            track_ssm_seq_idx=ints(recomputed),
            track_ssm_end_locs=ints([ends[row] for row in recomputed]),
            track_ssm_recompute_dst=NUM_SLOTS + ints(recomputed),
        )
        return Mamba2Metadata.prepare_mixed(described, BLOCK, self.forward_batch) if by_grid else described

    def filled_pool(self, chunks):
        """Of two layers, the second one is served."""
        shape = self.shape
        kind = "number" if shape.kind == "mamba" else "matrix"
        conv, state = ((sum(shape.dims), shape.width),), (shape.heads, shape.v, shape.k)
        pool = StatePool(StateLayout(2, conv, torch.float32, state, torch.float32, kind), NUM_SLOTS - 1, "cpu")
        for slot, tokens in enumerate(chunks):
            pool.conv[0][1, slot] = self.layer.last_inputs(tokens)
            pool.h[1, slot] = self.oracle.after(tokens)
            unit = torch.eye(shape.k) if kind == "matrix" else torch.ones(1, 1)
            left = self.oracle.unchanged(unit.double().expand(shape.heads, *unit.shape), tokens)
            pool.p[1, slot] = left if kind == "matrix" else left[:, 0, 0]
        return pool

    def run(self, padding=0):
        """The layer's outputs, [num_tokens + padding, heads, v].

        padding: how many tokens without values follow the batch's own, as in a prefill graph.
        """
        self.backend.init_forward_metadata(self.forward_batch)
        inputs, a, b = (
            F.pad(x[self.batch.tokens].float(), (*(0, 0) * (x.dim() - 1), 0, padding), value=float("nan"))
            for x in (self.layer.inputs, self.a, self.b)
        )
        return self.run_mamba(inputs) if self.shape.kind == "mamba" else self.run_delta(inputs, a, b)

    @contextlib.contextmanager
    def forwarding(self):
        """A context in which SGLang's layers find the backend and the batch."""
        hybrid = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
        hybrid.linear_attn_backend, hybrid.full_attn_layers = self.backend, []
        with (
            forward_context(ForwardContext(attn_backend=hybrid)),
            set_forward_batch(self.forward_batch),
            prefill_graph_scope(full_graph=False, raw_num_tokens=len(self.batch.tokens)),
        ):
            yield self.forward_batch

    def run_delta(self, inputs, a, b):
        shape = self.shape
        layer = RadixLinearAttention(
            LAYER, shape.groups, shape.groups, shape.heads, shape.k, shape.k, shape.v, self.layer.weight.float(),
            A_log=self.rates, dt_bias=self.bias.float(),
        )  # fmt: skip
        if self.shape.kind == "kda":
            a, b = a[None], b[None]
        with self.forwarding() as batch:
            return layer(batch, inputs, a, b)[0]

    def run_mamba(self, inputs):
        """Through SGLang's mixer, which computes with what is around it: gates of 1, no norm, no projections."""
        shape, size = self.shape, self.shape.heads * self.shape.v
        dt = F.pad(
            self.layer.dt[self.batch.tokens].float(),
            (0, 0, 0, len(inputs) - len(self.batch.tokens)),
            value=float("nan"),
        )
        hidden = torch.cat([torch.ones(len(inputs), size), inputs, dt], 1)
        mixer = SimpleNamespace(
            in_proj=lambda x: (x, None), out_proj=lambda x: (x, None), norm=lambda x, gate: x, tp_size=1,
            intermediate_size=size, conv_dim=inputs.shape[1], num_heads=shape.heads, head_dim=shape.v,
            n_groups=shape.groups, groups_ssm_state_size=shape.groups * shape.k, ssm_state_size=shape.k,
            conv1d=SimpleNamespace(weight=self.layer.weight.float()[:, None], bias=None), activation="silu",
            A=self.layer.A.float(), D=self.layer.D.float(), dt_bias=self.layer.dt_bias.float(),
        )  # fmt: skip
        mixer.forward = lambda **given: mamba.MambaMixer2.forward(mixer, **given)
        layer = SimpleNamespace(mixer=mixer, layer_id=LAYER)
        layer._forward_mamba = partial(NemotronHMambaDecoderLayer._forward_mamba, layer)
        out = torch.full((len(inputs), size), float("nan"))
        with self.forwarding() as batch:
            if len(inputs) == len(self.batch.tokens):
                out = layer._forward_mamba(hidden, batch)
            else:
                with set_tc_piecewise_forward_context(batch, [None] * LAYER + [layer], None, [], []):
                    # The function itself: SGLang registers it as an operator on GPUs only.
                    nemotron_mamba2_with_output.__wrapped__(hidden, out, LAYER)
        return out.view(-1, shape.heads, shape.v)


def texts(row):
    """The pieces of a row."""
    if isinstance(row, TextRow):
        return [part for part in row.parts if isinstance(part, Text)]
    return [Text(row.num_tokens)]


def off(actual, expected):
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("seed", range(12))
def test_outputs_and_slots_are_those_of_the_recurrence(kind, seed):
    check(Server(kind, seed))


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("seed", BEHIND_CHUNKS)
def test_text_behind_chunks_is_left_to_sglang(kind, seed):
    server = Server(kind, seed)
    check(server)
    assert server.backend.link_pieces is None
    after = server.cache.temporal.clone()
    server.backend.init_forward_metadata(server.forward_batch)
    assert torch.equal(server.cache.temporal, after), "a row begins once"


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("seed", [*range(4), *BEHIND_CHUNKS])
def test_what_pads_a_batch_to_the_size_of_a_graph_is_in_no_state(monkeypatch, kind, seed):
    """Where SGLang's prefill graphs leave the layers out: those with a gated delta rule, and Nemotron-H's."""
    monkeypatch.setattr(radix_linear_attention, "is_in_breakable_cuda_graph", lambda: True)
    check(Server(kind, seed), padding=7)


def check(server, padding=0):
    batch, other_layer = server.batch, server.pool.h[0].clone()
    out, padded = server.run(padding).split([len(batch.tokens), padding])
    assert not padded.any(), "what follows in the graph must be finite"
    bounds = np.cumsum([0, *server.lens])
    new = [batch.tokens[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    expected = [server.oracle.outputs(seen, tokens) for seen, tokens in zip(batch.before, new, strict=True)]
    assert off(out, torch.cat(expected)) <= TOLERANCE
    requests, chunks = ([after.get(slot, before[slot]) for slot in range(NUM_SLOTS)] for before, after in (
        (batch.requests, batch.requests_after), (batch.chunks, batch.chunks_after)
    ))  # fmt: skip
    cache, pool = server.filled_cache(requests, server.tracked), server.filled_pool(chunks)
    kept = [(server.cache.conv[0][1], cache.conv[0][1]), (server.cache.temporal[1], cache.temporal[1])]
    kept += [(actual[1], due[1]) for actual, due in ((server.pool.h, pool.h), (server.pool.p, pool.p))]
    for actual, due in [*kept, (server.pool.conv[0][1], pool.conv[0][1])]:
        assert off(actual, due) <= TOLERANCE
    assert torch.equal(server.pool.h[0], other_layer)


@pytest.mark.parametrize("kind", LINKS)
def test_other_batches_are_sglangs(kind, monkeypatch):
    """With its own arguments; and nothing of SGLang's stays replaced."""
    server = Server(kind, 4)
    server.run()
    assert mamba.mamba_chunk_scan_combined is recurrent_layers.mamba_chunk_scan_combined
    server.backend.link_layers.pieces = None
    stock = Mock(return_value=torch.ones(1))
    monkeypatch.setattr(STOCK[kind], "forward" if kind == "mamba" else "forward_extend", stock)
    server.backend.init_forward_metadata(None)
    if kind != "mamba":
        server.backend.forward_extend("layer", "batch", "qkv", "a", "b", linear_attn_output="out")
        stock.assert_called_once_with("layer", "batch", "qkv", "a", "b", linear_attn_output="out")
    else:
        server.backend.forward("mixer", "hidden", "out", layer_id=LAYER, forward_batch="batch", mup_vector="mup")
        stock.assert_called_once_with("mixer", "hidden", "out", LAYER, "batch", "mup", False)
