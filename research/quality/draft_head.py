"""An EAGLE head for a small Llama: from a token's state and the token that follows, it guesses the one after that.

Served with `--speculative-algorithm EAGLE`, slot t of its KV is computed from the target's state of token t and the
embedding of token t + 1. To draft further, it takes its own output for the state.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from research.quality.llama import MLP, Attention, Llama, Shape, rotate


class Layer(nn.Module):
    """A Llama's layer that does not normalize what its attention reads."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class DraftHead(nn.Module):
    """Uses its target's embeddings and output layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        size = shape.hidden_size
        self.shape = shape
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList([Layer(shape)])
        for name, weight in self.layers.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(
        self,
        target: Llama,
        states: torch.Tensor,
        following: torch.Tensor,
        sees: torch.Tensor,
        num_last: int,
        steps: int,
    ) -> list[torch.Tensor]:
        """What the head gives out for the last `num_last` slots of each row in each step of a chain, as if everything
        drafted before had been right: [B, num_last, hidden_size] each, of which the target's output layer makes logits.

        In step n slot t reads its output of step n - 1 for slot t - 1, the first slots whatever there is; and keys of
        slots before t - n are those of target's states. So outputs of step n count from its slot n on.
        states: the target's, [B, L, hidden_size].  following: the token after each, [B, L] int64.
        sees: which slot sees which, [B, L, L] bool.
        """
        length = states.shape[1]
        embeds, cos_sin = target.begin(following, torch.arange(length).expand(following.shape))
        attention, first = self.layers[0].self_attn, length - num_last
        place, slots = torch.arange(first, length)[:, None], torch.arange(length)
        keys, values, outputs = [], [], []
        for step in range(steps):
            x = self.fc(torch.cat([embeds, states], dim=-1))
            key, value = self._heads(attention.k_proj(x)), self._heads(attention.v_proj(x))
            keys.append(rotate(key, cos_sin))
            values.append(value)
            if not step:
                x, embeds, cos_sin, sees = (
                    x[:, first:],
                    embeds[:, first:],
                    cos_sin[..., first:, :],
                    sees[:, None, first:],
                )
            query = rotate(self._heads(attention.q_proj(x)), cos_sin) * self.shape.head_dim**-0.5
            scores = (query @ keys[0].mT).masked_fill(~(sees & (slots <= place - step)), -torch.inf)
            # Its own drafts: that of step j is `step - j` slots before.
            own = [[kv[j].roll(step - j, dims=2) for j in range(1, step + 1)] for kv in (keys, values)]
            scores = torch.cat([scores, *((query * key).sum(-1, keepdim=True) for key in own[0])], dim=-1)
            weights = scores.softmax(-1)
            read = weights[..., :length] @ values[0]
            for j, value in enumerate(own[1]):
                read = read + weights[..., length + j, None] * value
            x = x + attention.o_proj(read.transpose(1, 2).flatten(2))
            x = x + self.layers[0].mlp(self.layers[0].post_attention_layernorm(x))
            outputs.append(x)
            states = x.roll(1, dims=1)
        return outputs

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, heads * head_dim] as [B, num_attention_heads, L, head_dim], KV heads repeated."""
        heads = x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return heads.repeat_interleave(self.shape.num_attention_heads // heads.shape[1], dim=1)

    def save(self, folder: Path, target: Path) -> None:
        """Write what SGLang loads as a draft for the model in `target`."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        # SGLang replaces embeddings and output layer by the target's, one after the other.
        own = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config | own, indent=2) + "\n")
        save_file(
            {name: weight.contiguous() for name, weight in self.state_dict().items()}, folder / "model.safetensors"
        )

    def load(self, folder: Path) -> "DraftHead":
        """Take the weights that `save` wrote."""
        self.load_state_dict(load_file(folder / "model.safetensors"))
        return self
