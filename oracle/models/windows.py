"""Models in which some layers have windows, whatever else they have."""

from collections.abc import Mapping

from ..tokenizer import PAD, VOCAB_SIZE
from .spec import EXPERTS, MAX_POSITION, SMALL_VISION, YARN, ModelSpec, rope, shape

_GEMMA4_VISION = {**SMALL_VISION, **dict(num_key_value_heads=2, head_dim=16, position_embedding_size=64)}


def _gemma4(name: str, text: dict, vision: Mapping[str, object] = _GEMMA4_VISION, **spec) -> ModelSpec:
    """Layers with windows have heads of another shape than the others, whose keys are their values."""
    text_config = {
        **shape(96, 6, 4, 2, head_dim=32, global_head_dim=64, num_global_key_value_heads=1),
        **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION, sliding_window=24),
        **dict(layer_types=["sliding_attention", "full_attention"] * 3, attention_k_eq_v=True),
        **dict(vocab_size_per_layer_input=VOCAB_SIZE, pad_token_id=PAD),
        **dict(moe_intermediate_size=64),  # which SGLang asks for on a CPU
        "rope_parameters": {
            "full_attention": rope("proportional", partial_rotary_factor=0.25),
            "sliding_attention": {**rope(), "rope_theta": 100.0},
        },
        **text,
    }
    return ModelSpec(
        name,
        "Gemma4Config",
        dict(
            text_config=text_config,
            vision_config=dict(vision),
            tie_word_embeddings=True,
            **dict(eoi_token_id=None, eoa_token_index=None),  # SGLang would keep some models from answering these
        ),
        # Of SGLang's ways to attend, this model takes those for GPUs alone.
        cpu_options=dict(attention_backend="triton", enable_multimodal=False),
        seed=4,
        core=False,
        **spec,
    )


SPECS = [
    # Windows in every second layer, logit caps in all
    ModelSpec(
        "gemma2",
        "Gemma2Config",
        {
            **shape(128, 4, 4, 2, head_dim=48, rope_parameters=rope(), tie_word_embeddings=True),
            **dict(sliding_window=32, attn_logit_softcapping=2.0, query_pre_attn_scalar=32),
            "hidden_act": "gelu_pytorch_tanh",  # as in released models; transformers reads `hidden_activation`
            "final_logit_softcapping": None,  # for which SGLang has a Triton kernel alone
        },
        seed=17,
        core=False,
    ),
    # Windows in most layers, whose rotation is another than that of the others, both computed once for all layers
    ModelSpec(
        "gemma3",
        "Gemma3TextConfig",
        {
            **shape(128, 4, 4, 1, head_dim=48, query_pre_attn_scalar=128, tie_word_embeddings=True),
            **dict(layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"], sliding_window=32),
            "rope_parameters": {"full_attention": rope(), "sliding_attention": {**rope(), "rope_theta": 100.0}},
        },
        seed=1,
        core=False,
    ),
    # The same behind a part that sees images; one rotation is scaled
    ModelSpec(
        "gemma3-vision",
        "Gemma3Config",
        dict(
            text_config={
                **shape(128, 3, 4, 2, head_dim=32, query_pre_attn_scalar=64),
                **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION, sliding_window=24),
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": rope("linear", factor=8.0),
                    "sliding_attention": {**rope(), "rope_theta": 100.0},
                },
            },
            vision_config=dict(SMALL_VISION, image_size=56, patch_size=14, vision_use_head=False),
            mm_tokens_per_image=4,
            tie_word_embeddings=True,
        ),
        released=lambda name, weight: (name.replace("vision_tower.", "vision_tower.vision_model."), weight),
        seed=2,
        core=False,
    ),
    # The last two layers read the KV of those before; embeddings for each layer
    _gemma4("gemma4", dict(num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=16)),
    # Without these: with experts, and without encoders
    _gemma4(
        "gemma4-moe",
        dict(hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2),
        needs="a GPU: on a CPU SGLang has no experts of GELU",
    ),
    _gemma4(
        "gemma4-unified",
        dict(hidden_size_per_layer_input=0),
        dict(SMALL_VISION, model_patch_size=16, mm_embed_dim=32, mm_posemb_size=64, output_proj_dims=32),
        architecture="Gemma4UnifiedForConditionalGeneration",
    ),
    # Windows in every second layer, sinks in all; YaRN
    ModelSpec(
        "gpt-oss",
        "GptOssConfig",
        {
            **shape(128, 4, 8, 2, head_dim=32, rope_parameters={**YARN, "truncate": False}, sliding_window=24),
            **dict(num_local_experts=4, num_experts_per_tok=2, swiglu_limit=7.0),
        },
        # SGLang asks for a backend with sinks, and replaces it where the CPU does not have what it needs; by itself
        # it would lay out the experts' weights for Triton.
        cpu_options=dict(attention_backend="intel_amx", disable_cuda_graph=True, moe_runner_backend="triton"),
    ),
    # Windows in most layers, whose rotation is another than that of the others; qk-norm
    ModelSpec(
        "mellum",
        "MellumConfig",
        {
            **shape(96, 4, 4, 2, head_dim=32, rope_parameters={"full_attention": YARN, "sliding_attention": rope()}),
            **dict(layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"], sliding_window=40),
            **dict(mlp_layer_types=["sparse", "dense"] * 2, norm_topk_prob=True, **EXPERTS),
        },
        seed=1,
        core=False,
    ),
    # Windows in most layers, whose queries and keys are rotated; those of the others are not
    ModelSpec(
        "cohere2",
        "Cohere2Config",
        {
            **shape(128, 4, 4, 2, rope_parameters=rope(), tie_word_embeddings=True, logit_scale=2.2),
            **dict(sliding_window=160, layer_types=[*["sliding_attention"] * 3, "full_attention"]),
        },
        seed=1,
        core=False,
    ),
]
