"""Block attention over copies: each request gets its own copy of its chunks, with keys rotated to their positions.

Block-Attention (arXiv 2409.15355) reuses KV this way; it is the baseline to compare with. A copied chunk is like text:
decode, and prefill of text after the last chunk, run on SGLang's own attention.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sgl_kernel_lazy.caches import Caches
from sglang_lazy.core.device import to_device
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.policy import IN_WINDOW_POOL, ServerTraits
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.state import as_linked
from sglang_lazy.policies.block import Block


@dataclasses.dataclass
class ChunkCopy:
    """A request's own copy of its chunks, rotated to their positions.

    source, slots: int64 [n], the slots to copy from and to.
    written: whether the copy has been launched.
    """

    source: torch.Tensor
    slots: torch.Tensor
    written: bool = False


class Copy(Block):
    name = "copy"
    in_place = False
    needs_resident = True  # copying is the first launch of a forward pass

    def unfit(self, server: ServerTraits) -> str | None:
        if server.window_pool:
            return f"link copy: copies of chunks {IN_WINDOW_POOL}"
        return "link copy: rotated keys would be rounded to fp8 a second time" if server.fp8_cache else None

    def num_own_slots(self, prompt: LinkedPrompt) -> int:
        return prompt.num_chunk_tokens

    def warm_up(self, model: ServedModel) -> None:
        model.part(ChunkCopier)

    def begin(self, req: Any, rows: Any) -> None:
        """Replace the slots of the chunks in the request's row by its own.

        Raises RuntimeError if memory runs out, as SGLang does for a batch; admission has reserved it.
        """
        state = as_linked(req)
        if state.own is None:
            source = rows.read(req, 0, state.prompt.num_chunk_tokens)
            slots = rows.device.allocate(len(source))
            rows.write(req, 0, slots)
            state.own = ChunkCopy(source, slots)

    def before_forward(self, reqs: Sequence[Any], model: ServedModel, rows: Any) -> None:
        new = [req for req in reqs if not as_linked(req).own.written]
        if not new:
            return
        copies = [as_linked(req).own for req in new]
        slices = [chunk for req in new for chunk in as_linked(req).prompt.chunks]
        source, slots = (torch.cat(each) for each in zip(*((copy.source, copy.slots) for copy in copies), strict=True))
        for each in filter(None, (model, model.draft)):
            offsets = each.rotations([chunk.offset for chunk in slices])
            each.part(ChunkCopier).copy(source, slots, np.repeat(offsets, [chunk.num_kept for chunk in slices]))
        for req, copy in zip(new, copies, strict=True):
            copy.written = True
            # Whatever reuses the chunks' slots is launched later, so they need no lock from here on.
            rows.let_go_of_chunks(req)

    def end(self, req: Any, rows: Any) -> None:
        state = as_linked(req)
        if state.own is not None:
            rows.device.free(state.own.slots)
            state.own = None


class ChunkCopier:
    """Copies cached KV between slots in all layers of a model, rotating the keys."""

    def __init__(self, model: ServedModel):
        groups: dict[int, tuple[AttentionLayer, list]] = {}
        for layer_id, layer in model.layers.items():  # in one pool, so of one shape
            groups.setdefault(id(layer.rope), (layer, []))[1].append(model.kv_buffers[layer_id])
        self.groups = [(layer.kernels, _caches(layer, buffers)) for layer, buffers in groups.values()]
        # Compile the kernel. Slot 0 never holds a request's KV.
        slots = torch.zeros(1, dtype=torch.int64, device=self.groups[0][1].cos_sin_cache.device)
        self.copy(slots, slots, np.zeros(1, dtype=np.int64))

    def copy(self, source: torch.Tensor, target: torch.Tensor, offsets: np.ndarray) -> None:
        """Copy `source` to `target` (slots, int64 [n]) and rotate the keys by `offsets` (int64 [n])."""
        rotations = to_device(offsets, source.device)
        for kernels, caches in self.groups:
            kernels.copy_rotated(caches, source, target, rotations)


def _caches(layer: AttentionLayer, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Caches:
    """Those of all layers that rotate as `layer` does."""
    k_caches, v_caches = zip(*buffers, strict=True)
    rope = layer.rope
    return Caches(k_caches=k_caches, v_caches=v_caches, cos_sin_cache=rope.cos_sin_cache, is_neox=rope.is_neox)
