"""Tiny random-weight models of every served architecture, built on demand without a network."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from .tokenizer import BOS, EOS, PAD, VOCAB_SIZE, build_tokenizer

MAX_POSITION = 2048
ROPE_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One architecture: its `transformers` config class, what it sets there, and how its tokenizer behaves."""

    name: str
    config_class: str
    settings: Mapping[str, object]
    add_bos: bool = False
    needs: str | None = None  # what to serve it, where a CPU does not do
    seed: int = 0  # of the weights, such that no two tokens of the tests are equally likely
    chat_parts: bool = True  # the chat template loops over content parts; otherwise it takes a string
    # A weight, as transformers saves it, by the name and in the layout of released checkpoints
    released: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] | None = dataclasses.field(
        default=None, repr=False
    )
    architecture: str | None = None  # in config.json, where SGLang's class is not the one that transformers has
    cpu_options: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of the engine, where it needs some
    core: bool = True  # False: its attention resembles that of a core model, so tests may try less

    def config(self):
        """The Hugging Face configuration."""
        common = dict(
            vocab_size=VOCAB_SIZE,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            max_position_embeddings=MAX_POSITION,
            tie_word_embeddings=False,
            dtype="float32",
        )
        return getattr(transformers, self.config_class)(**{**common, **self.settings})


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    return dict(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


def _rope(rope_type: str = "default", **more) -> dict:
    return {"rope_type": rope_type, "rope_theta": ROPE_THETA, **more}


def _llama(name: str, rope: dict, **spec) -> ModelSpec:
    return ModelSpec(name, "LlamaConfig", _shape(128, 2, 4, 2, head_dim=32, rope_parameters=rope), **spec)


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=MAX_POSITION // 4)
_SMALL_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
_GEMMA4_VISION = {**_SMALL_VISION, **dict(num_key_value_heads=2, head_dim=16, position_embedding_size=64)}


def _gemma4(name: str, text: dict, vision: Mapping[str, object] = _GEMMA4_VISION, **spec) -> ModelSpec:
    """Layers with windows have heads of another shape than the others, whose keys are their values."""
    text_config = {
        **_shape(96, 6, 4, 2, head_dim=32, global_head_dim=64, num_global_key_value_heads=1),
        **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION, sliding_window=24),
        **dict(layer_types=["sliding_attention", "full_attention"] * 3, attention_k_eq_v=True),
        **dict(vocab_size_per_layer_input=VOCAB_SIZE, pad_token_id=PAD),
        **dict(moe_intermediate_size=64),  # which SGLang asks for on a CPU
        "rope_parameters": {
            "full_attention": _rope("proportional", partial_rotary_factor=0.25),
            "sliding_attention": {**_rope(), "rope_theta": 100.0},
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


_SPECS = [
    ModelSpec("llama", "LlamaConfig", _shape(128, 3, 8, 2, head_dim=32, rope_parameters=_rope()), add_bos=True),
    _llama("llama-llama3", _LLAMA3, add_bos=True, chat_parts=False),
    _llama("llama-linear", _rope("linear", factor=4.0), core=False),
    _llama("llama-yarn", _YARN),
    _llama("llama-dynamic", _rope("dynamic", factor=4.0)),
    ModelSpec("qwen2", "Qwen2Config", _shape(128, 2, 4, 1, rope_parameters=_rope())),
    ModelSpec("qwen3", "Qwen3Config", _shape(96, 2, 4, 2, head_dim=64, rope_parameters=_rope()), chat_parts=False),
    ModelSpec(
        "qwen3-moe",
        "Qwen3MoeConfig",
        _shape(96, 2, 4, 1, head_dim=32, rope_parameters=_rope(), norm_topk_prob=True, **_EXPERTS),
    ),
    ModelSpec(
        "mistral",
        "MistralConfig",
        _shape(128, 2, 4, 4, head_dim=48, rope_parameters=_rope(), sliding_window=None),
        add_bos=True,
        core=False,
    ),
    # NeoX pairing over a quarter of the head
    ModelSpec("stablelm", "StableLmConfig", _shape(128, 2, 4, 2, rope_parameters=_rope(partial_rotary_factor=0.25))),
    # GPT-J pairing over the whole head
    ModelSpec(
        "cohere",
        "CohereConfig",
        _shape(128, 2, 4, 2, rope_parameters=_rope(), tie_word_embeddings=True, logit_scale=2.2),
        add_bos=True,
    ),
    # GPT-J pairing over half of the head
    ModelSpec(
        "glm4",
        "Glm4Config",
        _shape(128, 2, 4, 1, head_dim=32, rope_parameters=_rope(partial_rotary_factor=0.5), attention_bias=True),
    ),
    ModelSpec(
        "phi3",
        "Phi3Config",
        _shape(128, 2, 4, 2, rope_parameters=_rope(partial_rotary_factor=1.0), sliding_window=None),
        core=False,
    ),
    ModelSpec(
        "mixtral",
        "MixtralConfig",
        _shape(128, 2, 4, 2, head_dim=32, rope_parameters=_rope(), num_local_experts=4, sliding_window=None),
        core=False,
    ),
    ModelSpec(
        "qwen2-moe",
        "Qwen2MoeConfig",
        _shape(128, 2, 4, 4, rope_parameters=_rope(), shared_expert_intermediate_size=64, **_EXPERTS),
        core=False,
    ),
    # qk-norm by head, then NeoX pairing over half of the head
    ModelSpec(
        "glm4-moe",
        "Glm4MoeConfig",
        {
            **_shape(128, 2, 4, 2, head_dim=32, rope_parameters=_rope(partial_rotary_factor=0.5), attention_bias=True),
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
            **_shape(128, 2, 4, 2, head_dim=128, rope_parameters=_rope(partial_rotary_factor=0.5)),
            **dict(num_local_experts=4, num_experts_per_tok=2),
            **dict(rotary_dim=64, use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True),
        },
        seed=1,
        needs="a GPU: SGLang's norm of queries and keys is a Triton kernel",
        core=False,
    ),
    # Windows in every second layer, logit caps in all
    ModelSpec(
        "gemma2",
        "Gemma2Config",
        {
            **_shape(128, 4, 4, 2, head_dim=48, rope_parameters=_rope(), tie_word_embeddings=True),
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
            **_shape(128, 4, 4, 1, head_dim=48, query_pre_attn_scalar=128, tie_word_embeddings=True),
            **dict(layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"], sliding_window=32),
            "rope_parameters": {"full_attention": _rope(), "sliding_attention": {**_rope(), "rope_theta": 100.0}},
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
                **_shape(128, 3, 4, 2, head_dim=32, query_pre_attn_scalar=64),
                **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION, sliding_window=24),
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": _rope("linear", factor=8.0),
                    "sliding_attention": {**_rope(), "rope_theta": 100.0},
                },
            },
            vision_config=dict(_SMALL_VISION, image_size=56, patch_size=14, vision_use_head=False),
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
        dict(_SMALL_VISION, model_patch_size=16, mm_embed_dim=32, mm_posemb_size=64, output_proj_dims=32),
        architecture="Gemma4UnifiedForConditionalGeneration",
    ),
    # GPT-J pairing over the whole head
    ModelSpec(
        "ernie4.5",
        "Ernie4_5Config",
        _shape(128, 2, 4, 2, head_dim=32, rope_parameters=_rope()),
        architecture="Ernie4_5_ForCausalLM",
        seed=3,
        core=False,
    ),
    # qk-norm over all heads
    ModelSpec("olmo2", "Olmo2Config", _shape(128, 2, 4, 2, rope_parameters=_rope()), core=False),
    # a scale of its own
    ModelSpec(
        "granite",
        "GraniteConfig",
        {
            **_shape(128, 2, 4, 2, rope_parameters=_rope(), attention_multiplier=0.2),
            **dict(residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=0.5),
        },
        seed=3,
        core=False,
    ),
    ModelSpec("arcee", "ArceeConfig", _shape(128, 2, 4, 2, head_dim=32, rope_parameters=_rope()), seed=1, core=False),
    ModelSpec(
        "gemma",
        "GemmaConfig",
        # SGLang computes the exact GELU whatever the configuration says.
        _shape(128, 2, 4, 1, head_dim=48, rope_parameters=_rope(), tie_word_embeddings=True, hidden_act="gelu"),
        core=False,
    ),
    # NeoX pairing over 0.4 of the head; its attention takes `position_ids`
    ModelSpec(
        "phi2",
        "PhiConfig",
        {
            **_shape(160, 2, 4, 4, rope_parameters=_rope(partial_rotary_factor=0.4)),
            **dict(partial_rotary_factor=0.4, intermediate_size=640),  # SGLang takes four times the hidden size
        },
        core=False,
    ),
    # Windows in every second layer, sinks in all; YaRN
    ModelSpec(
        "gpt-oss",
        "GptOssConfig",
        {
            **_shape(128, 4, 8, 2, head_dim=32, rope_parameters={**_YARN, "truncate": False}, sliding_window=24),
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
            **_shape(96, 4, 4, 2, head_dim=32, rope_parameters={"full_attention": _YARN, "sliding_attention": _rope()}),
            **dict(layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"], sliding_window=40),
            **dict(mlp_layer_types=["sparse", "dense"] * 2, norm_topk_prob=True, **_EXPERTS),
        },
        seed=1,
        core=False,
    ),
    # Behind parts that see images
    ModelSpec(
        "mistral3",
        "Mistral3Config",
        dict(
            text_config=dict(
                model_type="mistral",
                **_shape(128, 2, 4, 2, head_dim=48, rope_parameters=_rope(), sliding_window=None),
                **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION),
            ),
            vision_config=dict(model_type="pixtral", **_SMALL_VISION, image_size=56, patch_size=14, head_dim=16),
        ),
        cpu_options=dict(enable_multimodal=False),
        core=False,
    ),
    ModelSpec(
        "qwen3-vl-moe",
        "Qwen3VLMoeConfig",
        dict(
            text_config=dict(
                **_shape(
                    128, 2, 4, 2, head_dim=32, rope_parameters=_rope(mrope_section=[6, 5, 5], mrope_interleaved=True)
                ),
                **dict(
                    vocab_size=VOCAB_SIZE,
                    max_position_embeddings=MAX_POSITION,
                    **{**_EXPERTS, "moe_intermediate_size": 96},
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
                **_shape(128, 2, 4, 2, rope_parameters=_rope(mrope_section=[4, 6, 6])),
                **dict(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITION),
            ),
            # As in released models; transformers reads `in_channels`.
            vision_config=dict(depth=1, embed_dim=64, hidden_size=128, num_heads=2, mlp_ratio=1, in_chans=3),
        ),
        cpu_options=dict(enable_multimodal=False),
        core=False,
    ),
    # Windows in most layers, whose queries and keys are rotated; those of the others are not
    ModelSpec(
        "cohere2",
        "Cohere2Config",
        {
            **_shape(128, 4, 4, 2, rope_parameters=_rope(), tie_word_embeddings=True, logit_scale=2.2),
            **dict(sliding_window=160, layer_types=[*["sliding_attention"] * 3, "full_attention"]),
        },
        seed=1,
        core=False,
    ),
    ModelSpec(
        "granite-moe",
        "GraniteMoeConfig",
        {
            **_shape(128, 2, 4, 2, rope_parameters=_rope(), attention_multiplier=0.2),
            **dict(num_local_experts=4, num_experts_per_tok=2),
            **dict(residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=0.5),
        },
        core=False,
    ),
    # qk-norm over all heads
    ModelSpec("olmoe", "OlmoeConfig", _shape(128, 2, 4, 4, rope_parameters=_rope(), **_EXPERTS), seed=1, core=False),
    ModelSpec(
        "starcoder2",
        "Starcoder2Config",
        _shape(128, 2, 4, 2, rope_parameters=_rope(), sliding_window=None),
        seed=2,
        core=False,
    ),
    # A class of SGLang's over a Llama's configuration; transformers has none.
    ModelSpec(
        "internlm3",
        "LlamaConfig",
        _shape(128, 2, 4, 2, head_dim=32, rope_parameters=_rope("dynamic", factor=6.0), qkv_bias=False, bias=False),
        architecture="InternLM3ForCausalLM",
        core=False,
    ),
]
MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def build(name: str, cache_dir: str | Path) -> str:
    """The folder of model `name` under `cache_dir`, see `build_model`. Raises KeyError for an unknown name."""
    return build_model(MODELS[name], cache_dir)


def build_model(spec: ModelSpec, cache_dir: str | Path) -> str:
    """The folder of a model under `cache_dir`: config, fp32 safetensors, tokenizer; made if it is not there.

    The same spec, code and library version give the same weights. Processes may race: each builds a private copy
    and the first rename wins.
    """
    path = Path(cache_dir) / f"{spec.name}-{_fingerprint(spec)}"
    if path.exists():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=path.parent))
    try:
        random_model(spec).save_pretrained(work)
        if spec.released:
            file = work / "model.safetensors"
            weights = dict(spec.released(name, weight) for name, weight in load_file(file).items())
            save_file(weights, file, {"format": "pt"})
        if spec.architecture:
            file = work / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [spec.architecture]}))
        build_tokenizer(work, add_bos=spec.add_bos, chat_parts=spec.chat_parts, max_length=MAX_POSITION)
        os.rename(work, path)
    except OSError:
        if not path.exists():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(path)


def model_class(config: transformers.PretrainedConfig) -> type:
    """What makes a model that generates text of this configuration."""
    sees = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def random_model(spec: ModelSpec) -> transformers.PreTrainedModel:
    """The model in fp32 with seeded weights under which the next token depends strongly on the far context."""
    model = model_class(config := spec.config()).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            _init(name, weight, generator, tied=model.config.tie_word_embeddings)
            if spec.name.startswith("gemma") and "embed" in name:  # scales them up
                weight.mul_(0.5)
            if spec.name.startswith("gemma4"):  # does not scale scores
                weight.mul_(len(weight) ** -0.25 if "q_norm" in name or "k_norm" in name else 1)
                weight.mul_(2 if name.endswith("language_model.norm.weight") else 1)  # or its choices would be close
            elif spec.name.startswith("gemma") and weight.dim() == 1:  # adds one to the weights of norms
                weight.sub_(0.6)
    return model.eval()


def _init(name: str, weight: torch.Tensor, generator: torch.Generator, tied: bool) -> None:
    """Fill one parameter in place.

    With activations of unit size, q and k of size 1.4 give attention scores of standard deviation 2, so a few
    tokens at any distance take most of the weight, and `o` makes what they say outweigh the residual stream. Tied
    embeddings are small: otherwise every token predicts itself.
    """
    if name == "lm_head.bias":
        weight.zero_()  # SGLang adds none
    elif name.endswith("bias"):
        weight.normal_(0, 0.3, generator=generator)
    elif name.endswith("sinks"):  # as large as scores; SGLang keeps them in bf16
        weight.copy_(weight.normal_(0, 2, generator=generator).bfloat16())
    elif weight.dim() == 1:  # norms; those of q and k set the size of the scores
        low, high = (1.1, 1.7) if "q_norm" in name or "k_norm" in name else (0.6, 1.4)
        weight.uniform_(low, high, generator=generator)
    elif "embed" in name:
        # At this power, what a token gives itself is the same for any width.
        weight.normal_(0, 0.1 * min(1, 128 / weight.shape[-1]) ** 0.75 if tied else 1, generator=generator)
    else:
        gains = {
            "q_proj": 1.4,
            "k_proj": 1.4,
            "qkv_proj": 1.4,
            "o_proj": 3.0,
            "lm_head": 2.5,
            "mlp.gate.": 3.0,
            "mlp.router.": 3.0,
        }
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)
        weight.normal_(0, gain / weight.shape[-1] ** 0.5, generator=generator)


def _fingerprint(spec: ModelSpec) -> str:
    """Changes whenever the same name would give another model."""
    code = b"".join((Path(__file__).parent / file).read_bytes() for file in ("models.py", "tokenizer.py"))
    return hashlib.sha256(code + f"{spec}{transformers.__version__}{torch.__version__}".encode()).hexdigest()[:12]
