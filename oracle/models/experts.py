"""Models of text whose layers all attend to everything, with experts."""

from .spec import EXPERTS, ModelSpec, rope, shape

SPECS = [
    ModelSpec(
        "qwen3-moe",
        "Qwen3MoeConfig",
        shape(96, 2, 4, 1, head_dim=32, rope_parameters=rope(), norm_topk_prob=True, **EXPERTS),
    ),
    ModelSpec(
        "mixtral",
        "MixtralConfig",
        shape(128, 2, 4, 2, head_dim=32, rope_parameters=rope(), num_local_experts=4, sliding_window=None),
        core=False,
    ),
    ModelSpec(
        "qwen2-moe",
        "Qwen2MoeConfig",
        shape(128, 2, 4, 4, rope_parameters=rope(), shared_expert_intermediate_size=64, **EXPERTS),
        core=False,
    ),
    # qk-norm by head, then NeoX pairing over half of the head
    ModelSpec(
        "glm4-moe",
        "Glm4MoeConfig",
        {
            **shape(128, 2, 4, 2, head_dim=32, rope_parameters=rope(partial_rotary_factor=0.5), attention_bias=True),
            **dict(use_qk_norm=True, n_routed_experts=4, n_shared_experts=1),
            **dict(num_experts_per_tok=2, moe_intermediate_size=64),
        },
        core=False,
    ),
    # qk-norm over all heads, then NeoX pairing over half of the head; SGLang reads `rotary_dim` and what follows it
    ModelSpec(
        "minimax-m2",
        "MiniMaxM2Config",
        {
            **shape(128, 2, 4, 2, head_dim=128, rope_parameters=rope(partial_rotary_factor=0.5)),
            **dict(num_local_experts=4, num_experts_per_tok=2),
            **dict(rotary_dim=64, use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True),
        },
        seed=1,
        needs="a GPU: SGLang's norm of queries and keys is a Triton kernel",
        core=False,
    ),
    ModelSpec(
        "granite-moe",
        "GraniteMoeConfig",
        {
            **shape(128, 2, 4, 2, rope_parameters=rope(), attention_multiplier=0.2),
            **dict(num_local_experts=4, num_experts_per_tok=2),
            **dict(residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=0.5),
        },
        core=False,
    ),
    # qk-norm over all heads
    ModelSpec("olmoe", "OlmoeConfig", shape(128, 2, 4, 4, rope_parameters=rope(), **EXPERTS), seed=1, core=False),
]
