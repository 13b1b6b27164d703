"""The other way to link (`--lazy-link materialize`): each request gets a copy of its chunks, turned to their positions.

This is how Block-Attention (arXiv 2409.15355) reuses position-free KV, and is here to be compared with. A copied chunk
is like text: decode, and prefill of text that stands behind all the chunks, run on SGLang's own attention.
"""

from types import ModuleType

import numpy as np
import torch

from sglang_lazy.attention.table import to_device
from sglang_lazy.port.rope import LayerRope


class ChunkCopier:
    """Copies cached entries from slot to slot in all layers of a KV pool, and turns their keys on the way."""

    def __init__(self, kv_pool, link_ops: ModuleType, ropes: dict[int, LayerRope]):
        self.link_ops = link_ops
        groups: dict[int, tuple[LayerRope, list]] = {}
        for layer_id, rope in ropes.items():
            groups.setdefault(id(rope), (rope, []))[1].append(kv_pool.get_kv_buffer(layer_id))
        self.groups = list(groups.values())
        device = self.groups[0][0].cos_sin_cache.device
        slots = torch.tensor([0, 1], device=device)
        self.copy(slots[:1], slots[1:], np.zeros(1, dtype=np.int64))  # compiles; the first slots hold nothing yet

    def copy(self, source: torch.Tensor, target: torch.Tensor, offsets: np.ndarray) -> None:
        """source, target: int64 [n], slots on the device.  offsets: int64 [n], by how much each key is turned."""
        offsets = to_device(offsets, source.device)
        for rope, caches in self.groups:
            k_caches, v_caches = zip(*caches, strict=True)
            self.link_ops.copy_rotated(
                k_caches, v_caches, source, target, offsets, rope.cos_sin_cache, is_neox=rope.is_neox
            )


def copier_of(req_to_token_pool) -> ChunkCopier | None:
    """The copier beside a `ReqToTokenPool`, or None where chunks are attended to in place."""
    return getattr(req_to_token_pool, "chunk_copier", None)


def write_copies(batch) -> None:
    """Before a `ScheduleBatch` runs, on its stream: copy the chunks of the requests that begin with it."""
    if (copier := copier_of(batch.req_to_token_pool)) is None:
        return
    copies = {req: req.link.copy for req in batch.reqs if getattr(req, "link", None) is not None}
    copies = {req: copy for req, copy in copies.items() if copy is not None and not copy.written}
    if not copies:
        return
    chunks = [chunk for req in copies for chunk in req.link.prompt.chunks]
    copier.copy(
        torch.cat([copy.source for copy in copies.values()]),
        torch.cat([copy.slots for copy in copies.values()]),
        np.repeat([chunk.start for chunk in chunks], [chunk.used for chunk in chunks]),
    )
    for req in copies:
        batch.tree_cache.end_copy(req)
