"""Models behind parts that see images, whose layers all attend to everything."""

from ..tokenizer import VOCAB_SIZE
from .spec import EXPERTS, MAX_POSITION, SMALL_VISION, ModelSpec, rope, shape

SPECS = [
    # Behind parts that see images
    ModelSpec(
        "mistral3",
        "Mistral3Config",
        dict(
            text_config=dict(
                model_type="mistral",
                **shape(128, 2, 4, 2, head_dim=48, rope_parameters=rope(), sliding_window=None),
                **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION),
            ),
            vision_config=dict(model_type="pixtral", **SMALL_VISION, image_size=56, patch_size=14, head_dim=16),
        ),
        cpu_options=dict(enable_multimodal=False),
        core=False,
    ),
    ModelSpec(
        "qwen3-vl-moe",
        "Qwen3VLMoeConfig",
        dict(
            text_config=dict(
                **shape(
                    128, 2, 4, 2, head_dim=32, rope_parameters=rope(mrope_section=[6, 5, 5], mrope_interleaved=True)
                ),
                **dict(
                    vocab_size=VOCAB_SIZE,
                    max_position_embeddings=MAX_POSITION,
                    **{**EXPERTS, "moe_intermediate_size": 96},
                ),
            ),
            vision_config=dict(
                **dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=64, patch_size=14, out_hidden_size=128),
                **dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
            ),
        ),
        cpu_options=dict(enable_multimodal=False),
        released=lambda name, weight: (name, weight.mT.contiguous() if ".experts." in name else weight),
        core=False,
    ),
    ModelSpec(
        "qwen2-vl",
        "Qwen2VLConfig",
        dict(
            text_config=dict(
                **shape(128, 2, 4, 2, rope_parameters=rope(mrope_section=[4, 6, 6])),
                **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION),
            ),
            # As in released models; transformers reads `in_channels`.
            vision_config=dict(depth=1, embed_dim=64, hidden_size=128, num_heads=2, mlp_ratio=1, in_chans=3),
        ),
        cpu_options=dict(enable_multimodal=False),
        core=False,
    ),
]
