"""Compatibility checks: all flags and model properties that chunk reuse does not support, each with the reason.

Rotating a query by an offset is right only if scores depend on positions only through RoPE's relative distance, if the
KV of every token has a slot that kernels can read, and if a row of `req_to_token` may be any list of slots.
"""

from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.server_args import ServerArgs

from sgl_kernel_lazy.validation import FP8
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.supported import ATTENTION_BACKENDS, DRAFTING, MAX_DRAFTS, STORAGE_BACKENDS, TESTED
from sglang_lazy.port.comb.pool import num_cross_layers
from sglang_lazy.port.facts import attention_backends, flags_of
from sglang_lazy.port.model.layers import INV_FREQ, attention_layers, attention_modules
from sglang_lazy.port.model.recurrent import Recurrence, has_latents


def known_traits(config: ModelConfig) -> ServerTraits:
    """What policies depend on, as far as a model's configuration tells it; the rest has its defaults."""
    recurrence = Recurrence.of(config)
    states = recurrence if recurrence is not None and recurrence.keeps_states else None
    return ServerTraits(
        cross_attention=num_cross_layers(config) > 0,
        recurrent=states is not None,
        latents=has_latents(config),
        preambles=states is None or states.transition is not None,  # short convolutions do not show their inputs
    )


def unfit_flags(args: ServerArgs) -> list[str]:
    """Reasons in the server's flags, which are resolved, found before the model is loaded."""
    flags = flags_of(args)
    wanted = {
        f"page size {flags.page_size}: chunks of any length pack without padding only at --page-size 1": (
            flags.page_size not in (None, 1)
        ),
        "--disable-radix-cache: chunks live in the radix cache": flags.disable_radix_cache,
        **_unfit_drafts(flags),
        "prefill-decode disaggregation: linked rows are not transferred": flags.disaggregation_mode != "null",
        "pipeline parallelism: fills are published by the rank that launches them": flags.pp_size > 1,
        "data-parallel attention: ranks would have to agree on fills": flags.attn_dp_size > 1,
        "context parallelism (--attn-cp-size, --enable-prefill-cp, --dcp-size): no rank has a row's tokens and KV": (
            flags.attn_cp_size > 1 or flags.enable_prefill_cp or flags.dcp_size > 1
        ),
        "two-batch overlap: it splits the batch the segments belong to": flags.enable_two_batch_overlap,
        "pd-multiplexing: it runs two attention backends at once": flags.enable_pdmux,
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH: it replays the rows of an earlier step": (
            envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get()
        ),
        "--cuda-graph-backend-prefill full: such graphs replay SGLang's own attention, without linked rows": (
            flags.cuda_graph_config.prefill.backend == Backend.FULL  # however it was asked for
        ),
        **_unfit_tiers(flags),
        "LMCache and FlexKV: they replace the radix cache": flags.enable_lmcache or flags.enable_flexkv,
        "streaming sessions: their slots are not in the tree": flags.enable_streaming_session,
        "session radix cache: it replaces the radix cache": flags.enable_session_radix_cache,
        "--enable-unified-memory: the slots in a row are not where the KV is": flags.enable_unified_memory,
        "deterministic inference: linked attention has no fixed split size": flags.enable_deterministic_inference,
        "eviction policy 'mru': the eviction heap needs priorities that only grow": (
            flags.radix_eviction_policy == "mru"
        ),
        "--quantization-param-path: attention stores keys and values with these scales but reads them without": (
            flags.quantization_param_path is not None
        ),
        "several tokenizer workers with --api-key or --admin-api-key: SGLang's workers do not check keys": (
            flags.tokenizer_worker_num > 1 and bool(flags.api_key or flags.admin_api_key)
        ),
        "diffusion language models: they do not decode from left to right": flags.dllm_algorithm is not None,
        "the Rust server: its requests bypass the plugin": envs.SGLANG_RUST_SERVER.get(),
        "the gRPC server: its requests bypass the plugin": flags.smg_grpc_mode or flags.grpc_mode,
        "Ray: its scheduler actors load no plugins": flags.use_ray,
        "--encoder-only: nothing is generated": flags.encoder_only,
        "SGLANG_RADIX_FORCE_MISS: a linked row cannot miss its chunks": envs.SGLANG_RADIX_FORCE_MISS.get(),
        "--radix-cache-backend: another cache was chosen": flags.radix_cache_backend not in (None, "lazy"),
    }
    reasons = [reason for reason, applies in wanted.items() if applies]
    if foreign := sorted(filter(None, attention_backends(args) - set(ATTENTION_BACKENDS))):
        known = ", ".join(ATTENTION_BACKENDS)
        reasons.append(f"attention backend {', '.join(foreign)}: linked attention supports {known}")
    return reasons


def _unfit_drafts(flags: Any) -> dict[str, bool]:
    """Reasons in the flags of speculative decoding."""
    if (algorithm := flags.speculative_algorithm) is None:
        return {}
    if algorithm not in DRAFTING:
        return {f"--speculative-algorithm {algorithm}: linked rows are verified for {', '.join(DRAFTING)}, NEXTN": True}
    steps = flags.speculative_num_steps or 0  # SGLang has no default for FROZEN_KV_MTP
    num_verified = flags.speculative_num_draft_tokens
    is_ngram = algorithm == "NGRAM"
    is_chain = flags.speculative_eagle_topk == 1 and 1 <= steps <= MAX_DRAFTS and num_verified == steps + 1
    return {
        f"--speculative-num-draft-tokens {num_verified} with NGRAM: linked rows verify {MAX_DRAFTS + 1} tokens": (
            is_ngram and num_verified > MAX_DRAFTS + 1
        ),
        f"drafts that form a tree: linked rows verify a chain of at most {MAX_DRAFTS}, as with --speculative-num-steps "
        "3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": not (is_chain or is_ngram),
        f"--disable-overlap-schedule with {algorithm}: without overlap SGLang calls its worker wrongly": (
            algorithm == "FROZEN_KV_MTP" and flags.disable_overlap_schedule
        ),
        "--enable-multi-layer-eagle: its drafts read earlier rows": flags.enable_multi_layer_eagle,
        "--speculative-adaptive: it makes attention anew while requests run": flags.speculative_adaptive,
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM: segments would be read on another stream": (
            envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()
        ),
        "--speculative-algorithm with --enable-mixed-chunk: such a step verifies nothing": flags.enable_mixed_chunk,
    }


def _unfit_tiers(flags: Any) -> dict[str, bool]:
    """Reasons in the flags of the hierarchical cache."""
    wanted = {
        "--hicache-write-policy write_back: it copies to the host while requests wait for the memory": (
            flags.hicache_write_policy == "write_back"
        ),
        f"--hicache-storage-backend {flags.hicache_storage_backend}: it stores only pages of the host's memory (use "
        f"{', '.join(STORAGE_BACKENDS)})": flags.hicache_storage_backend not in (None, *STORAGE_BACKENDS),
        "--hicache-io-backend direct: the scheduler would wait for the device to tell it which slots to copy": (
            flags.hicache_io_backend == "direct"
        ),
        f"--hicache-mem-layout {flags.hicache_mem_layout}: at page size 1 the host's memory is laid out by layers": (
            flags.hicache_mem_layout not in ("layer_first", "page_first")  # SGLang's default is the latter
        ),
    }
    return {reason: flags.enable_hierarchical_cache and applies for reason, applies in wanted.items()}


def architecture(config: ModelConfig) -> str:
    """The architecture of a model."""
    return (config.hf_config.architectures or ["unknown"])[0]


def unfit_config(config: ModelConfig, *, untested: bool = False) -> list[str]:
    """Reasons in a model's configuration, which is known before its weights are.

    untested: whether architectures outside TESTED are allowed.
    """
    if config.attention_arch == AttentionArch.MLA and not has_latents(config):
        return ["MLA: the link kernels cannot separate the rotary part of keys from the latent one"]
    kinds = set(getattr(config.hf_text_config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if not kind.endswith("attention") or kind == "linear_attention")
    recurrence = Recurrence.of(config)
    if recurrence is not None and not recurrence.keeps_states:
        return ["recurrent layers: chunks hold states of short convolutions, Mamba-2, gated delta rules and KDA only"]
    if recurrent and recurrence is None:
        return [f"layers of type {', '.join(recurrent)}: chunks hold no recurrent state"]
    reasons = []
    if config.is_encoder_decoder:
        reasons.append("encoder-decoder: cross attention has no chunks")
    if config.attention_chunk_size is not None:
        reasons.append("attention within blocks of positions: block boundaries would depend on a chunk's position")
    if not config.is_generation:
        reasons.append("embedding or reward model: nothing is generated")
    if (name := architecture(config)) not in TESTED and not untested:
        reasons.append(
            f"architecture {name}: not among those tested, which are {', '.join(sorted(TESTED))} "
            "(--lazy-untested-model serves it if it passes the start-up check)"
        )
    return reasons


def unfit_together(args: ServerArgs, config: ModelConfig) -> list[str]:
    """Reasons in flags that this model does not go with, which are known before its weights are."""
    flags, latents, crosses = flags_of(args), has_latents(config), num_cross_layers(config) > 0
    wanted = {
        "--attention-backend flashinfer: it expands the latents of prompts without a cached prefix, which those with "
        "chunks cannot have; --flashinfer-mla-disable-ragged has it read them": (
            latents and "flashinfer" in attention_backends(args) and not flags.flashinfer_mla_disable_ragged
        ),
        "--enable-mixed-chunk with MLA: SGLang's attention may not have room for all pieces": (
            latents and flags.enable_mixed_chunk
        ),
        "--speculative-algorithm with cross-attention: not tested": crosses and flags.speculative_algorithm is not None,
        "--enable-torch-compile: it would compile layers without the cross layers before them": (
            crosses and flags.enable_torch_compile
        ),
    }
    return [reason for reason, applies in wanted.items() if applies]


def unfit_draft(args: ServerArgs, config: ModelConfig) -> list[str]:
    """Reasons in the model that drafts, as far as its configuration tells them.  config: of the model that verifies."""
    flags = flags_of(args)
    if flags.speculative_algorithm in (None, "NGRAM"):
        return []
    path = flags.speculative_draft_model_path
    draft = ModelConfig.from_server_args(
        args,
        model_path=path,
        model_revision=flags.speculative_draft_model_revision,
        is_draft_model=True,
        context_length=config.context_len,
    )
    wanted = {
        f"--speculative-algorithm {flags.speculative_algorithm}: {architecture(config)} has no layer that drafts, so "
        "it needs a --speculative-draft-model-path": path is None and architecture(draft) == architecture(config),
        "--speculative-draft-model-path: its recurrent layers would share the model's states": (
            flags.speculative_algorithm == "STANDALONE" and None not in (Recurrence.of(config), Recurrence.of(draft))
        ),
    }
    return [reason for reason, applies in wanted.items() if applies]


def unfit_model(runner: Any, *, untested: bool = False) -> list[str]:
    """Reasons in the model that a `ModelRunner` has loaded, and in how it runs this model.

    untested: whether architectures outside TESTED are allowed.
    """
    config = runner.model_config
    reasons = unfit_config(config, untested=untested) + unfit_together(runner.server_args, config)
    latents = has_latents(config)
    if config.attention_arch == AttentionArch.MLA and not latents:
        return reasons  # what follows reads keys and values by heads
    recurrence = Recurrence.of(config)
    expected = config.num_hidden_layers if recurrence is None else recurrence.num_attention_layers
    if (num_layers := len(list(attention_layers(runner.model)))) != expected:
        reasons.append(f"attention in {num_layers} of {expected} layers: chunks hold no other state")
    # Blocks of mxfp8 have their own scales.
    if runner.kv_cache_dtype not in (runner.dtype, *FP8) or runner.kv_cache_dtype_str == "mxfp8":
        reasons.append(
            f"KV cache dtype {runner.kv_cache_dtype_str}: linked attention reads fp8_e4m3, fp8_e5m2 and the model's "
            f"own {runner.dtype}"
        )
    scaled = any(kv_scales(attn) != (1.0, 1.0) for attn, _ in attention_layers(runner.model))
    if runner.kv_cache_dtype != runner.dtype and scaled and "torch_native" in attention_backends(runner.server_args):
        reasons.append("the model's scales of fp8 keys and values: attention backend torch_native does not apply them")
    if num_cross_layers(config):
        flags = flags_of(runner.server_args)
        if flags.enable_lora and {"embed_tokens", "lm_head"} & runner.lora_manager.target_modules:
            reasons.append(
                "LoRA of embed_tokens or lm_head: the encoder reads the decoder's embedding, which may be its head, too"
            )
    if latents:
        reasons += [reason for reason, applies in _unfit_latents(runner).items() if applies]
    return [*reasons, *unfit_layers(runner.model, recurrence is not None, latents)] or _unfit_pools(runner)


def kv_scales(layer: Any) -> tuple[float, float]:
    """The scales by which a layer's keys and values are divided before they are rounded to fp8.

    Python floats, since reading SGLang's tensors of them would synchronize with the device.
    """
    return layer.k_scale_float or 1.0, layer.v_scale_float or 1.0


def _unfit_latents(runner: Any) -> dict[str, bool]:
    """Reasons in how a model with attention over latents is run, each with whether it applies."""
    return {
        "MLA in an fp8 cache: not tested": runner.kv_cache_dtype != runner.dtype,
        "--max-running-requests 1 with MLA: SGLang's attention has no room for a chunk behind a preamble": (
            runner.req_to_token_pool.size < 2
        ),
    }


def unfit_layers(model: torch.nn.Module, may_lack_rotation: bool, latents: bool = False) -> list[str]:
    """Reasons in the attention layers, each given once.

    may_lack_rotation: whether attention without positions is what the model means; elsewhere positions may be in its
        embeddings.
    latents: whether attention reads latents, which are its keys and, in part, its values; they must not be rotated.
    """
    probed = {module.attn for module in attention_modules(model)}
    reasons: dict[str, None] = {}
    for attn, rope in attention_layers(model):
        properties = {
            "layers without a rotary embedding: linked attention rotates the queries of all": (
                rope is None and not latents and not (may_lack_rotation and attn in probed)
            ),
            "MLA with a rotation: the link kernels cannot separate the rotary part of keys from the latent one": (
                latents and rope is not None
            ),
            f"rotary embedding {type(rope).__name__}: its angles are not position times a fixed frequency": (
                rope is not None and type(rope) not in INV_FREQ
            ),
            f"head dimensions {attn.qk_head_dim} and {attn.v_head_dim}: they must be the same for keys and values": (
                attn.qk_head_dim != attn.v_head_dim and not latents
            ),
            f"logit cap by {attn.logit_capping_method}: linked attention supports tanh": (
                bool(attn.logit_cap) and attn.logit_capping_method != "tanh"
            ),
            "cross attention layers": attn.is_cross_attention,
            f"attention of type {attn.attn_type}": attn.attn_type != AttentionType.DECODER,
            "query scale that depends on position": attn.xai_temperature_len > 0,
            f"position encoding {attn.pos_encoding_mode}": attn.pos_encoding_mode != "NONE",
        }
        reasons |= {reason: None for reason, applies in properties.items() if applies}
    return list(reasons)


def _unfit_pools(runner: Any) -> list[str]:
    """Reasons in the KV pools of an otherwise supported model."""
    pool = runner.token_to_kv_pool
    if isinstance(pool, SWAKVPool) and flags_of(runner.server_args).enable_hierarchical_cache:
        return ["--enable-hierarchical-cache: it copies one pool, and heads of two shapes take two"]
    for attn, _ in attention_layers(runner.model):
        heads, kept = [attn.tp_k_head_num, attn.qk_head_dim], list(pool.get_key_buffer(attn.layer_id).shape[1:])
        if kept != heads:
            return [
                f"keys of layer {attn.layer_id} are {heads}, but its pool keeps {kept}: with "
                "--disable-hybrid-swa-memory SGLang has one pool for heads of two shapes"
            ]
    return []
