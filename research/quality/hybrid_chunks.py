"""Prompts of chunks and a question on a small hybrid: chunks computed alone, some of them recomputed as text."""

import dataclasses
from typing import Literal

import torch

from research.quality.hybrid import AttentionLayer, Hybrid, zero_states
from research.quality.llama import rotate

Transitions = Literal["all", "none", "skipped"]
"""What a chunk does to a state S: P S + H; H, so that only the last chunk is remembered; nothing."""


@dataclasses.dataclass
class Prompts:
    """Batches of prompts with the same number of chunks.

    ids: [B, n, L] int64.  lens: [B, n], how many of L count.  question: [B, Q], with its answer.
    question_lens: [B], without the answer.
    """

    ids: torch.Tensor
    lens: torch.Tensor
    question: torch.Tensor
    question_lens: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        return torch.arange(self.ids.shape[2], device=self.ids.device) < self.lens[..., None]

    @property
    def positions(self) -> torch.Tensor:
        starts = self.lens.cumsum(1) - self.lens
        return starts[..., None] + torch.arange(self.ids.shape[2], device=self.ids.device)


@dataclasses.dataclass
class Kept:
    """What a layer keeps of chunks: last inputs, P and H; or keys before the rotation, and values."""

    last: torch.Tensor | None = None
    p: torch.Tensor | None = None
    h: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


@torch.inference_mode()
def compute_alone(model: Hybrid, prompts: Prompts, preamble: torch.Tensor | None = None) -> list[Kept]:
    """Every chunk alone, or after a preamble, [m] int64. All first dimensions are [B * n]."""
    count, length = prompts.ids.shape[0] * prompts.ids.shape[1], prompts.ids.shape[2]
    device, shape = prompts.ids.device, model.shape
    lead = 0 if preamble is None else len(preamble)
    x, valid = model.embed_tokens(prompts.ids.flatten(0, 1)), prompts.valid.flatten(0, 1)
    before = model.embed_tokens(preamble[None]) if preamble is not None else x[:1, :0]
    own, first = torch.arange(length, device=device), torch.arange(lead, device=device)
    cos_sin, first_cos_sin = model.cos_sin((lead + own).expand(count, -1)), model.cos_sin(first[None])
    causal = torch.cat([torch.ones(length, lead, dtype=torch.bool, device=device), own[None] <= own[:, None]], 1)
    eye = torch.eye(shape.head_dim, device=device)
    kept = []
    for layer in model.layers:
        mixer, normed, lead_mixed = layer.mixer, layer.before(x), None
        if isinstance(mixer, AttentionLayer):
            q, k, v = mixer.project(normed)
            keys, values = rotate(k, cos_sin), v
            if lead:
                lead_q, lead_k, lead_v = mixer.project(layer.before(before))
                lead_k = rotate(lead_k, first_cos_sin)
                seen = (first[None] <= first[:, None])[None]
                lead_mixed = mixer.attend(rotate(lead_q, first_cos_sin), lead_k, lead_v, seen)
                keys, values = (
                    torch.cat([a.expand(count, -1, -1, -1), b], 2) for a, b in ((lead_k, keys), (lead_v, v))
                )
            mixed = mixer.attend(rotate(q, cos_sin), keys, values, causal.expand(count, -1, -1))
            kept.append(Kept(k=k, v=v))
        else:
            last, state = zero_states(shape, 1, device)
            if lead:
                every = torch.ones(1, lead, dtype=torch.bool, device=device)
                lead_mixed, last, state = mixer(layer.before(before), every, last, state)
            wide = torch.cat([state, eye.expand_as(state)], -1).expand(count, -1, -1, -1)
            mixed, after, wide = mixer(normed, valid, last.expand(count, -1, -1), wide)
            end, p = wide.chunk(2, -1)
            kept.append(Kept(last=after, p=p, h=end - p @ state))
        x = layer.feed_forward(x, mixed)
        before = layer.feed_forward(before, lead_mixed) if lead_mixed is not None else before
    return kept


@torch.inference_mode()
def answer(
    model: Hybrid, prompts: Prompts, kept: list[Kept], recomputed: torch.Tensor, transitions: Transitions = "all"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the question's tokens, [B, Q, vocab_size], and the attention of the question itself to each chunk,
    [B, n], the mean over layers and heads.

    recomputed: [B, n] bool, the chunks that are text.
    """
    batch, n, length = prompts.ids.shape
    device, shape = prompts.ids.device, model.shape
    x, y = model.embed_tokens(prompts.ids), model.embed_tokens(prompts.question)
    valid, positions = prompts.valid, prompts.positions
    asked = torch.arange(y.shape[1], device=device)
    question_positions = prompts.lens.sum(1)[:, None] + asked
    every = torch.ones(y.shape[:2], dtype=torch.bool, device=device)
    cos_sin, question_cos_sin = model.cos_sin(positions.flatten(1)), model.cos_sin(question_positions)
    flat, places = valid.flatten(1), positions.flatten(1)
    doc_mask = flat[:, None] & (places[:, None] <= places[:, :, None]) | torch.eye(
        n * length, dtype=torch.bool, device=device
    )
    question_mask = torch.cat(
        [flat[:, None].expand(-1, len(asked), -1), (asked[None] <= asked[:, None]).expand(batch, -1, -1)], 2
    )
    scores = torch.zeros(batch, n, device=device)
    for layer, alone in zip(model.layers, kept, strict=True):
        mixer, docs, question = layer.mixer, layer.before(x), layer.before(y)
        if isinstance(mixer, AttentionLayer):
            q, k, v = mixer.project(docs.flatten(1, 2))
            chosen = recomputed[:, None, :, None, None]

            def merged(text, cached, chosen=chosen):
                cached = cached.unflatten(0, (batch, n)).transpose(1, 2)
                return torch.where(chosen, text.unflatten(2, (n, length)), cached).flatten(2, 3)

            k, v = rotate(merged(k, alone.k), cos_sin), merged(v, alone.v)
            mixed = mixer.attend(rotate(q, cos_sin), k, v, doc_mask).unflatten(1, (n, length))
            q, own_k, own_v = mixer.project(question)
            q, keys = rotate(q, question_cos_sin), torch.cat([k, rotate(own_k, question_cos_sin)], 2)
            asked_mixed = mixer.attend(q, keys, torch.cat([v, own_v], 2), question_mask)
            weights = (q @ keys.mT * shape.head_dim**-0.5).masked_fill(~question_mask[:, None], -torch.inf).softmax(-1)
            counts = (asked < prompts.question_lens[:, None])[:, None, :, None]
            scores += (weights * counts).mean(1).sum(1)[:, : n * length].unflatten(1, (n, length)).sum(-1)
        else:
            last, state = zero_states(shape, batch, device)
            h, p, tails = (each.unflatten(0, (batch, n)) for each in (alone.h, alone.p, alone.last))
            outputs = []
            for i in range(n):
                out, text_last, text_state = mixer(docs[:, i], valid[:, i], last, state)
                outputs.append(out)
                linked, chunk_last = h[:, i], tails[:, i]
                if transitions == "all":
                    linked = linked + p[:, i] @ state
                elif transitions == "skipped":
                    linked, chunk_last = state, last.to(chunk_last.dtype)
                chosen = recomputed[:, i, None, None]
                state = torch.where(chosen[..., None], text_state, linked)
                last = torch.where(chosen, text_last, chunk_last)
            mixed = torch.stack(outputs, 1)
            asked_mixed, _, _ = mixer(question, every, last, state)
        x, y = layer.feed_forward(x, mixed), layer.feed_forward(y, asked_mixed)
    return model.logits(y), scores


def most_attended(scores: torch.Tensor, lens: torch.Tensor, ratio: float) -> torch.Tensor:
    """The chunks to recompute: those with the highest scores that fit into a share of all tokens, [B, n] bool."""
    chosen, room = torch.zeros_like(lens, dtype=torch.bool), ratio * lens.sum(1)
    for i in scores.argsort(1, descending=True).unbind(1):
        cost = lens.gather(1, i[:, None])[:, 0]
        fits = cost <= room
        chosen.scatter_(1, i[:, None], fits[:, None])
        room = room - cost * fits
    return chosen
