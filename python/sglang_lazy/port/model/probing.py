"""The forward passes of probes, and the measurements taken in them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_lazy.attention.probes import (
    AllReduce,
    ProbeSums,
    deviating_layer,
    measure_deviation,
    measure_key_size,
    probed_layers,
)
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.policy import Measure
from sglang_lazy.core.state import as_linked, linked
from sglang_lazy.port.facts import tp_size
from sglang_lazy.port.hooks import feature
from sglang_lazy.port.model.attention import KeysStored

_MEASURES: dict[Measure, Callable] = {"deviation": measure_deviation, "key size": measure_key_size}
"""The measurements taken after the last pass; attention is summed layer by layer during each."""


@contextlib.contextmanager
def probing(batch: Any, current: LinkedBatch | None, runner: Any, table: SegmentTable) -> Iterator[None]:
    """A context for a batch's forward pass: make `current` the table's batch, and take the measurements of probes."""
    probes = [req for req in batch.reqs if (state := linked(req)) is not None and state.probe is not None]
    sums = ProbeSums.of(current, probed_layers(table.model.layers), runner.device) if probes else None
    partial = any(as_linked(req).recomputes for req in probes)
    with table.running(current, sums, deviating_layer(table.model) if partial else None):
        yield
    reduce = _all_reduce(runner)
    if sums is not None:
        sums.deliver(batch.reqs, reduce)
    for req in probes:
        state = as_linked(req)
        if req is not batch.chunked_req and state.probe is not None:
            for name in _MEASURES.keys() & state.policy.probes:
                _MEASURES[name](req, req.last_node.chunks, table.model, batch.tree_cache.rows, reduce)
            state.probe.send()


def _all_reduce(runner: Any) -> AllReduce:
    return get_tp_group().all_reduce if tp_size() > 1 else lambda tensor: tensor


def end_at_keys(original: Callable, eager_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `EagerRunner.execute`: return no logits from a pass that ends at keys."""
    try:
        return original(eager_runner, *args, **kwargs)
    except KeysStored:
        return LogitsProcessorOutput(next_token_logits=None)


HOOKS = (
    feature(
        "sglang.srt.model_executor.runner.eager_runner.EagerRunner.execute",
        end_at_keys,
        "AROUND",
        "passes of probes that end at the keys of a layer",
    ),
)
