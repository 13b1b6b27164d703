"""Scores known as soon as a chunk is filled, for a study of what `static` should recompute.

Each function takes the oracle, a prompt's segments, the policy's preamble, and prose standing in for the unknown text
before a chunk, and returns a score for each candidate, [n].
"""

from collections.abc import Callable, Sequence

import torch

from oracle.policies import PolicyOracle, chunk_spans
from oracle.segments import Segment, token_ids

Score = Callable[[PolicyOracle, list[Segment], Sequence[int], Sequence[int]], torch.Tensor]


def first(oracle, segments, preamble, prose):
    """Earlier tokens score higher: EPIC, by a share of each chunk."""
    return -torch.cat([torch.arange(end - start).float() for start, end in chunk_spans(segments)])


def second_layer_keys(oracle, segments, preamble, prose):
    """The distance of the second layer's keys from those after the prose."""
    return deviations(oracle, segments, prose)[0][0]


def all_keys(oracle, segments, preamble, prose):
    """The same over all layers, each relative to its mean."""
    return in_units_of_mean(segments, deviations(oracle, segments, prose)[0])


def all_values(oracle, segments, preamble, prose):
    return in_units_of_mean(segments, deviations(oracle, segments, prose)[1])


def deviations(oracle, segments, prose):
    """Squared deviations of keys and values between chunks alone and after the prose, [2, num_layers - 1, n].

    The first layer is left out: its keys and values depend only on the token.
    """
    fills = zip(oracle.fill(segments)[1:], oracle.fill(segments, prose)[1:], strict=True)
    parts = [[(a - b).float().square().sum((0, 1, 3)) for a, b in zip(*layer, strict=True)] for layer in fills]
    return torch.stack([torch.stack(layer) for layer in parts], 1)


def small_keys(oracle, segments, preamble, prose):
    """Keys with small norms, such as attention sinks', score higher."""
    norms = [keys.float().square().sum((0, 1, 3)) for keys, _ in oracle.fill(segments, preamble)]
    return -in_units_of_mean(segments, torch.stack(norms))


def received(oracle, segments, preamble, prose):
    """Attention received from the chunk's later tokens, over all heads and layers, per token that can attend."""
    return attention(oracle, segments, preamble)[0]


def towards_prose(oracle, segments, preamble, prose):
    """Attention that a token pays to the prose before its chunk."""
    return attention(oracle, segments, prose)[1]


def attention(oracle, segments, preamble):
    """Within chunks, over all heads and layers: what each candidate receives, and what it pays to the preamble, [2,
    n]."""
    ids, chunks, skip = token_ids(segments), [], len(preamble)
    for start, end in chunk_spans(segments):
        output = oracle.forward([*preamble, *ids[start:end]], range(start - skip, end), output_attentions=True)
        weights = sum(layer[0].float().sum(0) for layer in output.attentions)
        later = torch.arange(end - start, 0, -1, device=weights.device)
        chunks.append(torch.stack([weights[skip:, skip:].sum(0) / later, weights[skip:, :skip].sum(1)]))
    return torch.cat(chunks, 1)


def in_units_of_mean(segments: list[Segment], by_layer: torch.Tensor) -> torch.Tensor:
    """Sums [num_layers, n] scores over layers, [n]; each layer is divided by its mean in a chunk so that none
    dominates."""
    chunks = by_layer.split([end - start for start, end in chunk_spans(segments)], 1)
    return torch.cat([(chunk / chunk.mean(1, keepdim=True)).sum(0) for chunk in chunks])


STATICS: dict[str, Score] = {
    score.__name__: score
    for score in (first, second_layer_keys, all_keys, all_values, small_keys, received, towards_prose)
}
