"""An attention backend that also prepares cross-attention for each batch.

As with the link path, the backend keeps its name and gets a subclass of its class.
"""

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.comb.cross import CrossReader
from sglang_lazy.port.graphs import batch_of_graph


class CrossAttention(AttentionBackend):
    """Mixed into a stock backend's class by `with_cross_attention`.

    cross_reader: the model's, which SGLang's backends for prefill and decode may share.
    """

    cross_reader: CrossReader
    cross_max_context: int

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.cross_reader.describe(self.cross_reader.table.current, forward_batch.req_pool_indices)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.cross_reader.allocate_for_graphs(max_bs, self.cross_max_context)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        current = batch_of_graph(self.cross_reader.table, in_capture)
        self.cross_reader.describe_for_graph(current, forward_batch.req_pool_indices)


def with_cross_attention(backend: AttentionBackend, runner: Any, table: SegmentTable) -> AttentionBackend:
    """Mix `CrossAttention` into `backend`, which is returned."""
    stock, decoder = type(backend), runner.model.decoder
    if decoder.reader is None:
        pool = runner.req_to_token_pool.chunk_pool.kv

        def get_kv_buffer(layer: int) -> Any:
            if table.loads is not None:
                table.loads.wait(layer)
            return pool.get_kv_buffer(layer)

        decoder.reader = CrossReader(table, runner.dtype, get_kv_buffer)
    backend.__class__ = type(f"Cross{stock.__name__}", (CrossAttention, stock), {})
    backend.cross_reader, backend.cross_max_context = decoder.reader, runner.req_to_token_pool.req_to_token.shape[1]
    return backend
