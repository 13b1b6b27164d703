"""Decode graphs for batches with linked rows: SGLang captures and chooses them, as a variant of attention."""

from typing import Any, ClassVar

from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from sglang_lazy.attention.table import SegmentTable, table_of
from sglang_lazy.port.hooks import feature

_STOCK, _LINK = "stock", "link"


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
        return table.batch_type() if get_capture_attention_variant() == _LINK else None
    return table.current


def add_variants(graph_runner: Any) -> None:
    """Before `DecodeCudaGraphRunner.capture`: have each shape captured again for linked rows. The models to which
    SGLang gives variants of its own reuse no chunks."""
    runner = graph_runner.model_runner
    table = table_of(runner.req_to_token_pool)
    if table is not None and not runner.is_draft_worker:
        graph_runner.attention_graph_variants = LinkVariants(table)


HOOKS = (
    feature(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture",
        add_variants,
        "BEFORE",
        "decode graphs for linked rows",
    ),
)
