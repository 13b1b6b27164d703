"""Put objects, uint8 tensors of any length, into SGLang's storage backends, and get them."""

from typing import Any

import torch


class TensorBackend:
    """A backend that takes tensors."""

    def __init__(self, backend: Any):
        self.backend = backend

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate a uint8 buffer for `put` and `get`, to be used for as long as it lives."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def put(self, key: str, stored: torch.Tensor) -> bool:
        """Store an object. Returns whether that succeeded."""
        return bool(self.backend.batch_set([key], [stored]))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        """Read an object into `stored`. Returns whether it was found."""
        if not self.backend.exists(key):
            return False
        found = self.backend.batch_get([key], [stored])
        return bool(found) and found[0] is not None


class AddressBackend(TensorBackend):
    """A backend that takes addresses in registered memory: Mooncake."""

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        memory = super().new_memory(num_bytes)
        self.backend.register_buffer(memory)
        return memory

    def put(self, key: str, stored: torch.Tensor) -> bool:
        return self.backend.set(key, target_location=stored.data_ptr(), target_sizes=len(stored))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        if not self.backend.exists(key):
            return False
        return self.backend.get(key, target_location=stored.data_ptr(), target_sizes=len(stored))
