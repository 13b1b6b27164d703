"""Errors of log-probabilities in bf16, compared with those of plain PyTorch in bf16."""

from collections.abc import Callable

import torch

OfTokens = Callable[[list[int]], torch.Tensor]
"""From an answer's tokens but the last to log-probabilities, [1 + len(tokens), vocab_size]."""


class Errors:
    """The distances of answers' log-probabilities from fp32; all answers have the same length.

    Means are compared, not maxima: when rounding flips a router's choice of experts, a single token is off by 1 or 2;
    this is rare, but happens in any computation. Of two correct computations of a wide gpt-oss, over six answers of 12
    tokens, one had more than twice the other's maximum one time in 8 (Qwen3-MoE: 24), and more than twice its mean one
    time in 3,000. The worst answer is compared as well, since one wrong answer among twenty hardly moves the mean.
    """

    def __init__(self):
        self._ours, self._plain, self._full = [], [], []
        self._below, self._plain_of_best = [], []

    def add(self, output: dict, exact: OfTokens, rough: OfTokens, full: OfTokens | None = None) -> None:
        """Add an answer of SGLang's.  exact, rough: log-probabilities in fp32 and in bf16.  full: in fp32 under full
        attention."""
        tokens = output["output_ids"]
        chosen = (torch.arange(len(tokens)), torch.tensor(tokens))
        reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        logprobs = exact(tokens[:-1])
        errors = rough(tokens[:-1]) - logprobs
        expected, best = logprobs[chosen], logprobs.max(-1)
        self._ours.append((reported - expected).abs())
        self._plain.append(errors[chosen].abs())
        self._below.append(best.values - expected)
        self._plain_of_best.append(errors[chosen[0], best.indices].abs())
        if full is not None:
            self._full.append((reported - full(tokens[:-1])[chosen]).abs())

    def check(self) -> None:
        """Our errors are at most twice plain PyTorch's on average and three times in the worst answer, and smaller than
        the distance from full attention. Raises AssertionError with both errors of every token otherwise."""
        ours, plain = torch.stack(self._ours), torch.stack(self._plain)
        report = f"ours:\n{ours}\nplain PyTorch's:\n{plain}"
        assert ours.mean() <= 2 * plain.mean(), report
        assert ours.mean(1).max() <= 3 * plain.mean(1).max(), report
        if self._full:
            full = torch.stack(self._full).mean()
            assert ours.mean() < full, f"{full} from full attention, {report}"

    def check_greedy(self) -> None:
        """Each token is the best, but for rounding: as it was the best of log-probabilities with errors, it is below
        fp32's best by at most the sum of two, its own and that of fp32's best. None may be further below than the sum
        of two as large as plain PyTorch's largest of such tokens.

        For models without experts to choose between: when a choice flips, correct computations of one token differ by
        almost 2. Raises AssertionError with how far each token is below otherwise.
        """
        below = torch.stack(self._below)
        largest = torch.stack([*self._plain, *self._plain_of_best]).max()
        assert below.max() <= 2 * largest, f"{2 * largest} allowed below fp32's best:\n{below}"
