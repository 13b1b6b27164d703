"""Cross attention beside SGLang's own: an attention backend that also reads the chunks of a batch.

The backend keeps its stock name and class, as with the link path. Its metadata methods describe the batch to both.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_lazy.attention.cross import CrossBatch, Readers
from sglang_lazy.attention.encoder import EncoderRows
from sglang_lazy.attention.metadata import LinkMetadata
from sglang_lazy.attention.table import SegmentTable


class CrossAttention(AttentionBackend):
    """Mixed into a stock backend's class by `with_cross_attention`. Cross layers of the model ask it.

    cross_metadata: of the current batch; None if none of its requests reads chunks.
    """

    def init_cross_attention(self, runner: Any, table: SegmentTable) -> None:
        self.cross_metadata: LinkMetadata | None = None
        self.cross_table, self.cross_model = table, table.model
        self.cross_rows = runner.req_to_token_pool.req_to_token
        config = runner.model_config
        self.cross_dims = dict(
            num_qo_heads=config.num_attention_heads // runner.ps.tp_size,
            num_kv_heads=config.get_num_kv_heads(runner.ps.tp_size),
            head_dim=config.head_dim,
        )
        self.cross_workspace = table.model.kernels.decode_workspace(
            len(self.cross_rows), table.max_segments, **self.cross_dims, device=table.ends.device
        )

        self._compile(runner)

    def _compile(self, runner: Any) -> None:
        """Attend with one token, as the encoder and as a cross layer do, so that no request waits for compilers."""
        options = dict(dtype=runner.dtype, device=self.cross_table.ends.device)
        heads, kv_heads, dim = self.cross_dims.values()
        q, k = torch.zeros(1, heads, dim, **options), torch.zeros(1, kv_heads, dim, **options)
        EncoderRows([1], False, self.cross_model.kernels, self.cross_model.layers[0].rope).attend(q, k, k, 1.0)
        slot = torch.zeros(1, dtype=torch.int32, device=self.cross_table.ends.device)
        self.cross_metadata = CrossBatch([slot], [1]).prefill(self.cross_table)
        self.read_chunks(0, q)
        self.cross_metadata = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        current = self.cross_table.current
        if not isinstance(current, CrossBatch):
            self.cross_metadata = None
        elif current.extend_lens is None:
            num_kv = sum(len(part) for part in current.slots if part is not None)
            metadata = LinkMetadata.allocate(forward_batch.batch_size, num_kv, self.cross_table)
            self._describe_decode(current, metadata, forward_batch)
        else:
            self.cross_metadata = current.prefill(self.cross_table)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        max_context = self.cross_rows.shape[1]
        self.cross_graph_metadata = LinkMetadata.allocate(max_bs, max_bs * max_context, self.cross_table)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        current = self.cross_table.current
        self.cross_metadata = None
        if isinstance(current, CrossBatch):
            self._describe_decode(current, self.cross_graph_metadata.first(forward_batch.batch_size), forward_batch)

    def _describe_decode(self, current: CrossBatch, metadata: LinkMetadata, forward_batch: ForwardBatch) -> None:
        current.fill_decode(metadata, forward_batch.req_pool_indices, self.cross_table)
        self.cross_metadata = metadata
        self.cross_model.kernels.plan_decode(
            self.cross_workspace,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.num_segments,
            metadata.segment_ends,
            metadata.segment_offsets,
            metadata.segment_ids,
            **self.cross_dims,
        )

    # What cross layers ask

    def chunk_readers(self) -> Readers | None:
        """Which of the new tokens read chunks; None if none does."""
        return None if self.cross_metadata is None else Readers(self.cross_metadata)

    def read_chunks(self, index: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of the readers' tokens over all of their chunks.

        index: of the cross layer.  q: [number of tokens, num_qo_heads, head_dim].
        """
        metadata, ops = self.cross_metadata, self.cross_model.kernels
        assert metadata is not None
        rope, caches = self.cross_model.layers[index].rope, self.cross_model.kv_buffers[index]
        options: dict[str, Any] = dict(is_neox=rope.is_neox, sm_scale=q.shape[-1] ** -0.5)
        rows = (metadata.num_segments, metadata.segment_ends, metadata.segment_offsets, rope.cos_sin_cache)
        if metadata.qo_indptr is None:
            return ops.link_decode(
                q,
                *caches,
                metadata.kv_indptr,
                metadata.kv_indices,
                *rows,
                workspace=self.cross_workspace,
                segment_ids=metadata.segment_ids,
                **options,
            )
        out = ops.link_extend(
            q,
            *caches,
            metadata.qo_indptr,
            metadata.q_positions,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.kv_positions,
            *rows,
            max_extend_len=metadata.max_extend_len,
            validate=not metadata.checked,
            **options,
        )
        metadata.checked = True
        return out


def with_cross_attention(backend: AttentionBackend, runner: Any, table: SegmentTable) -> AttentionBackend:
    """`backend` itself, with cross attention beside its own."""
    stock = type(backend)
    backend.__class__ = type(f"Cross{stock.__name__}", (CrossAttention, stock), {})
    backend.init_cross_attention(runner, table)
    return backend
