"""A Comb model in plain fp32 PyTorch: random weights under the public names, and the correct answers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm, silu, softmax

from .segments import Segment
from .tokenizer import BOS, EOS, PAD, VOCAB_SIZE, build_tokenizer

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 96, 4, 2, 160, 5
CROSS = (0, 2, 4)
EPS, THETA, MAX_POSITION = 1e-5, 10000.0, 2048


def build(folder: Path, *, causal: bool = False, head_dim: int = 32) -> Path:
    """Write a checkpoint in the public format and a tokenizer."""
    folder.mkdir(parents=True)
    build_tokenizer(folder, add_bos=True, chat_parts=True, max_length=MAX_POSITION)
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    text = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS + len(CROSS),  # as the public models count
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": MAX_POSITION,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **tokens,
    }
    config = {
        "architectures": ["CombLlamaForConditionalGeneration"],
        "model_type": "combllama",
        "cross_attention_layers": list(CROSS),
        "text_config": text,
        "torch_dtype": "float32",
        **({"chunk_is_causal": True} if causal else {}),
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(head_dim), folder / "model.safetensors")
    return folder


def _weights(head_dim: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = torch.rand(size, generator=generator) * 0.8 + 0.6

    def mlp(name: str) -> None:
        for part in ("gate_proj", "up_proj"):
            matrix(f"{name}.{part}", INNER, HIDDEN)
        matrix(f"{name}.down_proj", HIDDEN, INNER)

    def layer(name: str) -> None:
        matrix(f"{name}.self_attn.q_proj", HEADS * head_dim, HIDDEN, 1.4)
        matrix(f"{name}.self_attn.k_proj", KV_HEADS * head_dim, HIDDEN, 1.4)
        matrix(f"{name}.self_attn.v_proj", KV_HEADS * head_dim, HIDDEN)
        matrix(f"{name}.self_attn.o_proj", HIDDEN, HEADS * head_dim, 2.0)
        mlp(f"{name}.mlp")
        norm(f"{name}.input_layernorm", HIDDEN)
        norm(f"{name}.post_attention_layernorm", HIDDEN)

    weights["chunk_model.embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    weights["language_model.model.embed_tokens.weight"] = weights["chunk_model.embed_tokens.weight"].clone()
    for i in range(LAYERS):
        layer(f"language_model.model.layers.{i}")
    norm("language_model.model.norm", HIDDEN)
    matrix("language_model.lm_head", VOCAB_SIZE, HIDDEN, 2.5)
    for i in range(len(CROSS)):
        layer(f"chunk_model.layers.{i}")
        matrix(f"chunk_model.k_proj.{i}", KV_HEADS * head_dim, HIDDEN)
        matrix(f"chunk_model.v_proj.{i}", KV_HEADS * head_dim, HIDDEN)
        cross = f"language_model.model.cross_layers.{i}"
        matrix(f"{cross}.cross_attn.q_proj", HEADS * head_dim, HIDDEN)
        matrix(f"{cross}.cross_attn.o_proj", HIDDEN, HEADS * head_dim, 2.0)
        norm(f"{cross}.cross_attn.q_norm", head_dim)
        norm(f"{cross}.cross_attn.k_norm", head_dim)
        mlp(f"{cross}.mlp")
        norm(f"{cross}.input_layernorm", HIDDEN)
        norm(f"{cross}.post_attention_layernorm", HIDDEN)
        for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
            weights[f"{cross}.{gate}"] = torch.rand(1, generator=generator) + 0.5
    return weights


class CombOracle:
    """The model in a folder, computed in `dtype` without caches. Keys and values that a server caches are rounded to
    `cache_dtype`."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ):
        self.weights = {name: w.to(dtype) for name, w in load_file(folder / "model.safetensors", device).items()}
        config = json.loads((folder / "config.json").read_text())
        self.causal, self.head_dim = config.get("chunk_is_causal", False), config["text_config"]["head_dim"]
        self.dtype, self.cache_dtype, self.device = dtype, cache_dtype or dtype, device

    @torch.inference_mode()
    def logprobs(self, segments: list[Segment], generated: list[int] = (), beside: bool = True) -> torch.Tensor:
        """Log-probabilities of the next token after the prompt and after each generated token.

        beside: read chunks through the encoder; otherwise they are text, in place.
        Returns [1 + len(generated), vocab_size] fp32, on the CPU.
        """
        chunks = [segment.ids for segment in segments if segment.kind == "chunk" and beside]
        text = [token for segment in segments if segment.kind == "text" or not beside for token in segment.ids]
        ids = [*(text or segments[-1].ids[-1:]), *generated]
        x, before = self._embed(ids), self._causal(len(ids))
        encoded = [self._encode(chunk) for chunk in chunks]
        for i in range(LAYERS):
            if chunks and i in CROSS:
                place = CROSS.index(i)
                key, value = (torch.cat([layers[place][part] for layers in encoded], 1) for part in (0, 1))
                x = self._cross(f"language_model.model.cross_layers.{place}", x, key, value)
            x = self._layer(f"language_model.model.layers.{i}", x, before, self._cached)
        states = rms_norm(x, [HIDDEN], self.weights["language_model.model.norm.weight"], EPS)
        logits = states[len(ids) - len(generated) - 1 :] @ self.weights["language_model.lm_head.weight"].T
        return logits.float().log_softmax(-1).cpu()

    def _causal(self, length: int) -> torch.Tensor:
        return torch.full((length, length), -torch.inf, dtype=self.dtype, device=self.device).triu(1)

    def _all(self, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def _embed(self, ids) -> torch.Tensor:
        return self.weights["language_model.model.embed_tokens.weight"][list(ids)]

    def _encode(self, chunk) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each cross layer, [KV_HEADS, n, head_dim]."""
        x, n = self._embed(chunk), len(chunk)
        mask = self._causal(n) if self.causal else self._all(n, n)
        found = []
        for i in range(len(CROSS)):
            x = self._layer(f"chunk_model.layers.{i}", x, mask)
            key, value = (self._heads(f"chunk_model.{part}.{i}", x) for part in ("k_proj", "v_proj"))
            key = self._norm(f"language_model.model.cross_layers.{i}.cross_attn.k_norm", key)
            found.append((self._cached(key), self._cached(value)))
        return found

    def _cached(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.cache_dtype).to(self.dtype)

    def _layer(self, name: str, x: torch.Tensor, mask: torch.Tensor, cached=lambda kv: kv) -> torch.Tensor:
        h = self._norm(f"{name}.input_layernorm", x)
        q, k, v = (self._heads(f"{name}.self_attn.{part}", h) for part in ("q_proj", "k_proj", "v_proj"))
        x = x + self._attend(f"{name}.self_attn.o_proj", _rotated(q), cached(_rotated(k)), cached(v), mask)
        return x + self._mlp(name, x)

    def _cross(self, name: str, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q = self._heads(f"{name}.cross_attn.q_proj", self._norm(f"{name}.input_layernorm", x))
        q = self._norm(f"{name}.cross_attn.q_norm", q)
        attended = self._attend(f"{name}.cross_attn.o_proj", q, key, value, self._all(len(x), key.shape[1]))
        x = x + self.weights[f"{name}.cross_attn_attn_gate"].tanh() * attended
        return x + self.weights[f"{name}.cross_attn_mlp_gate"].tanh() * self._mlp(name, x)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        h = self._norm(f"{name}.post_attention_layernorm", x)
        gate, up = (h @ self.weights[f"{name}.mlp.{part}.weight"].T for part in ("gate_proj", "up_proj"))
        return (silu(gate) * up) @ self.weights[f"{name}.mlp.down_proj.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[n, HIDDEN] as [heads, n, head_dim]."""
        return (x @ self.weights[f"{name}.weight"].T).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def _attend(self, name: str, q, k, v, mask: torch.Tensor) -> torch.Tensor:
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
        weights = softmax(q @ k.transpose(1, 2) * self.head_dim**-0.5 + mask, -1)
        return (weights @ v).transpose(0, 1).flatten(1) @ self.weights[f"{name}.weight"].T


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """[heads, n, head_dim], rotated to positions 0 to n - 1."""
    _, length, head_dim = x.shape
    wide = {"dtype": torch.float64, "device": x.device}
    frequencies = THETA ** -(torch.arange(0, head_dim, 2, **wide) / head_dim)
    angles = torch.outer(torch.arange(length, **wide), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
