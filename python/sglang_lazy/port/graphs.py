"""Decode graphs for batches with linked rows: SGLang captures and chooses them, as a variant of attention."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from sglang.srt.model_executor.runner_utils.capture_mode import (
    _set_capture_attention_variant,
    get_capture_attention_variant,
)

from sglang_lazy.attention.table import SegmentTable, table_of
from sglang_lazy.attention.unrotated import UnrotatedBatch
from sglang_lazy.port.hooks import Hooks

_STOCK, _LINK = "stock", "link"
HOOKS = Hooks()
_DRAFTING = HOOKS.on(
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
    "sglang.srt.speculative.frozen_kv_mtp_cuda_graph_runner.FrozenKVMTPCudaGraphRunner",
)


class LinkVariants:
    """The variants of each decode graph: SGLang's `AttentionGraphVariants`."""

    capture_labels: ClassVar[tuple[str, ...]] = (_STOCK, _LINK)

    def __init__(self, table: SegmentTable):
        self._table = table

    def select(self, _forward_batch: Any) -> str:
        return _STOCK if self._table.current is None else _LINK


def batch_of_graph(table: SegmentTable, in_capture: bool) -> Any:
    """The table's current batch; in the capture of a graph for linked rows, an empty one."""
    if in_capture:
        return table.batch_type() if captures_linked_rows() else None
    return table.current


def captures_linked_rows() -> bool:
    """Whether a graph for linked rows is being captured, or run once before that."""
    return get_capture_attention_variant() == _LINK


@HOOKS.on("sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner").feature(
    "capture", "BEFORE", "decode graphs for linked rows"
)
def add_variants(graph_runner: Any) -> None:
    """Before `DecodeCudaGraphRunner.capture`: have each shape captured again for linked rows. The models to which
    SGLang gives variants of its own reuse no chunks."""
    runner = graph_runner.model_runner
    table = table_of(runner.req_to_token_pool)
    if table is None or runner.is_draft_worker:
        return
    if table.batch_type is not UnrotatedBatch:  # whose decode is SGLang's
        graph_runner.attention_graph_variants = LinkVariants(table)


@_DRAFTING.feature("capture_one_shape", "AROUND", "graphs that draft over linked rows")
def capture_drafting(capture: Callable, graph_runner: Any, *args: Any, **kwargs: Any) -> None:
    """Around `capture_one_shape` of the runners whose model drafts: capture the shape again for linked rows. They have
    no variants of attention, but keys of their own, see `key_of_drafting`."""
    capture(graph_runner, *args, **kwargs)
    if drafts_over_chunks(graph_runner):
        _set_capture_attention_variant(_LINK)
        try:
            capture(graph_runner, *args, **kwargs)
        finally:
            _set_capture_attention_variant(None)


@_DRAFTING.feature("_make_graph_key", "AROUND", "graphs that draft over linked rows")
def key_of_drafting(make: Callable, graph_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `_make_graph_key` of the same runners: the graph for linked rows, if they are being captured or the batch
    has some."""
    key = make(graph_runner, *args, **kwargs)
    table = table_of(graph_runner.model_runner.req_to_token_pool)
    running = table is not None and table.current is not None
    if captures_linked_rows() or (running and drafts_over_chunks(graph_runner)):
        return dataclasses.replace(key, attention_variant=_LINK)
    return key


def drafts_over_chunks(graph_runner: Any) -> bool:
    """Whether the model that drafts has the link path."""
    table = table_of(graph_runner.model_runner.req_to_token_pool)
    return table is not None and table.model.draft is not None
