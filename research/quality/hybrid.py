"""A small hybrid for training: three of four layers have a gated delta rule, as in Qwen3.5, the others attention.

Each layer computes pieces of a prompt: from a state and from keys that other pieces have left. So one model runs whole
prompts, questions that branch off one text, and chunks computed alone.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from research.quality.llama import MLP, rotate

BLOCK = 64
"""Tokens that the delta rule computes at once."""


@dataclasses.dataclass(frozen=True)
class HybridShape:
    """Embeddings are tied. Every fourth layer has attention."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_heads: int = 4
    head_dim: int = 64
    width: int = 4
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def has_attention(self, layer: int) -> bool:
        return layer % 4 == 3


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] and the state after the last token.

    S_t = a_t S + beta_t k_t (v_t - k_t^T a_t S)^T and o_t = S_t^T q_t, in blocks of tokens: what the tokens of a block
    write is the solution of a triangular system.
    q, k: [B, H, L, K], keys of length 1.  v: [B, H, L, V].  g: [B, H, L], log a.  beta: [B, H, L].
    state: [B, H, K, V].
    """
    outputs, v_dim = [], v.shape[-1]
    for q_, k_, v_, g_, beta_ in zip(*(x.split(BLOCK, 2) for x in (q, k, v, g, beta)), strict=True):
        total = g_.cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        inner = (beta_[..., None] * decay * (k_ @ k_.mT)).tril(-1)
        given = torch.cat([v_, total.exp()[..., None] * k_], -1) * beta_[..., None]
        solved = torch.linalg.solve_triangular(inner, given, upper=False, unitriangular=True)
        written = solved[..., :v_dim] - solved[..., v_dim:] @ state
        outputs.append((total.exp()[..., None] * q_) @ state + (decay * (q_ @ k_.mT)) @ written)
        left = (total[..., -1:] - total).exp()[..., None] * k_
        state = total[..., -1].exp()[..., None, None] * state + left.mT @ written
    return torch.cat(outputs, 2), state


class DeltaLayer(nn.Module):
    """Projections, a short convolution, the delta rule, a gated norm."""

    def __init__(self, shape: HybridShape):
        super().__init__()
        self.shape, size = shape, shape.num_heads * shape.head_dim
        self.in_proj = nn.Linear(shape.hidden_size, 4 * size + 2 * shape.num_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(shape.width, 3 * size).uniform_(-0.5, 0.5))
        rates = torch.empty(shape.num_heads).uniform_(1, 16)
        steps = torch.empty(shape.num_heads).uniform_(-7, -2.3).exp()  # decays of 0.001 to 0.8 a token
        self.A_log, self.dt_bias = nn.Parameter(rates.log()), nn.Parameter(steps.expm1().log())
        self.norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.o_proj = nn.Linear(size, shape.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, valid: torch.Tensor, last: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, the last inputs and the state after the valid tokens, which come first.

        x: [B, L, hidden_size].  valid: [B, L] bool.  last: [B, width - 1, 3 * size].
        state: [B, heads, head_dim, head_dim]; with an identity beside it, [..., 2 * head_dim], what these tokens do to
            other states comes out beside what they leave of this one.
        """
        heads, dim, before = self.shape.num_heads, self.shape.head_dim, self.shape.width - 1
        inputs, z, a, b = self.in_proj(x).split([3 * heads * dim, heads * dim, heads, heads], -1)
        inputs = torch.cat([last.to(inputs.dtype), inputs], 1)
        index = valid.sum(1)[:, None] + torch.arange(before, device=x.device)
        last = inputs.gather(1, index[..., None].expand(-1, -1, inputs.shape[-1]))
        length = x.shape[1]
        convolved = sum(inputs[:, i : i + length] * self.conv[i] for i in range(self.shape.width))
        q, k, v = functional.silu(convolved).float().unflatten(-1, (3, heads, dim)).permute(2, 0, 3, 1, 4)
        q, k = (functional.normalize(y, dim=-1, eps=1e-6) for y in (q, k))
        g = -self.A_log.exp() * functional.softplus(a.float() + self.dt_bias) * valid[..., None]
        beta = b.float().sigmoid() * valid[..., None]
        v = functional.pad(v, (0, state.shape[-1] - dim))
        with torch.autocast(x.device.type, enabled=False):
            out, state = delta_rule(q * dim**-0.5, k, v, g.mT, beta.mT, state)
        out = self.norm(out[..., :dim].transpose(1, 2)).flatten(2) * functional.silu(z)
        return self.o_proj(out.to(z.dtype)), last, state


class AttentionLayer(nn.Module):
    """Attention over keys that pieces have left, kept before the rotation."""

    def __init__(self, shape: HybridShape):
        super().__init__()
        self.heads, size = shape.num_heads, shape.num_heads * shape.head_dim
        self.qkv_proj = nn.Linear(shape.hidden_size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, shape.hidden_size, bias=False)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values, [3, B, heads, L, head_dim]."""
        return self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q, k: rotated.  mask: [B, queries, keys] bool."""
        out = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, shape: HybridShape, attention: bool):
        super().__init__()
        self.before = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mixer = AttentionLayer(shape) if attention else DeltaLayer(shape)
        self.after = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def feed_forward(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + mixed
        return x + self.mlp(self.after(x))


class Branching(nn.Module):
    """One layer over texts and the questions that branch off them."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, y, valid, cos_sin, branch_cos_sin, masks):
        """x: [B, D, hidden].  y: [B * Q, L, hidden], Q branches of each text.  valid: [B, D]."""
        layer, num_branches = self.layer, len(y) // len(x)
        mixer, texts, branches = layer.mixer, layer.before(x), layer.before(y)

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.repeat_interleave(num_branches, 0)

        if isinstance(mixer, AttentionLayer):
            q, k, v = mixer.project(texts)
            k = rotate(k, cos_sin)
            mixed = mixer.attend(rotate(q, cos_sin), k, v, masks[0])
            q, own_k, own_v = mixer.project(branches)
            keys = torch.cat([spread(k), rotate(own_k, branch_cos_sin)], 2)
            branch_mixed = mixer.attend(rotate(q, branch_cos_sin), keys, torch.cat([spread(v), own_v], 2), masks[1])
        else:
            last, state = zero_states(mixer.shape, len(x), x.device)
            mixed, last, state = mixer(texts, valid, last, state)
            all_valid = torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
            branch_mixed, _, _ = mixer(branches, all_valid, spread(last), spread(state))
        return layer.feed_forward(x, mixed), layer.feed_forward(y, branch_mixed)


def zero_states(shape: HybridShape, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Last inputs and states before the first token."""
    size = shape.num_heads * shape.head_dim
    last = torch.zeros(count, shape.width - 1, 3 * size, device=device)
    return last, torch.zeros(count, shape.num_heads, shape.head_dim, shape.head_dim, device=device)


class Hybrid(nn.Module):
    def __init__(self, shape: HybridShape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, shape.has_attention(i)) for i in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
        angles = torch.arange(shape.max_position_embeddings).double()[:, None] * frequencies
        table = torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2).float()
        self.register_buffer("rotary", table, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and not name.endswith("conv"):
                scale = (
                    (2 * shape.num_hidden_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                nn.init.normal_(weight, std=0.02 * scale)
        self.branching = [Branching(layer) for layer in self.layers]  # a list, so that weights have one name

    def cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """[2, B, 1, L, head_dim] for positions [B, L]."""
        return self.rotary[:, positions].unsqueeze(2)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def forward(
        self, ids: torch.Tensor, lens: torch.Tensor, branches: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of texts [B, D, vocab_size] and of branches [B * Q, L, vocab_size], under the full mask.

        ids: [B, D], of which the first `lens` count.  branches: [B, Q, L].
        """
        count, num_branches, length = branches.shape
        text, branch = (torch.arange(size, device=ids.device) for size in (ids.shape[1], length))
        valid = text < lens[:, None]
        own = (branch[None] <= branch[:, None]).expand(count * num_branches, -1, -1)
        seen = valid[:, None].expand(-1, length, -1).repeat_interleave(num_branches, 0)
        masks = (text[None] <= text[:, None]).expand(count, -1, -1), torch.cat([seen, own], 2)
        positions = (lens[:, None] + branch).repeat_interleave(num_branches, 0)
        rotations = self.cos_sin(text.expand(count, -1)), self.cos_sin(positions)
        x, y = self.embed_tokens(ids), self.embed_tokens(branches.flatten(0, 1))
        for layer in self.branching:
            x, y = layer(x, y, valid, *rotations, masks)
        return self.logits(x), self.logits(y)
