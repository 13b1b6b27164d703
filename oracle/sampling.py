"""Sampled answers: the exact probabilities of their first tokens, and whether many samples have them."""

import itertools
from collections.abc import Sequence

import torch

from .block_mask import Oracle
from .segments import Segment

MIN_EXPECTED = 5  # samples of a cell of Pearson's statistic; rarer answers share one
MAX_DEVIATIONS = 6  # of noise: one run in 10^7 or fewer exceeds it by chance


def joint(oracle: Oracle, prompt: list[Segment], num_tokens: int) -> torch.Tensor:
    """The probability of each answer of `num_tokens` tokens at temperature 1, fp64 [vocab_size] * num_tokens. Runs the
    model for each answer that is one token shorter, so it is for a few words."""
    vocab_size = oracle.model.config.vocab_size
    answers = itertools.product(range(vocab_size), repeat=num_tokens - 1)
    by_answer = [oracle.logprobs(prompt, list(tokens)).double() for tokens in answers]
    steps = torch.stack(by_answer).view(*[vocab_size] * (num_tokens - 1), num_tokens, vocab_size)
    logprobs = torch.zeros(*[vocab_size] * num_tokens, dtype=torch.float64)
    for i in range(num_tokens):
        # The distribution of token i is the same whatever comes after it.
        of_token = steps[(slice(None),) * i + (0,) * (num_tokens - 1 - i) + (i,)]
        logprobs += of_token.view(*[vocab_size] * (i + 1), *[1] * (num_tokens - 1 - i))
    return logprobs.exp()


def divergence(samples: Sequence[Sequence[int]], expected: torch.Tensor) -> tuple[float, float]:
    """An unbiased estimate of sum((p - expected)^2 / expected), where p are the probabilities that the samples have,
    and its standard deviation if p is `expected`.

    samples: answers of as many tokens as `expected` has dimensions.  expected: see `joint`.
    """
    counts = torch.zeros(expected.shape, dtype=torch.float64)
    counts.index_put_(tuple(torch.tensor(samples).T), torch.ones(len(samples), dtype=torch.float64), accumulate=True)
    wanted, order = (expected.flatten() * len(samples)).sort(descending=True)
    counts = counts.flatten()[order]
    alone = int((wanted >= MIN_EXPECTED).sum())
    while alone and wanted[alone:].sum() < MIN_EXPECTED:  # what the last cell has with all that are rarer
        alone -= 1
    wanted, counts = (torch.cat([each[:alone], each[alone:].sum()[None]]) for each in (wanted, counts))
    degrees = len(wanted) - 1
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    variance = 2 * degrees + (1 / wanted).sum()
    return (statistic - degrees).item() / len(samples), variance.sqrt().item() / len(samples)


def check_samples(samples: Sequence[Sequence[int]], expected: torch.Tensor, rounding: float = 0.0) -> None:
    """Assert that samples have the expected probabilities.  rounding: the divergence that the model's dtype makes."""
    found, noise = divergence(samples, expected)
    assert found <= MAX_DEVIATIONS * noise + rounding, (found, noise)
