"""The small hybrid: its delta rule, its chunks, and its training."""

import json

import pytest
import torch
from torch.nn import functional

from research.quality import hybrid_worlds, train_hybrid
from research.quality.hybrid import DeltaLayer, Hybrid, HybridShape, delta_rule, zero_states
from research.quality.hybrid_chunks import Prompts, answer, compute_alone, most_attended
from research.quality.leaning import LEANING

SHAPE = HybridShape(vocab_size=50, hidden_size=32, intermediate_size=48, num_heads=2, head_dim=16)
TOLERANCE = 1e-4


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Hybrid(SHAPE)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)  # so that layers matter
    return model


def draw_prompts():
    gen = torch.Generator().manual_seed(0)
    lens = torch.tensor([[9, 5, 12], [4, 12, 3]])
    ids = torch.randint(3, 50, (2, 3, 12), generator=gen)
    return Prompts(ids, lens, torch.randint(3, 50, (2, 7), generator=gen), torch.tensor([4, 5]))


def test_blocks_are_the_recurrence():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 150, 8, generator=gen).double() for _ in range(3))
    k = functional.normalize(k + k.mean(2, keepdim=True), dim=-1)
    g, beta = -torch.rand(2, 3, 150, generator=gen).double() / 20, torch.rand(2, 3, 150, generator=gen).double()
    first = torch.randn(2, 3, 8, 8, generator=gen).double()
    out, last = delta_rule(q, k, v, g, beta, first)
    state = first
    for t in range(150):
        state = state * g[:, :, t, None, None].exp()
        error = v[:, :, t] - (state * k[:, :, t, :, None]).sum(-2)
        state = state + (beta[:, :, t, None] * k[:, :, t])[..., None] * error[..., None, :]
        torch.testing.assert_close(out[:, :, t], (state * q[:, :, t, :, None]).sum(-2))
    torch.testing.assert_close(last, state)


def test_a_prompt_recomputed_as_a_whole_is_the_trained_models(model):
    prompts = draw_prompts()
    logits, _ = answer(model, prompts, compute_alone(model, prompts), torch.ones(2, 3, dtype=torch.bool))
    for row in range(2):
        text = torch.cat([ids[:n] for ids, n in zip(prompts.ids[row], prompts.lens[row], strict=True)])
        _, expected = model(text[None], torch.tensor([len(text)]), prompts.question[row][None, None])
        torch.testing.assert_close(logits[row], expected[0], atol=TOLERANCE, rtol=TOLERANCE)


def test_branches_go_on_from_their_text(model):
    """As if each were the end of its text; what pads a text is not seen."""
    text, branch = torch.randint(3, 50, (1, 20)), torch.randint(3, 50, (1, 1, 6))
    _, branched = model(functional.pad(text, (0, 9)), torch.tensor([20]), branch)
    whole, _ = model(torch.cat([text, branch[0]], 1), torch.tensor([26]), branch)
    torch.testing.assert_close(branched[0], whole[0, 20:], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("preamble", [None, torch.arange(3, 20)])
def test_p_and_h_are_what_a_chunk_does_to_a_state(model, preamble):
    """Token by token, with keys, values and gates that it had alone or behind its preamble."""
    prompts = draw_prompts()
    layer = model.layers[0]
    kept = compute_alone(model, prompts, preamble)[0]
    state = torch.randn(1, SHAPE.num_heads, SHAPE.head_dim, SHAPE.head_dim).expand(6, -1, -1, -1)
    last, _ = zero_states(SHAPE, 6, state.device)
    if preamble is not None:
        lead, zero = model.embed_tokens(preamble[None]), zero_states(SHAPE, 1, state.device)
        _, last, _ = layer.mixer(layer.before(lead), torch.ones(1, len(preamble), dtype=torch.bool), *zero)
        last = last.expand(6, -1, -1)
    x = layer.before(model.embed_tokens(prompts.ids.flatten(0, 1)))
    _, after, direct = layer.mixer(x, prompts.valid.flatten(0, 1), last, state)
    assert isinstance(layer.mixer, DeltaLayer)
    torch.testing.assert_close(kept.p @ state + kept.h, direct, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(kept.last, after)


def test_one_chunk_alone_is_text_at_the_beginning(model):
    """And later chunks are not; forgetting what was before the last chunk changes the answer."""
    prompts = draw_prompts()
    alone = compute_alone(model, prompts)
    first = torch.tensor([[False, True, True]] * 2)
    whole, _ = answer(model, prompts, alone, ~torch.zeros_like(first))
    torch.testing.assert_close(answer(model, prompts, alone, first)[0], whole, atol=TOLERANCE, rtol=TOLERANCE)
    block, _ = answer(model, prompts, alone, torch.zeros_like(first))
    assert (block - whole).abs().max() > 0.01
    for transitions in ("none", "skipped"):
        other, _ = answer(model, prompts, alone, torch.zeros_like(first), transitions)
        assert (block - other).abs().max() > 0.01


def test_the_most_attended_chunks_within_the_ratio():
    scores, lens = torch.tensor([[1.0, 4, 3, 2]]), torch.tensor([[10, 30, 50, 10]])
    assert most_attended(scores, lens, 0.5).tolist() == [[True, True, False, True]]
    assert most_attended(scores, lens, 0.05).tolist() == [[False] * 4]


def test_training_writes_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid_worlds, "LEANING", {"alone": LEANING["alone"]})
    args = ["--minutes", "0.02", "--worlds", "4000", "--batch", "2", "--count", "2", "--documents", "3"]
    monkeypatch.setattr("sys.argv", ["train_hybrid", "--out", str(tmp_path), *args])
    train_hybrid.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["results"]) == {"alone", "alone-2-hop"} and found["steps"] >= 1
    assert found["results"]["alone"]["full"]["kl"] == 0 and found["results"]["alone"]["full"]["recomputed"] == 1
    assert (tmp_path / "weights.pt").stat().st_size < 16 * 2**20
