"""Every flag and model property that chunk reuse cannot serve is refused, with its reason."""

import importlib
import importlib.metadata
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
import transformers
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.lfm2 import Lfm2Config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding, YaRNScalingMRotaryEmbedding
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig, default_cuda_graph_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from oracle.models import MODELS
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from sglang_lazy.attention.kernels import unfit_kernels
from sglang_lazy.core.config import ENV_VAR
from sglang_lazy.core.policy import ServerTraits, refusal
from sglang_lazy.core.supported import Unfit
from sglang_lazy.policies import get_policy
from sglang_lazy.port import plugin
from sglang_lazy.port.model import compat, recurrent
from sglang_lazy.port.model.layers import describe_layers
from sglang_lazy.recurrent.pool import StateLayout

pytestmark = pytest.mark.usefixtures("sglang_context")

FULL_PREFILL_GRAPHS = CudaGraphConfig(prefill=PhaseConfig(backend="full"))
FLAGS = {
    "attention_backend": "triton",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "page_size": 1,
    "disable_radix_cache": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "pp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "enable_prefill_cp": False,
    "dcp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": None,
    "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first",
    "cuda_graph_config": default_cuda_graph_config(),
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_streaming_session": False,
    "enable_session_radix_cache": False,
    "enable_unified_memory": False,
    "enable_deterministic_inference": False,
    "radix_eviction_policy": "lru",
    "quantization_param_path": None,
    "tokenizer_worker_num": 2,
    "api_key": None,
    "admin_api_key": None,
    "dllm_algorithm": None,
    "smg_grpc_mode": False,
    "grpc_mode": False,
    "use_ray": False,
    "encoder_only": False,
    "radix_cache_backend": "lazy",
}
UNFIT_FLAGS = [
    ("attention_backend", "flashmla", "attention backend flashmla:"),
    ("prefill_attention_backend", "flashmla", "attention backend flashmla:"),
    ("decode_attention_backend", "flashmla", "attention backend flashmla:"),
    ("page_size", 16, "page size 16"),
    ("disable_radix_cache", True, "--disable-radix-cache"),
    ("speculative_algorithm", "DFLASH", "--speculative-algorithm DFLASH"),
    ("disaggregation_mode", "prefill", "disaggregation"),
    ("pp_size", 2, "pipeline parallelism"),
    ("attn_dp_size", 2, "data-parallel attention"),
    ("attn_cp_size", 2, "--attn-cp-size"),
    ("enable_prefill_cp", True, "--enable-prefill-cp"),
    ("dcp_size", 2, "--dcp-size"),
    ("enable_two_batch_overlap", True, "two-batch overlap"),
    ("enable_pdmux", True, "pd-multiplexing"),
    ("hicache_write_policy", "write_back", "write_back"),
    ("hicache_storage_backend", "nixl", "--hicache-storage-backend nixl"),
    ("hicache_io_backend", "direct", "--hicache-io-backend direct"),
    ("hicache_mem_layout", "page_head", "--hicache-mem-layout page_head"),
    ("cuda_graph_config", FULL_PREFILL_GRAPHS, "--cuda-graph-backend-prefill full"),
    ("enable_lmcache", True, "LMCache"),
    ("enable_flexkv", True, "FlexKV"),
    ("enable_streaming_session", True, "streaming sessions"),
    ("enable_session_radix_cache", True, "session radix cache"),
    ("enable_unified_memory", True, "unified-memory"),
    ("enable_deterministic_inference", True, "deterministic inference"),
    ("radix_eviction_policy", "mru", "'mru'"),
    ("quantization_param_path", "scales.json", "--quantization-param-path"),
    ("api_key", "key", "several tokenizer workers"),
    ("admin_api_key", "key", "several tokenizer workers"),
    ("dllm_algorithm", "LowConfidence", "diffusion language models"),
    ("smg_grpc_mode", True, "gRPC"),
    ("grpc_mode", True, "gRPC"),
    ("use_ray", True, "Ray"),
    ("encoder_only", True, "--encoder-only"),
    ("radix_cache_backend", "other", "another cache"),
]


DRAFTING = {
    **FLAGS,
    "enable_hierarchical_cache": False,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "enable_multi_layer_eagle": False,
    "speculative_adaptive": False,
    "enable_mixed_chunk": False,
    "disable_overlap_schedule": False,
}
TREE = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
UNFIT_TO_DRAFT = [
    *(({"speculative_algorithm": name}, f"--speculative-algorithm {name}") for name in ("DFLASH", "DSPARK", "UNO")),
    ({"speculative_algorithm": "FROZEN_KV_MTP", "disable_overlap_schedule": True}, "--disable-overlap-schedule"),
    ({"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, TREE),
    ({"speculative_num_steps": 8, "speculative_num_draft_tokens": 9}, TREE),
    ({"speculative_num_steps": 0, "speculative_num_draft_tokens": 1}, TREE),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": None, "speculative_num_draft_tokens": None},
        TREE,
    ),
    ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12}, "--speculative-num-draft-tokens 12"),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ({"speculative_adaptive": True}, "--speculative-adaptive"),
    ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
]


class Args(SimpleNamespace):
    """`ServerArgs` whose flags are resolved."""

    def resolve_once(self):
        pass


def backends(base, prefill=None, decode=None):
    """Flags of attention backends."""
    return Args(attention_backend=base, prefill_attention_backend=prefill, decode_attention_backend=decode)


def test_the_defaults_fit():
    """No reason is found where there is none."""
    assert compat.unfit_flags(Args(**FLAGS)) == []


def test_flags_are_sglangs_own():
    """Every flag checked exists, so that a renamed one cannot pass unnoticed; and each is refused in a test below."""
    assert set(FLAGS) <= set(ServerArgs.__struct_fields__)
    assert set(FLAGS) - {"enable_hierarchical_cache", "tokenizer_worker_num"} == {flag for flag, _, _ in UNFIT_FLAGS}


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE"])
@pytest.mark.parametrize("steps", range(1, 8))
def test_chains_of_drafts_fit(algorithm, steps):
    given = {"speculative_algorithm": algorithm, "speculative_num_steps": steps}
    assert compat.unfit_flags(Args(**{**DRAFTING, **given, "speculative_num_draft_tokens": steps + 1})) == []
    assert set(DRAFTING) <= set(ServerArgs.__struct_fields__)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_drafts_fit_without_overlap(algorithm):
    given = {"speculative_algorithm": algorithm, "disable_overlap_schedule": True}
    assert compat.unfit_flags(Args(**{**DRAFTING, **given})) == []


@pytest.mark.parametrize("breadth", [1, 10])
def test_paths_of_trees_fit(breadth):
    """What NGRAM drafts is cut to chains."""
    given = {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": breadth, "speculative_num_draft_tokens": 8}
    assert compat.unfit_flags(Args(**{**DRAFTING, **given})) == []


@pytest.mark.parametrize(("flags", "reason"), UNFIT_TO_DRAFT)
def test_unfit_to_draft(flags, reason):
    (given,) = compat.unfit_flags(Args(**{**DRAFTING, **flags}))
    assert reason in given


def test_drafting_on_another_stream():
    with envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.override(True):
        assert compat.unfit_flags(Args(**FLAGS)) == []
        (given,) = compat.unfit_flags(Args(**DRAFTING))
    assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM" in given


@pytest.mark.parametrize("name", ["SGLANG_RUST_SERVER", "SGLANG_RADIX_FORCE_MISS", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"])
def test_unfit_environment(name):
    """An unsupported environment variable gives one reason."""
    with getattr(envs, name).override(True):
        (given,) = compat.unfit_flags(Args(**FLAGS))
    assert {"SGLANG_RUST_SERVER": "the Rust server"}.get(name, name) in given


@pytest.mark.parametrize(("flag", "value", "reason"), UNFIT_FLAGS)
def test_unfit_flags(flag, value, reason):
    """One unsupported flag gives one reason, which names it."""
    (given,) = compat.unfit_flags(Args(**{**FLAGS, flag: value}))
    assert reason in given


def test_full_prefill_graphs_do_not_fit_without_a_host_tier_either():
    """Their attention is captured with them, so linked rows would be read as ordinary ones."""
    given = {**FLAGS, "enable_hierarchical_cache": False, "cuda_graph_config": FULL_PREFILL_GRAPHS}
    (reason,) = compat.unfit_flags(Args(**given))
    assert "prefill full" in reason


WITH_STATES = {
    "enable_hierarchical_cache": False,
    "mamba_radix_cache_strategy": "extra_buffer",
    "disable_overlap_schedule": False,
    "enable_lora": False,
    "lora_paths": None,
    "speculative_algorithm": None,
    "hicache_storage_backend": None,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_int8_mamba_checkpoint": False,
    "enable_page_major_kv_layout": False,
}
"""Flags that matter for a model with recurrent layers, as they are by default."""
WITHOUT_OVERLAP = {**WITH_STATES, "mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}


class Config(SimpleNamespace):
    """`ModelConfig`, which can be a key."""

    __hash__ = object.__hash__


def lfm2_config(**changes):
    """SGLang's configuration of a model with recurrent layers, as far as checks read it."""
    config = Lfm2Config(architectures=["Lfm2ForCausalLM"], **changes)
    return Config(hf_config=config, is_draft_model=False, num_hidden_layers=config.num_hidden_layers)


@pytest.mark.parametrize("flags", [WITH_STATES, WITHOUT_OVERLAP])
def test_the_defaults_fit_recurrent_layers(flags):
    assert recurrent.unfit_states(Args(**flags), lfm2_config()) == []


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("mamba_radix_cache_strategy", "extra_buffer_lazy", "--mamba-radix-cache-strategy extra_buffer_lazy"),
        ("enable_linear_replayssm", True, "--enable-linear-replayssm"),
        ("enable_linear_replayssm_spec", True, "--enable-linear-replayssm"),
        ("enable_int8_mamba_checkpoint", True, "--enable-int8-mamba-checkpoint"),
        ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout"),
    ],
)
def test_unfit_flags_with_recurrent_layers(flag, value, reason):
    """One unsupported flag gives one reason, which names it; and none if the model has no such layers."""
    assert flag in ServerArgs.__struct_fields__
    args = Args(**{**WITH_STATES, flag: value})
    (given,) = recurrent.unfit_states(args, lfm2_config())
    assert reason in given
    assert recurrent.unfit_states(args, runner().model_config) == []


@pytest.mark.parametrize("given", [{"enable_lora": True}, {"lora_paths": ["a"]}])
def test_adapters_of_recurrent_layers(given):
    """Are refused for classes that do not say how large these are: SGLang guesses, without the gate of attention."""
    args = Args(**{**WITH_STATES, **given})
    assert recurrent.unfit_states(args, lfm2_config()) == []
    for module, architecture in (
        ("qwen3_next", "Qwen3NextForCausalLM"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("qwen3_5_text", "Qwen3_5MoeForCausalLM"),
    ):
        config = Qwen3NextConfig(architectures=[architecture])
        (reason,) = recurrent.unfit_states(args, Config(hf_config=config, is_draft_model=False))
        assert f"LoRA with {architecture}" in reason
        model = getattr(importlib.import_module(f"sglang.srt.models.{module}"), architecture)
        assert not hasattr(model, "get_hidden_dim"), "it says so by now, and can be served"


@pytest.mark.parametrize(("algorithm", "fits"), [("EAGLE", True), ("STANDALONE", True), ("EAGLE3", False)])
def test_gated_delta_rules_fit_drafts(algorithm, fits):
    """Of a layer of the model's own; other recurrent layers do not."""
    args = Args(**{**WITH_STATES, "speculative_algorithm": algorithm})
    config = Config(hf_config=Qwen3NextConfig(), is_draft_model=False)
    assert fits == (recurrent.unfit_states(args, config) == [])
    (given,) = recurrent.unfit_states(args, lfm2_config())
    assert "--speculative-algorithm" in given


@pytest.mark.parametrize(
    "target, algorithm, draft, reason",
    [
        ("llama", "EAGLE3", None, "LlamaForCausalLM has no layer that drafts"),
        ("llama", "EAGLE", None, "LlamaForCausalLM has no layer that drafts"),
        ("llama", "STANDALONE", None, "LlamaForCausalLM has no layer that drafts"),
        ("llama", "STANDALONE", "llama", None),
        ("llama", "STANDALONE", "qwen3.5", None),
        ("llama", "NGRAM", None, None),
        ("qwen3.5", "EAGLE", None, None),
        ("qwen3.5", "STANDALONE", "llama", None),
        ("qwen3.5", "STANDALONE", "qwen3.5", "its recurrent layers would share the model's states"),
    ],
)
def test_models_that_draft(model_dir, target, algorithm, draft, reason):
    """Their configuration suffices to refuse them, and SGLang reads it as before."""
    folder = {name: build_model({**MODELS, **HYBRIDS}[name], model_dir) for name in {target, draft or target}}
    args = ServerArgs(
        model_path=folder[target],
        device="cpu",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft and folder[draft],
    )
    config = ModelConfig.from_server_args(args)
    before = compat.architecture(config)
    given = compat.unfit_draft(args, config)
    assert len(given) == (reason is not None) and all(reason in one for one in given)
    assert before == compat.architecture(config) == compat.architecture(ModelConfig.from_server_args(args))


@pytest.mark.parametrize(
    "strategy, given, share",
    [("extra_buffer", {}, 0.1), ("extra_buffer", {"state_share": 0.2}, 0.2), ("extra_buffer_lazy", {}, 0)],
)
def test_states_take_memory_only_where_chunks_are_reused(monkeypatch, strategy, given, share):
    """Of 2 GiB that SGLang has for KV and states; by default the least, since KV is much larger."""
    layout = StateLayout(1, ((1, 256),), torch.float32)
    monkeypatch.setattr(recurrent, "state_layout", lambda config: layout)
    monkeypatch.setattr(recurrent, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2))
    monkeypatch.setenv(ENV_VAR, json.dumps(given))
    args, config = Args(**{**WITH_STATES, "mamba_radix_cache_strategy": strategy}), lfm2_config()
    config.head_dim, config.v_head_dim, config.get_num_kv_heads = 64, 32, lambda ranks: 8 // ranks
    config.kv_lora_rank, config.qk_rope_head_dim = 48, 16
    configurator = SimpleNamespace(model_config=config, server_args=args, kv_cache_dtype=torch.bfloat16)
    for config.attention_arch, width in ((AttentionArch.MLA, 48 + 16), (AttentionArch.MHA, 4 * (64 + 32))):
        assert recurrent.kv_bytes(configurator) == len(config.hf_config.full_attention_layer_ids) * width * 2
    left = recurrent.leave_room(lambda _, memory: memory, configurator, 2.0)
    assert left == pytest.approx(2 * (1 - share))
    memory = recurrent._memories.get(configurator.model_config, (0, 0))
    assert memory == (int(share * 2**31 * 7 / 8 / 1024), int(share * 2**31 / 8 / 1024))


class Layer(torch.nn.Module):
    """An attention layer as SGLang's models build it."""

    def __init__(self, rope=None, **attention):
        super().__init__()
        options = {"num_heads": 4, "head_dim": 32, "scaling": 1.0, "num_kv_heads": 2, "layer_id": 0, **attention}
        self.attn = RadixAttention(**options)
        self.rotary_emb = rope


def plain_rope():
    return RotaryEmbedding(32, 32, 128, 10000, True, torch.float32)


OF_CONFIGS = ("is_", "model_is", "attention_", "hf_text")


def runner(*layers, architecture="LlamaForCausalLM", **changes):
    """A model runner, reduced to what `unfit_model` reads."""
    config = {
        "hf_config": transformers.PretrainedConfig(architectures=[architecture]),
        "linear_attn_registry_result": None,
        "hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "model_is_mrope": False,
        "attention_chunk_size": None,
        "is_multimodal": False,
        "is_generation": True,
        "num_hidden_layers": len(layers),
        **{
            name: changes.pop(name)
            for name in list(changes)
            if name.startswith(("is_", "model_is", "attention_", "hf_text"))
        },
    }
    attention = [layer.attn for layer in layers if isinstance(layer, Layer)]
    shapes = {attn.layer_id: (attn.tp_k_head_num, attn.qk_head_dim) for attn in attention}
    fields = {
        "model_config": SimpleNamespace(**config),
        "server_args": backends("triton"),
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "token_to_kv_pool": SimpleNamespace(get_key_buffer=lambda layer_id: torch.zeros(1, *shapes[layer_id])),
        "kv_cache_dtype": torch.bfloat16,
        "kv_cache_dtype_str": "auto",
        "dtype": torch.bfloat16,
        "device": "cpu",
        "model": torch.nn.ModuleList(layers),
        **changes,
    }
    return SimpleNamespace(**fields)


def described(given):
    (layer,) = describe_layers(given.model, 128, "cpu").values()
    return layer


def test_a_plain_model_fits():
    """No reason is found where there is none."""
    assert compat.unfit_model(runner(Layer(plain_rope()))) == []
    assert compat.unfit_model(runner(Layer(plain_rope(), sliding_window_size=511))) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_arch": AttentionArch.MLA}, "rotary part of keys"),
        ({"hf_text_config": SimpleNamespace(layer_types=["linear_attention", "full_attention"])}, "linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"attention_chunk_size": 8192}, "attention within blocks"),
        ({"is_generation": False}, "embedding"),
        ({"architecture": "HunYuanDenseV1ForCausalLM"}, "HunYuanDenseV1ForCausalLM"),
        ({"kv_cache_dtype": torch.bfloat16, "kv_cache_dtype_str": "bf16", "dtype": torch.float16}, "dtype bf16"),
        ({"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "mxfp8"}, "dtype mxfp8"),
    ],
)
def test_unfit_models(changes, reason):
    """One unsupported property of a model gives one reason, which names it."""
    (given,) = compat.unfit_model(runner(Layer(plain_rope()), **changes))
    assert reason in given


class Latents(torch.nn.Module):
    """Attention over latents of 48 dimensions, the first 32 of which are values, as SGLang's models build it."""

    def __init__(self, rope):
        super().__init__()
        self.attn_mqa = RadixAttention(4, 48, 1.0, num_kv_heads=1, layer_id=3, v_head_dim=32)
        self.attn_mha = RadixAttention(4, 24, 1.0, num_kv_heads=4, layer_id=3, v_head_dim=16)
        self.rotary_emb = rope


def kimi(rotated=False, attention_backend="fa3", mixed=False, **changes):
    changes = {"req_to_token_pool": SimpleNamespace(size=2), **changes}
    given = runner(Latents(plain_rope() if rotated else None), attention_arch=AttentionArch.MLA, **changes)
    linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 4}
    given.model_config.hf_config = KimiLinearConfig(
        architectures=["KimiLinearForCausalLM"], num_hidden_layers=4, linear_attn_config=linear
    )
    given.token_to_kv_pool.get_key_buffer = lambda layer_id: torch.zeros(1, 1, 48)
    given.server_args.attention_backend = attention_backend
    given.server_args.flashinfer_mla_disable_ragged, given.server_args.enable_mixed_chunk = False, mixed
    return given


def test_latents_that_are_not_rotated_fit():
    """Of a model that SGLang never rotates; one layer, however SGLang computes it."""
    given = kimi()
    assert compat.unfit_model(given) == []
    layer = described(given)
    assert (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim) == (4, 1, 48)
    assert not layer.rope.cos_sin_cache[:, layer.rope.cos_sin_cache.shape[1] // 2 :].any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rotated": True}, "MLA with a rotation"),
        ({"attention_backend": "flashinfer"}, "--flashinfer-mla-disable-ragged"),
        ({"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "fp8_e4m3"}, "fp8 cache"),
        ({"mixed": True}, "--enable-mixed-chunk"),
        ({"req_to_token_pool": SimpleNamespace(size=1)}, "--max-running-requests 1"),
    ],
)
def test_unfit_latents(changes, reason):
    (given,) = compat.unfit_model(kimi(**changes))
    assert reason in given


def test_adapters_on_latents_are_refused():
    config = kimi().model_config
    config.is_draft_model = False
    args = Args(**{**WITH_STATES, "enable_lora": True})
    assert recurrent.unfit_states(args, config) == ["LoRA with KimiLinearForCausalLM: not tested"]


FP8 = {"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "fp8_e4m3"}


@pytest.mark.parametrize(
    "drafting", [SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3, SpeculativeAlgorithm.STANDALONE]
)
def test_unfit_models_whose_tokens_are_drafted(drafting):
    given = {"spec_algorithm": drafting}
    assert compat.unfit_model(runner(Layer(plain_rope(), sliding_window_size=511), **given, **FP8)) == []
    assert compat.unfit_model(runner(Layer(plain_rope()), **given, model_is_mrope=True)) == []


def scaled(k_scale, v_scale):
    """A layer with KV scales, as SGLang loads them."""
    layer = Layer(plain_rope())
    layer.attn.k_scale_float, layer.attn.v_scale_float = k_scale, v_scale
    return layer


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_an_fp8_cache_fits(name, kernels):
    """Both fp8 types, with and without a model's own scales."""
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
    given = runner(scaled(0.5, 2.0), kv_cache_dtype=dtype, kv_cache_dtype_str=name)
    assert compat.unfit_model(given) == []
    assert (
        unfit_kernels(
            kernels, described(given), torch.device(given.device), given.dtype, given.kv_cache_dtype, max_chunks=256
        )
        is None
    )


@pytest.mark.parametrize(
    ("kernels", "changes", "reason"),
    [
        ("triton", {"dtype": torch.float32}, "caches with a model in torch.float32"),
        ("triton", {"device": "cuda"}, "capability 8.9"),
        ("cuda", {}, "the kernels need a Hopper GPU"),
    ],
)
def test_kernels_that_cannot_read_an_fp8_cache(monkeypatch, kernels, changes, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    given = runner(Layer(plain_rope()), **{**FP8, **changes})
    assert reason in unfit_kernels(
        kernels, described(given), torch.device(given.device), given.dtype, given.kv_cache_dtype, max_chunks=256
    )


def test_copies_do_not_fit_an_fp8_cache():
    """Rotating a copied key would round it a second time."""
    assert "fp8" in get_policy("copy").unfit(ServerTraits(fp8_cache=True))
    assert get_policy("copy").unfit(ServerTraits()) is None
    assert get_policy("block").unfit(ServerTraits(fp8_cache=True)) is None


def test_query_needs_layers_without_windows():
    """A sliding-window layer's attention says nothing about what precedes its window."""
    assert "whole prompt" in get_policy("query").unfit(ServerTraits(whole_layers=False))
    assert get_policy("query").unfit(ServerTraits()) is None


def test_recurrent_layers_take_whole_chunks():
    """A part of a chunk has no state. What a preamble leaves before a chunk must be known."""
    server = ServerTraits(recurrent=True)
    for link in ("block", "full", "whole", "packet", "base", "base+whole"):
        assert refusal(get_policy(link), server) is None
    for link in ("query", "epic", "base+epic"):
        assert "all tokens" in refusal(get_policy(link), server)
    assert "convolutions" in refusal(get_policy("base"), server._replace(preambles=False))
    assert "whole prompt" in refusal(get_policy("whole"), ServerTraits(whole_layers=False))


def test_what_a_configuration_tells_policies():
    """So a default policy that a model could never serve is refused before its weights are loaded."""
    delta = Config(hf_config=Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]), is_draft_model=False)
    latents = kimi().model_config
    latents.is_draft_model = False
    assert compat.known_traits(runner().model_config) == ServerTraits()
    assert compat.known_traits(delta) == ServerTraits(recurrent=True)
    assert compat.known_traits(lfm2_config()) == ServerTraits(recurrent=True, preambles=False)
    assert compat.known_traits(latents) == ServerTraits(recurrent=True, latents=True)
    comb = transformers.LlamaConfig(architectures=["CombLlamaForConditionalGeneration"], cross_attention_layers=[1])
    encoded = Config(hf_config=comb, is_draft_model=False, linear_attn_registry_result=None)
    assert compat.known_traits(encoded) == ServerTraits(cross_attention=True)


def test_scales_that_the_stock_backend_does_not_apply():
    """SGLang's own attention fills chunks; it must store keys as the link path reads them."""
    native = backends(None, "torch_native", "torch_native")
    for layer, count in ((scaled(0.5, 0.5), 1), (scaled(1.0, 1.0), 0), (scaled(None, None), 0)):
        assert len(compat.unfit_model(runner(layer, server_args=native, **FP8))) == count


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ({"logit_cap": 30.0, "logit_capping_method": "clip"}, "logit cap by clip"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention of type"),
        ({"v_head_dim": 64}, "head dimensions 32 and 64"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
    ],
)
def test_unfit_layers(attention, reason):
    """One unsupported property of a layer gives one reason, which names it."""
    (given,) = compat.unfit_model(runner(Layer(plain_rope(), **attention)))
    assert reason in given


def test_layers_of_two_shapes():
    """As in Gemma 4: supported if each shape has its own pool, and without a host tier."""
    layers = Layer(plain_rope()), Layer(plain_rope(), num_kv_heads=4, layer_id=1)
    assert compat.unfit_model(runner(*layers)) == []
    one = SimpleNamespace(get_key_buffer=lambda layer_id: torch.zeros(1, 2, 32))
    (given,) = compat.unfit_model(runner(*layers, token_to_kv_pool=one))
    assert given.startswith("keys of layer 1 are [4, 32], but its pool keeps [2, 32]: with --disable-hybrid-swa-memory")
    tiers = runner(*layers, token_to_kv_pool=object.__new__(SWAKVPool))
    tiers.server_args.enable_hierarchical_cache = True
    (given,) = compat.unfit_model(tiers)
    assert given.startswith("--enable-hierarchical-cache")


def test_a_query_scale_that_depends_on_the_position():
    """Models set it as an attribute of their layers."""
    layer = Layer(plain_rope())
    layer.attn.xai_temperature_len = 8
    (given,) = compat.unfit_model(runner(layer))
    assert "query scale" in given


def test_unfit_rotary_embeddings():
    """No rotary embedding, and one whose rotation cannot be undone."""
    sections = dict(mrope_section=[4, 6, 6], scaling_factor=2.0)
    mrope = YaRNScalingMRotaryEmbedding(32, 32, 128, 10000, True, dtype=torch.float32, **sections)
    for rope, reason in ((None, "layers without a rotary embedding"), (mrope, "YaRNScalingMRotaryEmbedding")):
        (given,) = compat.unfit_model(runner(Layer(rope)))
        assert reason in given


def test_attention_without_rotation_beside_recurrent_layers():
    """There it is what the model means; but an attention layer that the check does not find is refused."""
    hidden = torch.nn.ModuleList([Layer().attn])
    assert compat.unfit_layers(torch.nn.ModuleList([Layer()]), may_lack_rotation=True) == []
    (given,) = compat.unfit_layers(hidden, may_lack_rotation=True)
    assert "layers without a rotary embedding" in given


def test_positions_of_several_axes():
    """Supported, with images too: a text token has the same position on every axis."""
    mrope = MRotaryEmbedding(32, 32, 128, 10000, True, torch.float32, mrope_section=[4, 6, 6])
    assert compat.unfit_model(runner(Layer(mrope), model_is_mrope=True, is_multimodal=True)) == []


def test_an_untested_architecture():
    """Refused unless a flag says to try it; with the flag, all other reasons still hold."""
    given = runner(Layer(plain_rope()), architecture="NewForCausalLM")
    (reason,) = compat.unfit_model(given)
    assert "NewForCausalLM" in reason and "--lazy-untested-model" in reason
    assert compat.unfit_model(given, untested=True) == []
    (reason,) = compat.unfit_model(runner(Layer(None), architecture="NewForCausalLM"), untested=True)
    assert "rotary" in reason


def test_layers_with_another_state():
    """Some or all layers keep state other than the keys and values of attention."""
    layers = (Layer(plain_rope()), torch.nn.Linear(1, 1))
    (reason,) = compat.unfit_model(runner(*layers))
    assert "attention in 1 of 2 layers" in reason


def test_the_message_says_what_to_do():
    """Every reason on its own line, then the way out."""
    message = str(pickle.loads(pickle.dumps(Unfit(["first", "second"]))))  # as from a scheduler
    assert "\n  - first\n  - second\n" in message and "--lazy-fallback" in message


def test_another_sglang_is_refused(monkeypatch):
    """The message names both versions."""
    monkeypatch.delenv(plugin.ANY_SGLANG, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.16")
    with pytest.raises(RuntimeError, match=r"0\.5\.23.*0\.5\.16"):
        plugin.check_version()


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("enable_lora", True, "LoRA of embed_tokens"),
        ("enable_torch_compile", True, "torch-compile"),
    ],
)
def test_flags_unfit_for_a_chunk_encoder(flag, value, reason):
    """One flag gives one reason, and only with a model that encodes chunks."""
    architecture = "CombLlamaForConditionalGeneration"
    comb, other = runner(Layer(plain_rope()), architecture=architecture), runner(Layer(plain_rope()))
    comb.model_config.hf_config.cross_attention_layers = [0]
    unset = dict(enable_lora=None, enable_torch_compile=False, speculative_algorithm=None)
    for given in (comb, other):
        vars(given.server_args).update(unset)
        given.lora_manager = SimpleNamespace(target_modules={"qkv_proj", "embed_tokens"})
    assert compat.unfit_model(comb) == []
    comb.server_args.speculative_algorithm = "EAGLE"
    (given,) = compat.unfit_model(comb)
    assert "--speculative-algorithm" in given
    comb.server_args.speculative_algorithm = None
    setattr(comb.server_args, flag, value)
    setattr(other.server_args, flag, value)
    (given,) = compat.unfit_model(comb)
    assert reason in given
    assert compat.unfit_model(other) == []
