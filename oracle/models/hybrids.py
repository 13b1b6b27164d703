"""Models with recurrent layers beside attention. The plugin refuses them, so they are in a table of their own.

Their decays are such that they remember hundreds of tokens (see `init_weight`): as transformers initializes them, they
forget within a token, and whatever ignores what a chunk does to a state would pass every test.
"""

import torch

from ..tokenizer import VOCAB_SIZE
from .spec import MAX_POSITION, ModelSpec, rope, shape

DELTA = dict(
    **dict(layer_types=[*["linear_attention"] * 3, "full_attention"], linear_conv_kernel_dim=4),
    **dict(linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4),
    full_attention_interval=4,  # SGLang reads this, transformers layer_types
)
"""Gated delta rule in three of four layers; two value heads for each key head."""
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
AXES = rope(partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
"""Positions on three axes."""
_SMALL = shape(64, 4, 4, 2, head_dim=32)
_MAMBA = dict(mamba_d_head=16, mamba_n_groups=1, mamba_d_state=32, mamba_d_conv=4, mamba_chunk_size=64)


def _with_eyes(name: str, config_class: str, more: dict | None = None, core: bool = True) -> ModelSpec:
    """A Qwen3.5 with its part that sees images."""
    text = dict(**_SMALL, **DELTA, **(more or {}), rope_parameters=AXES)
    vision = dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=64, patch_size=14, out_hidden_size=64)
    return ModelSpec(
        name,
        config_class,
        dict(
            text_config=dict(**text, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION),
            vision_config=dict(**vision, num_position_embeddings=64),
        ),
        cpu_options=dict(enable_multimodal=False),
        core=core,
    )


def _dense_layer_is_no_moe(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Transformers gives all MLPs of a Kimi Linear the name that released checkpoints give those with experts."""
    return name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."), weight


SPECS = [
    # Short convolutions; the state is their last inputs
    ModelSpec(
        "lfm2",
        "Lfm2Config",
        dict(
            **shape(128, 4, 4, 2, rope_parameters=rope(), tie_word_embeddings=True, block_auto_adjust_ff_dim=False),
            **dict(layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3),
        ),
    ),
    # The same with experts
    ModelSpec(
        "lfm2-moe",
        "Lfm2MoeConfig",
        dict(
            **shape(128, 4, 4, 2, rope_parameters=rope(), tie_word_embeddings=True),
            **dict(layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3),
            **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1),
        ),
        core=False,
    ),
    ModelSpec("qwen3.5", "Qwen3_5TextConfig", {**_SMALL, **DELTA}),
    ModelSpec("qwen3.5-moe", "Qwen3_5MoeTextConfig", {**_SMALL, **DELTA, **EXPERTS}, core=False),
    # As released: behind parts that see images, with positions on three axes
    _with_eyes("qwen3.5-vl", "Qwen3_5Config", core=False),
    _with_eyes("qwen3.5-vl-moe", "Qwen3_5MoeConfig", EXPERTS),
    ModelSpec("qwen3-next", "Qwen3NextConfig", {**_SMALL, **DELTA, **EXPERTS, "decoder_sparse_step": 1}, core=False),
    # KDA; attention over latents, without a rotation; experts
    ModelSpec(
        "kimi-linear",
        "KimiLinearConfig",
        dict(
            **shape(64, 4, 4, 4, layer_types=[*["linear_attention"] * 3, "full_attention"]),
            **dict(linear_head_dim=16, linear_num_heads=4, linear_conv_kernel_dim=4),
            **dict(kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=16),
            **dict(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1),
            mlp_layer_types=["dense", *["sparse"] * 3],
            routed_scaling_factor=1.0,  # SGLang's experts on a CPU do not scale
        ),
        served=dict(
            linear_attn_config=dict(
                kda_layers=[1, 2, 3], full_attn_layers=[4], head_dim=16, num_heads=4, short_conv_kernel_size=4
            ),
            **dict(first_k_dense_replace=1, moe_layer_freq=1, mla_use_nope=True),
        ),
        released=_dense_layer_is_no_moe,
    ),
    # Mamba-2; attention without a rotation
    ModelSpec(
        "nemotron-h",
        "NemotronHConfig",
        dict(
            **dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
            layers_block_type=["mamba", "attention", "mamba", "mlp"],
            **dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=32, n_groups=2, conv_kernel=4, chunk_size=64),
            time_step_min=1e-9,  # SGLang has none
        ),
        served=dict(layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_n_groups=2),
    ),
    # Mamba-2; attention without a rotation, experts
    ModelSpec(
        "granite4",
        "GraniteMoeHybridConfig",
        dict(
            **shape(128, 4, 4, 2, layer_types=["mamba", "mamba", "attention", "mamba"], position_embedding_type="nope"),
            **dict(**_MAMBA, mamba_n_heads=16, mamba_expand=2),
            **dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32),
        ),
    ),
    # Mamba-2 and attention in each layer
    ModelSpec(
        "falcon-h1",
        "FalconH1Config",
        dict(**shape(64, 3, 4, 2, head_dim=32), **_MAMBA, mamba_n_heads=4, mamba_d_ssm=64),
    ),
]

HYBRIDS: dict[str, ModelSpec] = {spec.name: spec for spec in SPECS}
