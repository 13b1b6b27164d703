"""The KL divergence against PyTorch's of distributions."""

import torch
from torch.distributions import Categorical
from torch.distributions import kl_divergence as exact

from research.quality.divergence import kl_divergence


def test_each_tokens_divergence_in_its_direction():
    found, target = torch.randn(2, 2, 5, 30, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = exact(Categorical(logits=target), Categorical(logits=found))
    torch.testing.assert_close(kl_divergence(found, target), expected)
