"""Batches in which only some requests name tokens whose log-probabilities they want (`token_ids_logprob`).

For the others, SGLang 0.5.17 returns lists where its scheduler expects tensors, and crashes.
"""

from typing import Any

import torch

from sglang_lazy.port.hooks import repair


def as_tensors(found: tuple[list, list], *_args: Any, no_copy_to_cpu: bool = False) -> tuple[list, list] | None:
    """After `get_token_ids_logprobs`: what a request did not ask for is an empty tensor, as are the other values."""
    values, ids = found
    return ([torch.as_tensor(value) for value in values], ids) if no_copy_to_cpu else None


HOOKS = (
    repair(
        "sglang.srt.layers.logprob_processor.get_token_ids_logprobs",
        as_tensors,
        "AFTER",
        "batches in which only some requests ask for token_ids_logprob",
        "SGLang returns tensors for the others, too",
    ),
)
