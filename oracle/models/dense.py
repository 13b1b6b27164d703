"""Models of text whose layers all attend to everything, without experts."""

from .spec import YARN, ModelSpec, rope, shape

_LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256)


def _llama(name: str, rotation: dict, **spec) -> ModelSpec:
    return ModelSpec(name, "LlamaConfig", shape(128, 2, 4, 2, head_dim=32, rope_parameters=rotation), **spec)


SPECS = [
    ModelSpec("llama", "LlamaConfig", shape(128, 3, 8, 2, head_dim=32, rope_parameters=rope()), add_bos=True),
    _llama("llama-llama3", _LLAMA3, add_bos=True, chat_parts=False),
    _llama("llama-linear", rope("linear", factor=4.0), core=False),
    _llama("llama-yarn", YARN),
    _llama("llama-dynamic", rope("dynamic", factor=4.0)),
    # A class of SGLang's over a Llama's configuration; transformers has none.
    ModelSpec(
        "internlm3",
        "LlamaConfig",
        shape(128, 2, 4, 2, head_dim=32, rope_parameters=rope("dynamic", factor=6.0), qkv_bias=False, bias=False),
        architecture="InternLM3ForCausalLM",
        core=False,
    ),
    ModelSpec("qwen2", "Qwen2Config", shape(128, 2, 4, 1, rope_parameters=rope())),
    ModelSpec("qwen3", "Qwen3Config", shape(96, 2, 4, 2, head_dim=64, rope_parameters=rope()), chat_parts=False),
    ModelSpec(
        "mistral",
        "MistralConfig",
        shape(128, 2, 4, 4, head_dim=48, rope_parameters=rope(), sliding_window=None),
        add_bos=True,
        core=False,
    ),
    # NeoX pairing over a quarter of the head
    ModelSpec("stablelm", "StableLmConfig", shape(128, 2, 4, 2, rope_parameters=rope(partial_rotary_factor=0.25))),
    # GPT-J pairing over the whole head
    ModelSpec(
        "cohere",
        "CohereConfig",
        shape(128, 2, 4, 2, rope_parameters=rope(), tie_word_embeddings=True, logit_scale=2.2),
        add_bos=True,
    ),
    # GPT-J pairing over half of the head
    ModelSpec(
        "glm4",
        "Glm4Config",
        shape(128, 2, 4, 1, head_dim=32, rope_parameters=rope(partial_rotary_factor=0.5), attention_bias=True),
    ),
    ModelSpec(
        "phi3",
        "Phi3Config",
        shape(128, 2, 4, 2, rope_parameters=rope(partial_rotary_factor=1.0), sliding_window=None),
        core=False,
    ),
    # GPT-J pairing over the whole head
    ModelSpec(
        "ernie4.5",
        "Ernie4_5Config",
        shape(128, 2, 4, 2, head_dim=32, rope_parameters=rope()),
        architecture="Ernie4_5_ForCausalLM",
        seed=3,
        core=False,
    ),
    # qk-norm over all heads
    ModelSpec("olmo2", "Olmo2Config", shape(128, 2, 4, 2, rope_parameters=rope()), core=False),
    # a scale of its own
    ModelSpec(
        "granite",
        "GraniteConfig",
        {
            **shape(128, 2, 4, 2, rope_parameters=rope(), attention_multiplier=0.2),
            **dict(residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=0.5),
        },
        seed=3,
        core=False,
    ),
    ModelSpec("arcee", "ArceeConfig", shape(128, 2, 4, 2, head_dim=32, rope_parameters=rope()), seed=1, core=False),
    ModelSpec(
        "gemma",
        "GemmaConfig",
        # SGLang computes the exact GELU whatever the configuration says; transformers takes "gelu" for the approximate.
        shape(128, 2, 4, 1, head_dim=48, rope_parameters=rope(), tie_word_embeddings=True, hidden_act="gelu_python"),
        core=False,
    ),
    # NeoX pairing over 0.4 of the head; its attention takes `position_ids`
    ModelSpec(
        "phi2",
        "PhiConfig",
        {
            **shape(160, 2, 4, 4, rope_parameters=rope(partial_rotary_factor=0.4)),
            **dict(partial_rotary_factor=0.4, intermediate_size=640),  # SGLang takes four times the hidden size
        },
        core=False,
    ),
    ModelSpec(
        "starcoder2",
        "Starcoder2Config",
        shape(128, 2, 4, 2, rope_parameters=rope(), sliding_window=None),
        seed=2,
        core=False,
    ),
]
