"""The forward passes of probes: how they are run, and what is measured in them."""

import contextlib
from collections.abc import Iterator
from typing import Any

from sglang.srt.distributed import get_tp_group

from sglang_lazy.attention.probes import (
    NUM_FIRST_LAYERS,
    AllReduce,
    ProbeSums,
    measure_deviation,
    measure_key_size,
    probed_layers,
)
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.state import as_linked, linked
from sglang_lazy.port.model import layer_range

_MEASURES = {"deviation": measure_deviation, "key size": measure_key_size}
"""What is measured behind a pass; attention is summed up layer by layer."""


@contextlib.contextmanager
def probing(batch: Any, current: LinkedBatch | None, runner: Any, model: ServedModel) -> Iterator[ProbeSums | None]:
    """Around the forward pass of a batch: measure what the probes in it are for. Gives what attention sums up."""
    probes = [req for req in batch.reqs if (state := linked(req)) is not None and state.probe is not None]
    if not probes:
        yield None
        return
    sums = ProbeSums.of(current, probed_layers(model.layers), runner.device)
    cut = any(as_linked(req).recomputes for req in probes)
    with layer_range.first(runner.model, NUM_FIRST_LAYERS) if cut else contextlib.nullcontext():
        yield sums
    reduce = _all_reduce(runner)
    if sums is not None:
        sums.deliver(batch.reqs, reduce)
    for req in probes:
        measure = _MEASURES.get(as_linked(req).policy.probes or "")
        if measure is not None and req is not batch.chunked_req:
            measure(req, model, batch.tree_cache.rows, reduce)


def _all_reduce(runner: Any) -> AllReduce:
    return get_tp_group().all_reduce if runner.ps.tp_size > 1 else lambda tensor: tensor
