"""The oracle for policies: a Hugging Face model in fp32 over the KV that a policy keeps of each chunk.

A mask cannot express that a position has two entries: one seen by later tokens of the chunk, and one recomputed. So
there are two passes: first the chunks, alone or after a preamble, then all other tokens over the kept entries.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from transformers import DynamicCache

from .block_mask import attention_mask, load_model
from .segments import Segment, token_ids

Ranges = Sequence[tuple[int, int]]
"""Tokens of a chunk, as half-open ranges of indices into it."""

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Each layer's keys (rotated) and values, [1, num_kv_heads, n, head_dim] each."""


def chunk_spans(segments: list[Segment]) -> list[tuple[int, int]]:
    """The range of each chunk in the prompt, excluding the prompt's last token, which is text."""
    ends = list(accumulate(len(segment.ids) for segment in segments))
    return [
        (end - len(segment.ids), min(end, ends[-1] - 1))
        for segment, end in zip(segments, ends, strict=True)
        if segment.kind == "chunk"
    ]


def candidates(segments: list[Segment]) -> list[int]:
    """The positions whose cached KV a policy can keep: those of all chunks, in order."""
    return [position for start, end in chunk_spans(segments) for position in range(start, end)]


def keep_all_but(segments: list[Segment], recomputed: Sequence[int]) -> list[Ranges]:
    """The kept ranges of each chunk if the tokens at these positions of the prompt are recomputed."""
    recomputed = set(recomputed)
    return [
        [(position - start, position - start + 1) for position in range(start, end) if position not in recomputed]
        for start, end in chunk_spans(segments)
    ]


def leading_text(segments: list[Segment]) -> tuple[int, ...]:
    """The tokens before the first chunk: the preamble of `base:preamble=lead`."""
    kinds = [segment.kind for segment in segments]
    return tuple(token_ids(segments[: kinds.index("chunk")])) if "chunk" in kinds else ()


def epic(segments: list[Segment], tokens: int) -> list[Ranges]:
    """LegoLink (EPIC, arXiv 2410.15332): recompute the first `tokens` of each chunk that does not start the prompt."""
    spans = [(start, end) for start, end in chunk_spans(segments) if start > 0]
    return keep_all_but(segments, [i for start, end in spans for i in range(start, min(start + tokens, end))])


def is_recomputed(segments: list[Segment], kept: Sequence[Ranges]) -> torch.Tensor:
    """Whether each candidate is left out of `kept`, [n] bool."""
    masks = []
    for (start, end), ranges in zip(chunk_spans(segments), kept, strict=True):
        mask = torch.ones(end - start, dtype=torch.bool)
        for first, last in ranges:
            mask[first:last] = False
        masks.append(mask)
    return torch.cat(masks)


def without_best(segments: list[Segment], scores: torch.Tensor, ratio: float) -> list[Ranges]:
    """Recompute the ceil(ratio * n) candidates with the highest `scores`, [n], except those with a score of 0; ties go
    to the earlier one."""
    order = scores.sort(descending=True, stable=True).indices[: math.ceil(ratio * len(scores))]
    positions = candidates(segments)
    return keep_all_but(segments, [positions[i] for i in order.tolist() if scores[i] > 0])


def without_best_of_each(segments: list[Segment], scores: torch.Tensor, ratio: float) -> list[Ranges]:
    """The same per chunk: recompute the ceil(ratio * n) highest of each chunk's n candidates."""
    kept, low = [], 0
    for start, end in chunk_spans(segments):
        order = scores[low : low + end - start].sort(descending=True, stable=True).indices.tolist()
        recomputed = set(order[: math.ceil(ratio * len(order))])
        kept.append([(i, i + 1) for i in range(end - start) if i not in recomputed])
        low += end - start
    return kept


class PolicyOracle:
    """A model with absolute positions. A preamble may have negative positions, since only distances matter."""

    def __init__(self, model_path: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        self.model = load_model(model_path, dtype, device)

    def logprobs(
        self,
        segments: list[Segment],
        generated: Sequence[int],
        kept: Sequence[Ranges],
        preamble: Sequence[int] = (),
    ) -> torch.Tensor:
        """Log-probabilities of the next token after the prompt and after each generated token.

        kept: the ranges of each chunk that keep KV computed after `preamble` (token ids that no other token sees).
        The last token of the prompt is never kept. Returns [1 + len(generated), vocab_size] fp32, on the CPU.
        """
        output = self.extend(segments, generated, kept, preamble, logits_to_keep=1 + len(generated))
        return output.logits[0].float().log_softmax(-1).cpu()

    def attention_scores(self, segments: list[Segment], preamble: Sequence[int] = ()) -> torch.Tensor:
        """The attention that each candidate receives from the query in each layer, [num_layers, n].

        Weights are summed over all heads and the tokens after the last candidate, in a pass of the text over all
        kept chunks.
        """
        positions = candidates(segments)
        if not positions:
            return torch.zeros(self.model.config.num_hidden_layers, 0)
        output = self.extend(segments, (), keep_all_but(segments, ()), preamble, output_attentions=True)
        query = len(token_ids(segments)) - 1 - positions[-1]
        return torch.stack([layer[0, :, -query:, : len(positions)].float().sum((0, 1)) for layer in output.attentions])

    def query_scores(
        self, segments: list[Segment], layers: Sequence[int] | None = None, preamble: Sequence[int] = ()
    ) -> torch.Tensor:
        """ProphetKV's scores (arXiv 2602.02579): `attention_scores` summed over `layers` (default: all); [n]."""
        scores = self.attention_scores(segments, preamble)
        return (scores if layers is None else scores[list(layers)]).sum(0)

    @property
    def last_third(self) -> list[int]:
        """The layers that `query` sums over by default: the last third of those without a window, and the layers that
        read the KV of the last of them."""
        return self.whole_layers[-math.ceil(len(self.whole_layers) / 3) :] + self._without_window(self._num_own, None)

    @property
    def whole_layers(self) -> list[int]:
        """The layers without a window that have KV of their own."""
        return self._without_window(0, self._num_own)

    @property
    def _num_own(self) -> int:
        config = self.model.config.get_text_config()
        return config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)

    def _without_window(self, start: int, end: int | None) -> list[int]:
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        return [layer for layer, kind in list(enumerate(kinds))[start:end] if kind != "sliding_attention"]

    def query(
        self,
        segments: list[Segment],
        ratio: float,
        layers: Sequence[int] | None = None,
        preamble: Sequence[int] = (),
    ) -> list[Ranges]:
        """Recompute the `ratio` of all candidates that the query attends to most."""
        return without_best(segments, self.query_scores(segments, layers, preamble), ratio)

    def blend_scores(self, segments: list[Segment], preamble: Sequence[int] = ()) -> torch.Tensor:
        """CacheBlend's scores (arXiv 2405.16444): the squared distance of the second layer's cached keys from those of
        the whole prompt under the causal mask, summed over heads and dimensions, [n]. Rounding counts as 0: it is below
        1e-13 of the largest, and tokens that the context reaches are above 1e-7."""
        positions = candidates(segments)
        if not positions:
            return torch.zeros(0)
        fresh = self.second_layer_keys(token_ids(segments))[:, :, positions]
        cached = self.fill(segments, preamble)[1][0]
        scores = (fresh - cached).float().square().sum((0, 1, 3))
        return scores.masked_fill(scores < 1e-10 * scores.max(), 0)

    @torch.inference_mode()
    def second_layer_keys(self, ids: Sequence[int]) -> torch.Tensor:
        """The second layer's keys for a whole prompt under the causal mask, [1, num_kv_heads, n, head_dim]."""
        return self.forward(ids, range(len(ids)), logits_to_keep=1).past_key_values.layers[1].keys

    def blend(self, segments: list[Segment], ratio: float, preamble: Sequence[int] = ()) -> list[Ranges]:
        """Recompute the `ratio` of all candidates whose keys deviate most."""
        return without_best(segments, self.blend_scores(segments, preamble), ratio)

    def key_sizes(self, segments: list[Segment], preamble: Sequence[int] = ()) -> torch.Tensor:
        """The squared norm of each candidate's keys relative to its chunk's mean, summed over the layers without a
        window, or over all layers if each has one, [n]."""
        caches = self.fill(segments, preamble)
        caches = [caches[layer] for layer in self.whole_layers] or caches
        sizes = torch.stack([keys.float().square().sum((0, 1, 3)) for keys, _ in caches])
        chunks = sizes.split([end - start for start, end in chunk_spans(segments) if start < end], 1)
        return torch.cat([(chunk / chunk.mean(1, keepdim=True)).sum(0) for chunk in chunks])

    @torch.inference_mode()
    def fill(self, segments: list[Segment], preamble: Sequence[int] = ()) -> Layers:
        """The KV of all candidates, each chunk computed directly after `preamble`, whose own KV is dropped."""
        ids, chunks = token_ids(segments), []
        for start, end in chunk_spans(segments):
            if start == end:  # a chunk of one token that ends the prompt
                continue
            positions = range(start - len(preamble), end)
            output = self.forward([*preamble, *ids[start:end]], positions, logits_to_keep=1)
            layers = output.past_key_values.layers
            chunks.append([[part[:, :, len(preamble) :] for part in (layer.keys, layer.values)] for layer in layers])
        return [tuple(torch.cat(parts, 2) for parts in zip(*layer, strict=True)) for layer in zip(*chunks, strict=True)]

    @torch.inference_mode()
    def extend(self, segments: list[Segment], generated: Sequence[int], kept, preamble: Sequence[int] = (), **options):
        """The output of one pass of all other tokens, including generated ones, over the kept ones."""
        ids = [*token_ids(segments), *generated]
        reused = {
            start + index
            for (start, _), ranges in zip(chunk_spans(segments), kept, strict=True)
            for low, high in ranges
            for index in range(low, high)
        }
        entries = [i for i, position in enumerate(candidates(segments)) if position in reused]
        past = [tuple(part[:, :, entries] for part in pair) for pair in self.fill(segments, preamble)]
        past_positions = [candidates(segments)[i] for i in entries]
        positions = sorted(set(range(len(ids))) - set(past_positions))
        return self.forward([ids[i] for i in positions], positions, past, past_positions, **options)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The model's `position_ids` for these positions, [n]."""
        return positions[None]

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        past: Layers = (),
        past_positions: Sequence[int] = (),
        **options,
    ):
        """The model's output for new tokens, which see past and new tokens at positions up to their own."""
        query = torch.tensor(list(positions), device=self.model.device)
        keys = torch.tensor([*past_positions, *positions], device=self.model.device)
        mask = attention_mask(self.model, keys[None, :] <= query[:, None], query, keys)
        return self.model(
            torch.tensor([list(ids)], device=self.model.device),
            attention_mask=mask,
            position_ids=self.places(query),
            past_key_values=DynamicCache(past),
            use_cache=True,
            **options,
        )
