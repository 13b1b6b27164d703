"""The test of sampled answers: it accepts what chains of drafts should give, and no mistake of verification."""

import itertools
import random

import pytest
import torch

from oracle.sampling import MAX_DEVIATIONS, check_samples, divergence, joint
from oracle.segments import text

VOCAB, TOKENS, SAMPLES = 8, 3, 2000


class Table:
    """A model with a random distribution after each answer, as peaked as those of the tests that serve."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        answers = [answer for n in range(TOKENS) for answer in itertools.product(range(VOCAB), repeat=n)]
        self.after = {a: (1.5 * torch.randn(VOCAB, generator=generator)).softmax(-1) for a in answers}
        self.model = self.config = self  # as an oracle has it
        self.vocab_size = VOCAB

    def logprobs(self, _prompt, generated):
        return torch.stack([self.after[tuple(generated[:n])].log() for n in range(len(generated) + 1)])


def right(rng, probs, draft):
    """Accept a draft as often as it is likely; else any other token."""
    if rng.random() < probs[draft]:
        return draft
    return rng.choices(range(VOCAB), [0 if token == draft else p for token, p in enumerate(probs)])[0]


def with_the_refused(rng, probs, draft):
    """A refused draft may be drawn again."""
    return draft if rng.random() < probs[draft] else rng.choices(range(VOCAB), probs)[0]


def too_easily(rng, probs, draft):
    return draft if rng.random() < 1.3 * probs[draft] else right(rng, probs, draft)


def of_another_place(rng, probs, draft):
    """The distribution of a token whose place is one off."""
    return right(rng, probs[1:] + probs[:1], draft)


def greedy(_rng, probs, _draft):
    return max(range(VOCAB), key=probs.__getitem__)


def sample(table, verify):
    """Answers whose first token is drawn, and the others verified. Every second draft is the likeliest token."""
    rng, samples = random.Random(1), []
    for _ in range(SAMPLES):
        answer = tuple(rng.choices(range(VOCAB), table.after[()].tolist()))
        while len(answer) < TOKENS:
            probs = table.after[answer].tolist()
            draft = max(range(VOCAB), key=probs.__getitem__) if len(answer) % 2 else sum(answer) % VOCAB
            answer += (verify(rng, probs, draft),)
        samples.append(answer)
    return samples


def test_probabilities_of_answers():
    """Against the product along each answer."""
    table = Table()
    expected = joint(table, [text([0])], TOKENS)
    for answer in itertools.product(range(VOCAB), repeat=TOKENS):
        product = 1.0
        for n in range(TOKENS):
            product *= table.after[answer[:n]][answer[n]].item()
        assert expected[answer].item() == pytest.approx(product, rel=1e-5)


def test_verified_answers_pass():
    for seed in range(4):
        table = Table(seed)
        check_samples(sample(table, right), joint(table, [text([0])], TOKENS))


@pytest.mark.parametrize("verify", [with_the_refused, too_easily, of_another_place, greedy])
def test_mistakes_of_verification_are_found(verify):
    """By far, so also beside what rounding to bf16 is allowed."""
    table = Table()
    with pytest.raises(AssertionError):
        check_samples(sample(table, verify), joint(table, [text([0])], TOKENS), rounding=0.02)


def test_an_estimate_without_bias():
    """Whatever the number of samples: the mean of many is that of the two distributions, and its noise is known."""
    weights = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04], dtype=torch.float64)
    other = torch.tensor([0.3, 0.3, 0.3, 0.05, 0.05], dtype=torch.float64)
    exact = ((other - weights) ** 2 / weights).sum().item()
    rng = random.Random(0)
    for truth, mean in ((weights, 0.0), (other, exact)):
        found = [divergence([[x] for x in rng.choices(range(5), truth.tolist(), k=400)], weights) for _ in range(300)]
        estimates = torch.tensor([estimate for estimate, _ in found])
        assert estimates.mean().item() == pytest.approx(mean, abs=4 * estimates.std().item() / 300**0.5 + 2e-3)
        if truth is weights:
            assert estimates.std().item() == pytest.approx(found[0][1], rel=0.2)
            assert estimates.max().item() < MAX_DEVIATIONS * found[0][1]
