"""Attention over latents (MLA) without a rotation, as in Kimi Linear, in batches with chunks.

It is SGLang's own, see `UnrotatedBatch`. Added are the rows that it is shown, and waiting for chunks from the host.
"""

import functools
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.model import ServedModel
from sglang_lazy.port.model.attention import StockPart, copy_ranges


class LatentAttention(AttentionBackend):
    """Mixed into a stock backend's class by `with_link_path`.

    link_part: the rows of the current batch; None if they are those that SGLang knows.
    """

    def init_link_path(self, runner: Any, table: SegmentTable, _model: ServedModel) -> None:
        """Set up the path for a `ModelRunner` whose model is loaded."""
        self.link_table, self.link_rows = table, runner.req_to_token_pool
        self.link_part: StockPart | None = None
        read_latents(runner.prefill_attention_backend_str, table)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.link_part, current = None, self.link_table.current
        if current is None:
            return super().init_forward_metadata(forward_batch)
        copy = functools.partial(copy_ranges, self.link_rows.req_to_token, forward_batch.req_pool_indices)
        self.link_part = part = StockPart.of(forward_batch, current, copy)
        with part.shown_to(self.link_rows.req_to_token):
            super().init_forward_metadata(part.batch)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        """The pool has the keys of all pieces before any of them is read: SGLang stores them first."""
        if self.link_table.has_chunks and self.link_table.loads is not None:
            self.link_table.loads.wait(layer.layer_id)
        if (part := self.link_part) is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        with part.shown_to(self.link_rows.req_to_token):
            return super().forward_extend(q, k, v, layer, part.batch, save_kv_cache=save_kv_cache, **kwargs)


def read_latents(backend: str, table: SegmentTable) -> None:
    """Have passes with chunks read the cache as latents, whatever SGLang would choose for its attention `backend`: the
    other ways expand what a whole row has cached, which they find by the rows that SGLang knows."""
    # Models with other attention do not need the module.
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    stock = handlers.AttentionBackendRegistry.get_handler(backend)

    def method(attn: Any, forward_batch: ForwardBatch) -> Any:
        return handlers.AttnForwardMethod.MLA if table.has_chunks else stock(attn, forward_batch)

    handlers.AttentionBackendRegistry.register(backend, method)
