"""The part of a prefill batch with linked rows or fills that SGLang's own attention computes."""

import contextlib
import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_lazy.attention.metadata import CopyRanges
from sglang_lazy.attention.rows import LinkedBatch, row_ranges, table_width
from sglang_lazy.core.device import ints_to_device


class StockPart(NamedTuple):
    """batch: passed to SGLang's attention.
    req_to_token: int32 [rows of `batch`, width], read instead of the pool's.
    """

    batch: ForwardBatch
    req_to_token: torch.Tensor

    @classmethod
    def of(
        cls,
        forward_batch: ForwardBatch,
        current: LinkedBatch,
        copy_ranges: CopyRanges,
    ) -> "StockPart":
        """`forward_batch`, with the rows of `current`.

        Linked rows cannot be left out, since the new tokens of all rows are contiguous; their results are replaced
        later. To make them cheap, they attend only to their new tokens.
        """
        linked = set(current.linked)
        rows = [
            row._replace(ranges=[(0, row.num_new)], positions=row.positions[: row.num_new]) if i in linked else row
            for i, row in enumerate(current.rows)
        ]
        prefix_lens, extend_lens = np.array([(row.prefix_len, row.num_new) for row in rows]).T
        seq_lens, indices = prefix_lens + extend_lens, np.arange(len(rows))
        width = table_width(seq_lens.tolist())
        starts, ranges = extend_lens.cumsum() - extend_lens, row_ranges(rows, indices * width)
        part = copy.copy(forward_batch)
        part.batch_size = len(rows)
        part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu = prefix_lens.tolist(), extend_lens.tolist()
        part.seq_lens_cpu, part.seq_lens_sum = torch.from_numpy(seq_lens), int(seq_lens.sum())
        device = forward_batch.seq_lens.device
        part.extend_prefix_lens, part.extend_seq_lens, part.extend_start_loc, seq_lens, indices, *ranges = (
            ints_to_device([prefix_lens, extend_lens, starts, seq_lens, indices, *ranges], device)
        )
        part.seq_lens = seq_lens.to(forward_batch.seq_lens.dtype)
        part.req_pool_indices = indices.to(forward_batch.req_pool_indices.dtype)
        req_to_token = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
        copy_ranges(req_to_token.view(-1), ranges)
        return cls(part, req_to_token)

    @contextlib.contextmanager
    def shown_to(self, pool_req_to_token: torch.Tensor) -> Iterator[None]:
        """Let SGLang's code read these rows instead of the pool's, whose tensor its backends keep references to."""
        kept, pool_req_to_token.data = pool_req_to_token.data, self.req_to_token
        try:
            yield
        finally:
            pool_req_to_token.data = kept
