"""Models with recurrent layers: transformers' code in plain PyTorch, and the oracle for prompts with chunks.

A chunk is computed alone, from a state of zero. What follows it in the prompt sees the state that has gone through the
chunk's tokens one by one, each with the key, value and gates that it had in the chunk alone, or after a preamble.
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from transformers.integrations import hub_kernels
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from .block_mask import attention_mask, visibility
from .models.build import model_class
from .segments import Segment, token_ids


def load_hybrid(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> transformers.PreTrainedModel:
    """The model in a folder. Kernels, which transformers would look for on a hub, are not used."""
    hub_kernels._kernels_available = False
    made = model_class(transformers.AutoConfig.from_pretrained(path))
    model = made.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


@torch.inference_mode()
def causal_logprobs(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the token after each of `ids`, [len(ids), vocab_size] fp32."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)


class HybridOracle:
    """A model with recurrent layers under the block mask: one pass over the prompt, in which attention has a
    mask, and convolutions and recurrences know where chunks begin and end. Recurrences are in fp64."""

    media: Mapping[str, torch.Tensor] = {}
    """What images the prompt shows, as the model takes them."""

    def __init__(self, model_path: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        self.model = load_hybrid(model_path, dtype, device)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions, [n], as the model takes them."""
        return positions[None]

    @torch.inference_mode()
    def logprobs(
        self, segments: list[Segment], generated: list[int] = (), preamble: Sequence[int] = ()
    ) -> torch.Tensor:
        """Log-probabilities of the token after each token of the prompt and after each generated one.

        preamble: tokens after which each chunk is computed, which nothing else sees.
        Returns [prompt + generated, vocab_size] fp32. Raises ValueError for a prompt that does not end in text.
        """
        if segments[-1].kind != "text":
            raise ValueError("expected a prompt that ends in text: servers compute a last chunk as text")
        runs = _runs(segments, len(generated), len(preamble))
        device, prompt = self.model.device, iter([*token_ids(segments), *generated])
        ids, positions, num_seen = [], [], 0
        for begin, end, kind in runs:
            ids += preamble if kind == "preamble" else itertools.islice(prompt, end - begin)
            first = num_seen - len(preamble) if kind == "preamble" else num_seen
            positions += range(first, first + end - begin)
            num_seen = positions[-1] + 1 if positions else 0
        in_prompt = [t for begin, end, kind in runs if kind != "preamble" for t in range(begin, end)]
        visible = _visibility(segments, len(generated), runs, in_prompt).to(device)
        where = torch.tensor(positions, device=device)
        mask = attention_mask(self.model, visible, where, where)
        recurrent = dict.fromkeys([*self.model.config.get_text_config().layer_types, "linear_attention"])
        masks = recurrent | {"full_attention": mask}
        with _layers_know(runs):
            inputs, places = torch.tensor([ids], device=device), self.places(where)
            out = self.model(inputs, attention_mask=masks, position_ids=places, use_cache=False, **self.media)
        return out.logits[0, in_prompt].float().log_softmax(-1)


class Run(NamedTuple):
    """Tokens of a prompt, or those that a chunk behind them is computed after."""

    begin: int
    end: int
    kind: Literal["text", "chunk", "preamble"]


def _runs(segments: list[Segment], num_generated: int, preamble_len: int) -> list[Run]:
    """Each segment, and a preamble before each chunk if there is one; generated tokens continue the last one."""
    runs, begin = [], 0
    for segment in segments:
        if segment.kind == "chunk" and preamble_len:
            runs.append(Run(begin, begin := begin + preamble_len, "preamble"))
        runs.append(Run(begin, begin := begin + len(segment.ids), segment.kind))
    return [*runs, Run(begin, begin + num_generated, "text")]


def _visibility(segments: list[Segment], num_generated: int, runs: list[Run], in_prompt: list[int]) -> torch.Tensor:
    """Which token sees which, [n, n] bool: a preamble itself, and a chunk also the preamble before it."""
    visible = torch.eye(runs[-1].end, dtype=torch.bool)
    visible[torch.tensor(in_prompt)[:, None], in_prompt] = visibility(segments, num_generated)
    for (begin, end, kind), chunk in itertools.pairwise(runs):
        if kind == "preamble":
            visible[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril().bool()
            visible[chunk.begin : chunk.end, begin:end] = True
    return visible


@contextlib.contextmanager
def _layers_know(runs: list[Run]):
    """Within, transformers' recurrent layers take one prompt of these runs."""

    def convolve(x, weight, bias=None, activation=None, **_):
        """x: [1, dim, n]. A chunk has zeros or its preamble before it, text whatever the prompt has before it."""
        before, parts = weight.shape[1] - 1, []
        nothing = seen = preamble = x[..., :0]
        for begin, end, kind in runs:
            past, new = {"text": seen, "chunk": preamble, "preamble": nothing}[kind], x[..., begin:end]
            inputs = torch.cat([F.pad(past, (before, 0)), new], -1)[..., -before - end + begin :]
            if begin < end:
                parts.append(F.conv1d(inputs, weight[:, None], bias, groups=len(weight)))
            preamble = new if kind == "preamble" else nothing
            seen = seen if kind == "preamble" else torch.cat([seen, new], -1)
        out = torch.cat(parts, -1)
        return F.silu(out) if activation == "silu" else out

    def read(step, read_out, zero, n):
        """Outputs of n tokens, from states that step(state, t) makes and read_out(state, t) reads."""
        out, seen, preamble = [], zero, zero
        for begin, end, kind in runs:
            state = {"text": seen, "chunk": preamble, "preamble": zero}[kind]
            for t in range(begin, end):
                state = step(state, t)
                seen = seen if kind == "preamble" else step(seen, t)
                out.append(read_out(state, t))
            preamble = state if kind == "preamble" else zero
        assert len(out) == n
        return torch.stack(out)

    def delta_rule(query, key, value, g, beta, **_):
        """query, key: [1, n, heads, K]; value: [1, n, heads, V]; g, beta: [1, n, heads], in KDA g for each of K."""
        q, k, v, g, beta = (x[0].double() for x in (query, key, value, g, beta))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        decay = g.exp().view(*beta.shape, -1, 1)

        def step(state, t):
            state = state * decay[t]
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            return state + torch.einsum("hk,hv,h->hkv", k[t], error, beta[t])

        def read_out(state, t):
            return torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5

        out = read(step, read_out, v.new_zeros(*k.shape[1:], v.shape[-1]), len(v))
        return out[None].to(value.dtype), None

    def mamba2(x, dt, A, B, C, D, dt_bias, dt_limit, **_):
        """x: [1, n, heads, P]; dt: [1, n, heads]; A, D, dt_bias: [heads]; B, C: [1, n, groups, N]."""
        values, dt, A, D = x[0].double(), F.softplus(dt[0].double() + dt_bias.double()), A.double(), D.double()
        B, C = (each[0].double().repeat_interleave(x.shape[2] // B.shape[2], 1) for each in (B, C))
        dt = dt.clamp(*dt_limit)

        def step(state, t):
            return state * (dt[t] * A).exp()[:, None, None] + torch.einsum("h,hp,hn->hpn", dt[t], values[t], B[t])

        def read_out(state, t):
            return torch.einsum("hpn,hn->hp", state, C[t]) + D[:, None] * values[t]

        return read(step, read_out, values.new_zeros(*values.shape[1:], B.shape[-1]), len(values))[None].to(x.dtype)

    delta = (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next)
    mamba = (modeling_granitemoehybrid, modeling_falcon_h1, modeling_nemotron_h)
    with contextlib.ExitStack() as patches:
        for module in (modeling_lfm2, modeling_lfm2_moe, modeling_kimi_linear, *delta, *mamba):
            patches.enter_context(mock.patch.object(module, "causal_conv1d_fn", convolve))
        for module in delta:
            patches.enter_context(mock.patch.object(module, "torch_chunk_gated_delta_rule", delta_rule))
        patches.enter_context(mock.patch.object(modeling_kimi_linear, "chunk_kimi_delta_attention", delta_rule))
        for module in mamba:
            patches.enter_context(mock.patch.object(module, "mamba2_chunk_scan", mamba2))
        yield
