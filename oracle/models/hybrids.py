"""Models with recurrent layers beside attention. The plugin refuses them, so they are in a table of their own.

Their decays are such that they remember hundreds of tokens (see `init_weight`): as transformers initializes them, they
forget within a token, and whatever ignores what a chunk does to a state would pass every test.
"""

from .spec import ModelSpec, rope, shape

_DELTA = dict(
    **shape(64, 4, 4, 2, head_dim=32),
    **dict(layer_types=[*["linear_attention"] * 3, "full_attention"], linear_conv_kernel_dim=4),
    **dict(linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4),
    full_attention_interval=4,  # SGLang reads this, transformers layer_types
)
"""Gated delta rule; two value heads for each key head."""
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_MAMBA = dict(mamba_d_head=16, mamba_n_groups=1, mamba_d_state=32, mamba_d_conv=4, mamba_chunk_size=64)

SPECS = [
    # Short convolutions; the state is their last inputs
    ModelSpec(
        "lfm2",
        "Lfm2Config",
        dict(
            **shape(64, 4, 2, 1, rope_parameters=rope(), tie_word_embeddings=True, block_auto_adjust_ff_dim=False),
            **dict(layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3),
        ),
    ),
    # The same with experts
    ModelSpec(
        "lfm2-moe",
        "Lfm2MoeConfig",
        dict(
            **shape(64, 4, 2, 1, rope_parameters=rope(), tie_word_embeddings=True),
            **dict(layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3),
            **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1),
        ),
    ),
    ModelSpec("qwen3.5", "Qwen3_5TextConfig", _DELTA),
    ModelSpec("qwen3.5-moe", "Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS}),
    # Mamba-2; attention without a rotation, experts
    ModelSpec(
        "granite4",
        "GraniteMoeHybridConfig",
        dict(
            **shape(64, 4, 2, 1, layer_types=["mamba", "mamba", "attention", "mamba"], position_embedding_type="nope"),
            **dict(**_MAMBA, mamba_n_heads=8, mamba_expand=2),
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
