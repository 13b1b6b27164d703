"""A small Llama for training, with Hugging Face's names for its weights and an arbitrary mask."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = torch.Tensor | BlockMask
"""Which token sees which: [B, 1, L, L] bool, or a BlockMask of FlexAttention."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask) -> torch.Tensor:
    """query: [B, num_qo_heads, L, head_dim]; key, value: [B, num_kv_heads, L, head_dim]. Returns query's shape."""
    if isinstance(mask, BlockMask):
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The fields are those of Hugging Face's LlamaConfig. Embeddings are tied."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_table(shape: Shape) -> torch.Tensor:
    """Cosines and sines, [2, max_position_embeddings, head_dim]; a head's first half is paired with its second."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angles = torch.arange(shape.max_position_embeddings, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2).float()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [B, num_heads, L, head_dim]; cos_sin: [2, B, 1, L, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_sin[0] + torch.cat([-second, first], dim=-1) * cos_sin[1]


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        def heads(projection: nn.Linear) -> torch.Tensor:
            return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key = (rotate(heads(projection), cos_sin) for projection in (self.q_proj, self.k_proj))
        value = heads(self.v_proj)
        return self.o_proj(attend(query.to(value.dtype), key.to(value.dtype), value, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.register_buffer("rotary", rotary_table(shape), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Contributions to the residual stream start small, so that its size does not grow with depth.
                scale = (
                    (2 * shape.num_hidden_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        """ids, positions: [B, L] int64, positions below max_position_embeddings. Returns logits [B, L, vocab_size]."""
        return self.logits(self.states(ids, positions, mask))

    def states(self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        """The states before the output layer, [B, L, hidden_size]."""
        x, cos_sin = self.begin(ids, positions)
        for layer in self.model.layers:
            x = layer(x, cos_sin, mask)
        return self.model.norm(x)

    def begin(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [B, L, hidden_size], and the cosines and sines of their positions."""
        return self.model.embed_tokens(ids), self.rotary[:, positions].unsqueeze(2)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, self.model.embed_tokens.weight)


def save_for_serving(model: Llama, directory: Path, dtype: torch.dtype, *, bos: int, eos: int, pad: int) -> None:
    """Write config.json and model.safetensors as Hugging Face's LlamaForCausalLM reads them."""
    shape = dataclasses.asdict(model.shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "hidden_act": "silu",
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: weight.detach().to(dtype).cpu().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_llama(directory: Path) -> Llama:
    """A Hugging Face model in fp32. Raises ValueError if this module does not support it."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"{directory} is not a Llama whose output layer is tied to its embedding")
    model = Llama(shape_of(config))
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items() if name != "lm_head.weight"})
    return model


def shape_of(config: dict) -> Shape:
    """The shape in a LlamaConfig. Raises ValueError for scaled rotary positions."""
    rotary = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    if rotary.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ValueError("scaled rotary positions are not supported")
    fields = {field.name: config[field.name] for field in dataclasses.fields(Shape) if field.name != "rope_theta"}
    return Shape(**fields, rope_theta=rotary["rope_theta"])
