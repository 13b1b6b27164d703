"""A Comb model for training: a frozen Llama that reads chunks through an encoder and cross-attention layers.

The encoder encodes each chunk separately, in both directions. The output of each of its layers is projected to the keys
and values of a cross layer, which precedes one of the decoder's layers. The decoder reads only the text: its positions
do not count chunks, and without chunks it is an unchanged Llama. Weights and config are named as in the public models.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn

from benchmark.kv_bytes import kv_bytes_per_token
from research.quality.llama import MLP, Layer, Llama, Mask, Shape, attend, shape_of

SHARD = 16_000_000
"""The most bytes of weights in a file; with the header, a file stays below 16 MiB."""

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each cross layer, both [B, num_kv_heads, L, head_dim]; keys are normalised."""


class Encoder(nn.Module):
    def __init__(self, shape: Shape, count: int):
        super().__init__()
        size = shape.num_key_value_heads * shape.head_dim
        self.layers = nn.ModuleList(Layer(shape) for _ in range(count))
        self.k_proj = nn.ModuleList(nn.Linear(shape.hidden_size, size, bias=False) for _ in range(count))
        self.v_proj = nn.ModuleList(nn.Linear(shape.hidden_size, size, bias=False) for _ in range(count))


class CrossAttention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        size = shape.num_attention_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, size, bias=False)
        self.o_proj = nn.Linear(size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask) -> torch.Tensor:
        query = self.q_norm(split_heads(self.q_proj(x), self.head_dim))
        return self.o_proj(attend(query.to(value.dtype), key.to(value.dtype), value, mask).transpose(1, 2).flatten(2))


class CrossLayer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.cross_attn = CrossAttention(shape)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask) -> torch.Tensor:
        x = x + self.cross_attn_attn_gate.tanh() * self.cross_attn(self.input_layernorm(x), key, value, mask)
        return x + self.cross_attn_mlp_gate.tanh() * self.mlp(self.post_attention_layernorm(x))


def split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, L, num_heads * head_dim] as [B, num_heads, L, head_dim]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class Comb(nn.Module):
    """What a Comb model adds to its decoder. The decoder is not part of it but passed to each call."""

    def __init__(self, shape: Shape, places: Sequence[int]):
        """places: the decoder's layers that have a cross layer before them, ascending."""
        super().__init__()
        self.shape, self.places = shape, tuple(places)
        if list(places) != sorted(set(places)) or not set(places) <= set(range(shape.num_hidden_layers)):
            raise ValueError(f"cross layers must precede layers 0 to {shape.num_hidden_layers - 1}: {places}")
        self.chunk_model = Encoder(shape, len(places))
        self.cross_layers = nn.ModuleList(CrossLayer(shape) for _ in places)

    @torch.no_grad()
    def start_from(self, decoder: Llama) -> None:
        """The encoder starts from the decoder's first layers, a cross layer from the layer after it, with closed gates.

        Keys and values are computed from unnormalised states, so that layer's norm weights are folded into their
        projections.
        """
        for layer, its in zip(self.chunk_model.layers, decoder.model.layers, strict=False):
            layer.load_state_dict(its.state_dict())
        parts = zip(self.places, self.cross_layers, self.chunk_model.k_proj, self.chunk_model.v_proj, strict=True)
        for place, cross, k_proj, v_proj in parts:
            its = decoder.model.layers[place]
            scale = its.input_layernorm.weight
            k_proj.weight.copy_(its.self_attn.k_proj.weight * scale)
            v_proj.weight.copy_(its.self_attn.v_proj.weight * scale)
            cross.cross_attn.q_proj.load_state_dict(its.self_attn.q_proj.state_dict())
            cross.cross_attn.o_proj.load_state_dict(its.self_attn.o_proj.state_dict())
            cross.input_layernorm.load_state_dict(its.input_layernorm.state_dict())
            cross.post_attention_layernorm.load_state_dict(its.post_attention_layernorm.state_dict())
            cross.mlp.load_state_dict(its.mlp.state_dict())

    def encode(self, decoder: Llama, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> KeyValues:
        """ids, positions: [B, L] int64; positions count from each chunk's beginning; mask: which token sees which."""
        x, cos_sin = decoder.begin(ids, positions)
        encoder, found = self.chunk_model, []
        layers = zip(encoder.layers, encoder.k_proj, encoder.v_proj, self.cross_layers, strict=True)
        for layer, k_proj, v_proj, cross in layers:
            x = layer(x, cos_sin, mask)
            key, value = (split_heads(projection(x), self.shape.head_dim) for projection in (k_proj, v_proj))
            found.append((cross.cross_attn.k_norm(key), value))
        return found

    def states(
        self, decoder: Llama, ids: torch.Tensor, positions: torch.Tensor, mask: Mask, chunks: KeyValues, sees: Mask
    ) -> torch.Tensor:
        """The states of the text before the output layer, [B, L, hidden_size].  sees: which text token sees which chunk
        token."""
        x, cos_sin = decoder.begin(ids, positions)
        cross = dict(zip(self.places, zip(self.cross_layers, chunks, strict=True), strict=True))
        for place, layer in enumerate(decoder.model.layers):
            if place in cross:
                its, (key, value) = cross[place]
                x = its(x, key, value, sees)
            x = layer(x, cos_sin, mask)
        return decoder.model.norm(x)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a chunk token's keys and values, at 16 bits."""
        return kv_bytes_per_token(dataclasses.replace(self.shape, num_hidden_layers=len(self.places)))


def save_comb(decoder: Llama, comb: Comb, directory: Path, dtype: torch.dtype, tokens: dict[str, int]) -> None:
    """Write config.json and weights under the public names, in files of at most SHARD unless one weight is larger.

    tokens: the token ids of the config.
    """
    layers = comb.shape.num_hidden_layers + len(comb.places)  # the public config counts both kinds
    text = {"model_type": "llama", **dataclasses.asdict(comb.shape), "attention_bias": False, "hidden_act": "silu"}
    text |= {"mlp_bias": False, "num_hidden_layers": layers, "tie_word_embeddings": False, **tokens}
    config = {
        "architectures": ["CombLlamaForConditionalGeneration"],
        "model_type": "combllama",
        "cross_attention_layers": list(comb.places),
        "num_hidden_layers": layers,
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **tokens,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    embedding = decoder.model.embed_tokens.weight
    weights = {
        **{f"language_model.{name}": weight for name, weight in decoder.state_dict().items()},
        "language_model.lm_head.weight": embedding,
        "chunk_model.embed_tokens.weight": embedding,
        **{f"chunk_model.{name}": weight for name, weight in comb.chunk_model.state_dict().items()},
        **{f"language_model.model.cross_layers.{name}": w for name, w in comb.cross_layers.state_dict().items()},
    }
    # Copies, because tied weights that share memory would be written only once.
    weights = {name: weight.detach().to(dtype, copy=True).cpu().contiguous() for name, weight in weights.items()}
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    save_torch_state_dict(weights, directory, max_shard_size=SHARD)


def load_comb(directory: Path) -> tuple[Llama, Comb]:
    """A saved model in fp32. Raises ValueError for another kind of model."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "combllama":
        raise ValueError(f"{directory} is not a Comb model, but {config['model_type']}")
    places = config["cross_attention_layers"]
    text = config["text_config"] | {"num_hidden_layers": config["num_hidden_layers"] - len(places)}
    weights = {}
    for path in directory.glob("model*.safetensors"):
        weights |= {name: weight.float() for name, weight in load_file(path).items()}

    def part(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}

    decoder, comb = Llama(shape_of(text)), Comb(shape_of(text), places)
    comb.cross_layers.load_state_dict(part("language_model.model.cross_layers."))
    own = part("chunk_model.")
    del own["embed_tokens.weight"], weights["language_model.lm_head.weight"]  # the decoder's embedding
    comb.chunk_model.load_state_dict(own)
    decoder.load_state_dict(part("language_model."))
    return decoder, comb
