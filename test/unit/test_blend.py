"""`blend` recomputes only tokens whose keys in the second layer can differ from the cached ones."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_lazy.attention.probes import measure_deviation
from sglang_lazy.core.model import AttentionLayer, LayerRope, ServedModel
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.core.state import LinkedRequest, Probe
from sglang_lazy.policies import get_policy

NOISE = 1e-4


def choice(ids, spans, kept, preamble, window, ratio):
    """Which tokens of the prompt are recomputed if all keys are rounded, and those that see other tokens differ.

    That is brute force: whether the last `window` tokens of each differ from those it had after the preamble.
    Returns (recomputed, seeing others), sets of positions.
    """
    prompt = LinkedPrompt.build(array("q", ids), PromptLayout(spans), kept, None, array("q", preamble))
    places = np.concatenate([chunk.positions for chunk in prompt.chunks]).tolist()
    others = set()
    for chunk in prompt.chunks:
        for i in chunk.indices.tolist():
            end = chunk.start + i + 1
            seen, cached = ids[:end], [*preamble, *ids[chunk.start : end]]
            if (seen[-window:] != cached[-window:]) if window else seen != cached:
                others.add(end - 1)
    rope = LayerRope(torch.zeros(2), len(ids) + 1, True, "cpu")
    layers = {0: AttentionLayer(1, 1, 4, rope, window), 1: AttentionLayer(1, 1, 4, rope)}
    dice = torch.Generator().manual_seed(len(ids))
    fresh, cached = torch.zeros(2, len(ids), 1, 4)
    cached[:] = NOISE * torch.rand(cached.shape, generator=dice)
    cached[sorted(others)] += 1
    model = ServedModel({0: None, 1: (torch.cat([fresh, cached]), None)}, layers)
    state = LinkedRequest(prompt, get_policy("blend"), [None] * len(spans), [False] * len(spans))
    state.probe = Probe(None, 0)
    rows = SimpleNamespace(
        read=lambda _req, start, end: torch.arange(start, end),
        chunk_slots=lambda _state, _nodes: [torch.as_tensor(chunk.positions) + len(ids) for chunk in prompt.chunks],
    )
    measure_deviation(SimpleNamespace(lazy=state), None, model, rows, lambda t: t)
    state.probe.send()
    chosen = get_policy(f"blend:ratio={ratio}").choose(prompt.chunks, state.probe.result())
    still = {
        chunk.start + i for chunk, ranges in zip(prompt.chunks, chosen, strict=True) for r in ranges for i in range(*r)
    }
    return set(places) - still, others


@pytest.mark.parametrize("ratio", [0.2, 1.0])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 64])
@pytest.mark.parametrize("preamble", [(), (1, 2), (7, 1, 2, 3), (3,)], ids=str)
@pytest.mark.parametrize("lead", [(), (1, 2), (2, 2), (9, 9, 9, 7, 1, 2, 3)], ids=str)
def test_only_tokens_that_see_others_are_recomputed(lead, preamble, window, ratio):
    first, second = [4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8]
    ids = [*lead, *first, 3, *second, 5]
    spans = ((len(lead), len(lead) + 6), (len(lead) + 7, len(lead) + 15))
    recomputed, others = choice(ids, spans, [[(0, 6)], [(0, 8)]], preamble, window, ratio)
    assert recomputed <= others
    assert len(recomputed) == min(len(others), 3 if ratio == 0.2 else 14)
