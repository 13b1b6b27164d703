"""Comb, a Llama that reads chunks through an encoder, composed of SGLang's layers.

The encoder encodes each chunk separately. The output of each of its layers is projected to the keys and values of one
cross layer, which precedes one of the decoder's layers. The decoder reads only the text. But for the cross layers,
which tokens of requests without chunks skip, it is a Llama. Weights are named as in the public models.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedParallelGroup, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.auto_loader import STANDARD_GATE_UP_MAPPING, STANDARD_QKV_MAPPING
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_lazy.comb.config import CROSS, DECODER, ENCODER, CombLlamaConfig
from sglang_lazy.comb.cross import CrossReader
from sglang_lazy.comb.encoder_rows import ChunkAttention, EncoderRows
from sglang_lazy.port.facts import tp_size


class Place(NamedTuple):
    """Where in the model a layer is.  prefix: of its weights' names, by which SGLang finds how to quantize them."""

    config: CombLlamaConfig
    quant_config: QuantizationConfig | None
    prefix: str

    def at(self, name: str) -> "Place":
        return self._replace(prefix=add_prefix(name, self.prefix))

    def each(self, name: str, count: int, new: Callable[[int, "Place"], nn.Module]) -> nn.ModuleList:
        return nn.ModuleList(new(i, self.at(f"{name}.{i}")) for i in range(count))

    def projection(self, size: int, **more: Any) -> ColumnParallelLinear:
        quantized = dict(quant_config=self.quant_config, prefix=self.prefix)
        return ColumnParallelLinear(self.config.hidden_size, size, bias=False, **quantized, **more)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps)


class Layer(LlamaDecoderLayer):
    """A Llama layer that takes and returns its residual. SGLang's own keep it to themselves, where no cross layer could
    read it."""

    def __init__(self, index: int, place: Place):
        super().__init__(
            place.config, index, quant_config=place.quant_config, prefix=place.prefix, stage_boundaries=False
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: Any, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden, forward_batch=forward_batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class ChunkModel(nn.Module):
    """The encoder, without its embedding, which is the decoder's."""

    def __init__(self, place: Place):
        super().__init__()
        config, count = place.config, len(place.config.cross_attention_layers)
        self.layers = place.each("layers", count, Layer)
        for layer in self.layers:
            stock = layer.self_attn.attn
            heads = stock.tp_q_head_num, stock.tp_k_head_num
            layer.self_attn.attn = ChunkAttention(*heads, stock.qk_head_dim, stock.scaling)
        # If there are fewer KV heads than ranks, several ranks have the same.
        group = ReplicatedParallelGroup("tp", max(1, tp_size() // config.num_key_value_heads))

        def projection(_index: int, place: Place) -> ColumnParallelLinear:
            return place.projection(config.num_key_value_heads * config.head_dim, parallel_group=group)

        self.k_proj, self.v_proj = (place.each(name, count, projection) for name in ("k_proj", "v_proj"))

    def forward(self, x: torch.Tensor, rows: EncoderRows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of each cross layer, by token.  x: embeddings, [number of tokens, hidden_size]."""
        residual = None
        for layer, k_proj, v_proj in zip(self.layers, self.k_proj, self.v_proj, strict=True):
            x, residual = layer(rows.positions, x, rows, residual)
            states = x + residual
            yield k_proj(states)[0], v_proj(states)[0]


class CrossAttention(nn.Module):
    def __init__(self, index: int, place: Place):
        super().__init__()
        config = place.config
        size, out = config.num_attention_heads * config.head_dim, place.at("o_proj")
        self.index, self.head_dim = index, config.head_dim
        self.q_proj = place.at("q_proj").projection(size)
        self.o_proj = RowParallelLinear(
            size, config.hidden_size, bias=False, quant_config=out.quant_config, prefix=out.prefix
        )
        self.q_norm = place.norm(config.head_dim)
        self.k_norm = place.norm(config.head_dim)  # applied by `encode`: cached keys are normalized

    def forward(self, x: torch.Tensor, reader: CrossReader) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x)[0].reshape(-1, self.head_dim)).view(len(x), -1, self.head_dim)
        return self.o_proj(reader.attend(self.index, q).flatten(1))[0]


class CrossLayer(nn.Module):
    """Gated cross-attention and MLP before a decoder layer."""

    def __init__(self, index: int, place: Place):
        super().__init__()
        config, mlp = place.config, place.at("mlp")
        self.cross_attn = CrossAttention(index, place.at("cross_attn"))
        self.mlp = LlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, mlp.quant_config, mlp.prefix
        )
        self.input_layernorm = place.norm(config.hidden_size)
        self.post_attention_layernorm = place.norm(config.hidden_size)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, reader: CrossReader) -> torch.Tensor:
        """x: [n, hidden_size], hidden states of tokens that read chunks."""
        x = x + self.cross_attn_attn_gate.tanh() * self.cross_attn(self.input_layernorm(x), reader)
        return x + self.cross_attn_mlp_gate.tanh() * self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The decoder's embedding and layers, with cross layers before some of them.

    reader: attends to the chunks of a batch. Without one, if chunks are not reused, cross layers are skipped.
    """

    reader: CrossReader | None = None

    def __init__(self, place: Place):
        super().__init__()
        config, embedding = place.config, place.at("embed_tokens")
        self.places = list(config.cross_attention_layers)
        self.start_layer, self.end_layer = 0, config.num_hidden_layers  # of this pipeline rank, for SGLang
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=embedding.quant_config, prefix=embedding.prefix
        )
        self.layers = place.each("layers", config.num_hidden_layers, Layer)
        self.cross_layers = place.each("cross_layers", len(self.places), CrossLayer)
        self.norm = place.norm(config.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: None = None,
    ) -> torch.Tensor:
        hidden, residual = self.embed_tokens(input_ids) if input_embeds is None else input_embeds, None
        cross_layers = dict(zip(self.places, self.cross_layers, strict=True))
        for i, layer in enumerate(self.layers):
            if self.reader is not None and i in cross_layers:
                hidden, residual = self.reader.through(cross_layers[i], hidden, residual)
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        return self.norm(hidden, residual)[0]


class LanguageModel(LlamaForCausalLM):
    def _init_model(self, config: CombLlamaConfig, quant_config: Any = None, prefix: str = "") -> Decoder:
        return Decoder(Place(config, quant_config, prefix))


class CombLlamaForConditionalGeneration(nn.Module):
    """The decoder with its cross layers, and the encoder of chunks."""

    def __init__(self, config: CombLlamaConfig, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        """Raises ValueError if cross layers are not before layers of the decoder, in ascending order."""
        super().__init__()
        places, num_layers = list(config.cross_attention_layers), config.num_hidden_layers
        if not places or places != sorted(set(places)) or not 0 <= places[0] <= places[-1] < num_layers:
            raise ValueError(f"cross_attention_layers must be of layers 0 to {num_layers - 1}, ascending: {places}")
        self.config = config
        self.loaded: set[str] = set()  # weights of the encoder and the cross layers
        self.language_model = LanguageModel(config, quant_config, add_prefix("language_model", prefix))
        self.chunk_model = ChunkModel(Place(config, quant_config, prefix).at("chunk_model"))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        return self.language_model(input_ids, positions, forward_batch, input_embeds)

    @property
    def decoder(self) -> Decoder:
        return self.language_model.model

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    @torch.no_grad()
    def encode(self, input_ids: torch.Tensor, rows: EncoderRows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each cross layer the chunks' normalized keys and values, both [n, num_kv_heads, head_dim].

        input_ids: int64 [n], of all chunks, concatenated.
        """
        head_dim, cross_layers = self.config.head_dim, self.decoder.cross_layers
        kv = self.chunk_model(self.get_input_embeddings()(input_ids), rows)
        for cross, (k, v) in zip(cross_layers, kv, strict=True):
            k_norm = cross.cross_attn.k_norm
            yield k_norm(k.reshape(-1, head_dim)).view(len(k), -1, head_dim), v.view(len(v), -1, head_dim)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError for an unknown name, if the encoder's embedding differs from the decoder's, and if a weight
        of the encoder or the cross layers is loaded neither now nor before."""
        embeddings: dict[str, torch.Tensor] = {}
        own = {name: parameter for name, parameter in self.named_parameters() if name.startswith((CROSS, ENCODER))}

        def rest() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name.endswith("embed_tokens.weight"):
                    embeddings[name] = weight
                if name.startswith((CROSS, ENCODER)):
                    if name != f"{ENCODER}embed_tokens.weight":
                        self.loaded.add(_load(name, weight, own))
                elif name.startswith(DECODER):
                    yield name.removeprefix(DECODER), weight
                else:
                    raise ValueError(f"weight {name!r} is not one of a Comb model's")

        self.language_model.load_weights(rest())
        if missing := set(own) - self.loaded:
            raise ValueError(f"the checkpoint has no weight {min(missing)!r}, and lacks {len(missing)} in all")
        if len(embeddings) == 2 and not torch.equal(*embeddings.values()):
            raise ValueError("the chunk model's embedding is not the decoder's, which is the one that would be used")


def _load(name: str, weight: torch.Tensor, parameters: dict[str, nn.Parameter]) -> str:
    """Load one weight of the encoder or a cross layer. Returns the name of its parameter."""
    stacked = (STANDARD_QKV_MAPPING, STANDARD_GATE_UP_MAPPING) if ".self_attn." in name else (STANDARD_GATE_UP_MAPPING,)
    for mapping in stacked:
        if (target := mapping.try_load(name, weight, parameters)) is not None:
            name = target
            break
    else:
        if name in parameters:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)
    if name not in parameters:
        raise ValueError(f"weight {name!r} is not one of a Comb model's")
    return name


EntryClass = CombLlamaForConditionalGeneration
