"""Properties of a GPU on which kernel launches depend."""

import functools

import torch


@functools.cache
def num_sms(device: torch.device) -> int:
    """The number of SMs; 1 without a GPU, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may use; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009, in no stub
