"""The configuration of Comb models: a Llama's, and where its cross layers stand."""

from typing import Any

from transformers import AutoConfig, LlamaConfig

ARCHITECTURE = "CombLlamaForConditionalGeneration"
DECODER, CROSS, ENCODER = "language_model.", "language_model.model.cross_layers.", "chunk_model."
"""What the names of weights begin with; those of cross layers come before the decoder's others."""


class CombLlamaConfig(LlamaConfig):
    """A decoder's configuration, flat. Public ones keep it in `text_config`, which counts cross layers among its own.

    cross_attention_layers: the decoder's layers that cross layers stand before, ascending.
    chunk_is_causal: whether the tokens of a chunk see only those before them in the encoder; in the public models they
        see all of the chunk.
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
    """Have Transformers, and by it SGLang, read such configurations."""
    AutoConfig.register(CombLlamaConfig.model_type, CombLlamaConfig, exist_ok=True)
