"""Scales of an fp8 cache: KV is divided by them when stored and multiplied by them when read."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_kernel_lazy import get_implementation, rope_cos_sin
from sgl_kernel_lazy.rows import Rows
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.model import AttentionLayer, LayerRope, ServedModel
from sglang_lazy.port.model.attention import LinkAttention

pytestmark = pytest.mark.usefixtures("sglang_context")

NUM_TOKENS, NUM_HEADS, HEAD_DIM = 5, 2, 32


def attend(cache_dtype, k, v, k_scale, v_scale):
    """One decode step of the link path over a pool of this dtype that has stored k and v."""
    layer = RadixAttention(NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_HEADS, 0)
    layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
    layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    pool = MHATokenToKVPool(NUM_TOKENS + 1, 1, cache_dtype, NUM_HEADS, HEAD_DIM, 1, "cpu", enable_memory_saver=False)
    rope = SimpleNamespace(cos_sin_cache=rope_cos_sin(torch.ones(HEAD_DIM // 2).double(), 8), is_neox=True)
    model = SimpleNamespace(layers={0: AttentionLayer(NUM_HEADS, NUM_HEADS, HEAD_DIM, rope)})
    backend = SimpleNamespace(
        link_pool=pool,
        link_model=model,
        link_fp8=cache_dtype != torch.float32,
        link_window_slots=None,
        link_stock_part=None,
        link_table=SimpleNamespace(loads=None),
        link_layers={},
    )
    backend._scales = lambda *given: LinkAttention._scales(backend, *given)
    backend._with_caches = lambda *given: LinkAttention._with_caches(backend, *given)
    slots = torch.arange(1, NUM_TOKENS + 1)
    q = torch.full((1, NUM_HEADS * HEAD_DIM), 1000.0)
    batch = SimpleNamespace(out_cache_loc=slots)
    q, linked = LinkAttention._prepare(backend, q, k.clone(), v.clone(), layer, batch, True, {})
    ints = {name: torch.zeros(1, 1, dtype=torch.int32) for name in ("segment_ends", "segment_offsets")}
    ints |= {"num_segments": torch.zeros(1, dtype=torch.int32), "kv_indices": slots}
    ints["kv_indptr"] = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    return get_implementation("torch").link_decode(q, linked, Rows(**ints))


def test_scales_cancel():
    """e4m3 can hold these keys and values only when scaled; a cache of the model's dtype is not scaled."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_DIM, generator=generator) * size for size in (1e-3, 1000.0))
    exact = attend(torch.float32, k, v, 1.0, 1.0)
    assert torch.equal(attend(torch.float32, k, v, 2.0**-8, 16.0), exact)
    scaled = attend(torch.float8_e4m3fn, k, v, 2.0**-8, 16.0)
    assert ((scaled - exact).norm() / exact.norm()) < 2**-4
    unscaled = attend(torch.float8_e4m3fn, k, v, 1.0, 1.0)
    assert not ((unscaled - exact).norm() / exact.norm()) < 0.5


def test_kernels_are_compiled_for_every_scale():
    """Triton's contain it: else the first prompt would wait for a kernel of each layer with a scale of its own."""
    rope = LayerRope(torch.zeros(HEAD_DIM // 2), 8, True, "cpu")
    kernels, model = Mock(**{"decode_workspace.return_value": torch.empty(1)}), torch.nn.ModuleList()
    for layer_id, k_scale in enumerate([0.5, 2.0, 0.5, None]):
        module = torch.nn.Module()
        module.attn = RadixAttention(NUM_HEADS, HEAD_DIM, 1.0, NUM_HEADS, layer_id)
        module.attn.k_scale_float = module.attn.v_scale_float = k_scale
        model.append(module)
    layer = AttentionLayer(NUM_HEADS, NUM_HEADS, HEAD_DIM, rope, kernels=kernels)
    table = SegmentTable(2, 1, "cpu", ServedModel({}, dict.fromkeys(range(len(model)), layer)))
    cache = torch.zeros(2, NUM_HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn)
    runner = SimpleNamespace(
        model=model,
        server_args=SimpleNamespace(speculative_num_draft_tokens=None),
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float8_e4m3fn,
        token_to_kv_pool=Mock(**{"get_kv_buffer.return_value": (cache, cache)}),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 4, dtype=torch.int32)),
    )
    backend = LinkAttention.__new__(LinkAttention)
    backend.init_link_path(runner, table, table.model)
    assert [call.args[1].sm_scale for call in kernels.link_extend.mock_calls] == [0.5, 2.0, 1.0]

    attn, sinks = model[1].attn, torch.zeros(NUM_HEADS)
    described = backend._with_caches(attn, torch.float32, sinks)
    assert (described.sm_scale, described.v_scale, described.sinks) == (2.0, 2.0, sinks)
    assert backend._with_caches(attn, torch.float32, sinks) is described, "it is checked once"
    attn.k_scale_float = 4.0  # as other weights may bring it
    assert backend._with_caches(attn, torch.float32, sinks).sm_scale == 4.0
    assert backend._with_caches(attn, torch.float32, None).sinks is None
    runner.token_to_kv_pool.get_kv_buffer.return_value = (other := cache.clone(), cache)
    assert backend._with_caches(attn, torch.float32, None).k_cache is other
