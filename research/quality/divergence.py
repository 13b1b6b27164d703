"""How far one model's next-token distributions are from another's."""

import torch


def kl_divergence(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target || found) for each token, in nats. Both are log-probabilities, [..., vocab_size]; returns [...]."""
    return torch.nn.functional.kl_div(found, target, log_target=True, reduction="none").sum(-1)
