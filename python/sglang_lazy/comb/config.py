"""The configuration of Comb models: that of a Llama, and the places of the cross layers."""

from typing import Any

from transformers import AutoConfig, LlamaConfig

ARCHITECTURE = "CombLlamaForConditionalGeneration"
DECODER, CROSS, ENCODER = "language_model.", "language_model.model.cross_layers.", "chunk_model."
"""Prefixes of weight names. Test for CROSS first, since it begins with DECODER."""


class CombLlamaConfig(LlamaConfig):
    """The decoder's configuration, flat. Public models nest it in `text_config`, whose layers include the cross layers.

    cross_attention_layers: the decoder layers that have a cross layer before them, ascending.
    chunk_is_causal: whether the encoder's attention is causal; in the public models each token sees its whole chunk.
    """

    model_type = "combllama"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        flat = dict(config_dict)
        if (text := flat.pop("text_config", None)) is not None:
            places = flat["cross_attention_layers"]
            flat = {**flat, **text, "num_hidden_layers": text["num_hidden_layers"] - len(places)}
            flat |= {name: config_dict[name] for name in ("model_type", "architectures")}
        return super().from_dict(flat, **kwargs)


def register() -> None:
    """Register the configuration with Transformers, through which SGLang reads it."""
    AutoConfig.register(CombLlamaConfig.model_type, CombLlamaConfig, exist_ok=True)
