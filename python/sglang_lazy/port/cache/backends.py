"""How objects, uint8 tensors of any length, are put into SGLang's storage backends, and got from there."""

from typing import Any

import torch


class TensorBackend:
    """A backend that takes tensors."""

    def __init__(self, backend: Any):
        self.backend = backend

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory, uint8, of which objects may be put, and into which they may be got, for as long as it lives."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def put(self, key: str, stored: torch.Tensor) -> bool:
        """Whether an object has been stored."""
        return bool(self.backend.batch_set([key], [stored]))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        """Whether there was an object to fill in."""
        if not self.backend.exists(key):
            return False
        found = self.backend.batch_get([key], [stored])
        return bool(found) and found[0] is not None


class AddressBackend(TensorBackend):
    """One that takes addresses in memory which it has registered: Mooncake."""

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
