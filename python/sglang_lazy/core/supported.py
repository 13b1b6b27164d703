"""What is supported: models, and what SGLang's flags name; and the refusal of a server that cannot reuse chunks."""

ATTENTION_BACKENDS = ("fa3", "flashinfer", "triton", "torch_native")

DRAFTING, MAX_DRAFTS = ("EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "NGRAM"), 7
"""The algorithms of speculative decoding, as SGLang resolves them, and the most drafts in a chain."""

STORAGE_BACKENDS = ("file", "mooncake", "dynamic")
"""The storage backends that store objects of any length."""

TESTED = frozenset(
    {
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "CombLlamaForConditionalGeneration",
        "Ernie4_5_ForCausalLM",
        "FalconH1ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "InternLM3ForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "LlamaForCausalLM",
        "MellumForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Models tested against the oracle. With --lazy-untested-model, the start-up check decides about others."""


class Unfit(ValueError):
    """This server cannot reuse chunks; the message says why and what to do."""

    def __init__(self, reasons: list[str]):
        super().__init__(reasons)  # what another process makes it of
        self.reasons = reasons

    def __str__(self) -> str:
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        return (
            f"sglang-lazy cannot reuse chunks here:{lines}\n"
            "Change these, or start with --lazy-fallback to serve without chunk reuse."
        )
