"""The policies' oracle against the block-mask oracle, and against computing one token at a time."""

import functools

import pytest
import torch
from transformers import DynamicCache

from oracle.block_mask import Oracle, attention_mask, visibility
from oracle.models import MODELS
from oracle.models.build import build
from oracle.policies import (
    PolicyOracle,
    candidates,
    epic,
    keep_all_but,
    leading_text,
    without_best,
    without_best_of_each,
)
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids

SHIFT = 20  # added to all positions, so that a preamble's are not negative
BY_DAY = ("llama", "glm4", "gpt-oss", "gemma4")  # of each kind: rotation of a part, sinks and windows, two head sizes
every_model = pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(name): both oracles of a model, cached for the module."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: (PolicyOracle(build(name, folder)), Oracle(build(name, folder))))


def prompts(seed):
    """Chunks at the start, adjacent, of one token and at the end, with text before and between."""
    dice = Dice(seed)
    middle = [dice.text(7), dice.chunk(21), dice.chunk(1), dice.text(3), dice.chunk(15)]
    return {"text last": [*middle, dice.text(4)], "chunk last": middle, "chunk first": [dice.chunk(9), *middle]}


def close(actual, expected):
    return torch.allclose(actual, expected, atol=1e-4, rtol=0)


def brute_force(oracle, segments, generated, recomputed, preamble):
    """Log-probabilities after each recomputed token, one token at a time and without a mask.

    Each chunk is first computed as the end of a prompt of its own; recomputed tokens then replace their entries.
    """
    ids, entries, start = token_ids(segments), {}, 0
    for segment in segments:
        if segment.kind == "chunk":
            cache = DynamicCache()
            position_ids = torch.arange(start - len(preamble), start + len(segment.ids))[None] + SHIFT
            oracle.model(torch.tensor([[*preamble, *segment.ids]]), position_ids=position_ids, past_key_values=cache)
            for i in set(candidates(segments)) & set(range(start, start + len(segment.ids))) - set(recomputed):
                at = i - start + len(preamble)
                entries[i] = [(layer.keys[:, :, [at]], layer.values[:, :, [at]]) for layer in cache.layers]
        start += len(segment.ids)
    for i, token in enumerate([*ids, *generated]):
        if i in entries:
            continue
        before = [entries[j] for j in sorted(entries) if j < i]
        past = [[torch.cat(parts, 2) for parts in zip(*layer, strict=True)] for layer in zip(*before, strict=True)]
        cache = DynamicCache(past)
        out = oracle.model(torch.tensor([[token]]), position_ids=torch.tensor([[i + SHIFT]]), past_key_values=cache)
        entries[i] = [(layer.keys[:, :, -1:], layer.values[:, :, -1:]) for layer in cache.layers]
        if i >= len(ids) - 1:
            yield out.logits[0, -1].log_softmax(-1)


@every_model
def test_everything_kept_is_the_block_mask(load, name):
    oracle, block = load(name)
    for segments in prompts(name).values():
        kept = [[(0, len(segment.ids))] for segment in segments if segment.kind == "chunk"]
        assert close(oracle.logprobs(segments, [20, 30], kept), block.logprobs(segments, [20, 30]))


@every_model
def test_nothing_kept_is_full_attention(load, name):
    """Whatever the preamble, since only kept tokens have seen it."""
    oracle, block = load(name)
    for segments in prompts(name).values():
        kept = [() for segment in segments if segment.kind == "chunk"]
        expected = block.logprobs([text(token_ids(segments))], [20, 30])
        assert close(oracle.logprobs(segments, [20, 30], kept, preamble=(21, 22, 23)), expected)


@every_model
@pytest.mark.parametrize("preamble", [(), Dice("preamble").ids(11)], ids=["alone", "preamble"])
def test_holes_equal_brute_force(load, name, preamble):
    """Holes at the start, middle and end of chunks; chunks without holes, and chunks that keep nothing."""
    oracle, _ = load(name)
    rng = Dice(name).rng
    for segments in prompts(name).values():
        positions = candidates(segments)
        recomputed = {positions[0], positions[-1], *rng.sample(positions, 12)}
        kept = keep_all_but(segments, recomputed)
        with torch.inference_mode():
            expected = torch.stack(list(brute_force(oracle, segments, [20, 30], recomputed, preamble)))
        actual = oracle.logprobs(segments, [20, 30], kept, preamble)
        assert close(actual, expected)
        # Both the holes and the preamble must make a difference.
        assert (actual - oracle.logprobs(segments, [20, 30], keep_all_but(segments, ()), preamble)).abs().max() > 0.05
        if preamble:
            assert (actual - oracle.logprobs(segments, [20, 30], kept)).abs().max() > 0.05


@every_model
def test_query_scores_are_attention_under_the_block_mask(load, name):
    oracle, block = load(name)
    for kind, segments in prompts(name).items():
        query = 4 if kind == "text last" else 1
        positions = torch.arange(len(token_ids(segments)))
        mask = attention_mask(block.model, visibility(segments), positions, positions)
        with torch.inference_mode():
            weights = block.model(
                torch.tensor([token_ids(segments)]), attention_mask=mask, output_attentions=True
            ).attentions
        by_layer = torch.stack([layer[0, :, -query:, candidates(segments)].sum((0, 1)) for layer in weights])
        assert torch.allclose(oracle.query_scores(segments), by_layer.sum(0), atol=1e-5, rtol=1e-4)
        assert torch.allclose(oracle.query_scores(segments, layers=[1]), by_layer[1], atol=1e-5, rtol=1e-4)


def test_blend_scores_are_deviations_of_unrotated_keys(load):
    """A rotation preserves the norm of a difference, so keys can be compared before it."""
    oracle, block = load("qwen2")
    segments, keys = prompts(0)["text last"], []
    block.model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _module, _args, out: keys.append(out[0]))
    block.logprobs(segments)
    block.logprobs([text(token_ids(segments))])
    expected = (keys[0] - keys[1]).square().sum(-1)[candidates(segments)]
    assert torch.allclose(oracle.blend_scores(segments), expected, rtol=1e-3, atol=1e-4)


def test_a_preamble_changes_scores(load):
    oracle, _ = load("llama")
    segments = prompts(0)["text last"]
    for scores in (oracle.query_scores, oracle.blend_scores):
        assert not torch.allclose(scores(segments, preamble=(21, 22, 23)), scores(segments), rtol=0.01)


def test_what_each_rule_keeps():
    """Of chunks of 4, 1 and 3 tokens, the first of which starts the prompt."""
    segments = [chunk([0] * 4), chunk([0]), text([0, 0]), chunk([0] * 3)]

    def kept(ranges):
        return [[i for low, high in chunk_ranges for i in range(low, high)] for chunk_ranges in ranges]

    assert candidates(segments) == [0, 1, 2, 3, 4, 7, 8]  # not the prompt's last token
    assert kept(epic(segments, 1)) == [[0, 1, 2, 3], [], [1]]
    assert kept(epic(segments, 5)) == [[0, 1, 2, 3], [], []]
    scores = torch.tensor([1.0, 5, 1, 1, 0, 5, 1])
    assert kept(without_best(segments, scores, 0.3)) == [[2, 3], [0], [1]]  # three of seven; ties go to the earlier
    assert kept(without_best(segments, scores, 0)) == [[0, 1, 2, 3], [0], [0, 1]]
    assert kept(without_best_of_each(segments, scores, 0.3)) == [[2, 3], [], [1]]  # two of four, one of one, one of two
    assert leading_text(segments) == ()
    assert leading_text([text([5]), text([6, 7]), *segments]) == (5, 6, 7)


@pytest.mark.parametrize("segments", [[chunk([20])], [text([20, 21])]], ids=["one token", "no chunk"])
def test_nothing_to_keep(load, segments):
    oracle, block = load("llama")
    for kept in (oracle.query(segments, 0.5), oracle.blend(segments, 0.5), epic(segments, 1)):
        assert close(oracle.logprobs(segments, [30], kept), block.logprobs(segments, [30]))


def test_query_and_blend_recompute_the_highest_scores(load):
    oracle, _ = load("llama")
    segments = prompts(0)["text last"]
    for kept, scores in (
        (oracle.query(segments, 0.2), oracle.query_scores(segments)),
        (oracle.blend(segments, 0.2), oracle.blend_scores(segments)),
    ):
        assert kept == keep_all_but(segments, [candidates(segments)[i] for i in scores.topk(8).indices])
