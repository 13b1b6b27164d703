"""What a scheduler does beside its steps: it tells of reused tokens and of chunks, and while nothing runs collects
garbage and checks that nothing is locked.

Python's garbage collector must not pause the scheduler, and a full collection visits every object. Those of SGLang's
modules and of cached chunks are many and long-lived: with 50,000 chunks, a collection would stop the scheduler for a
second. So they are frozen, which exempts them from collection; reference counting still frees them.
"""

import gc
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from sglang_lazy.chunks.metrics import ChunkMetrics
from sglang_lazy.core.state import LinkedRequest, linked, unused_hits
from sglang_lazy.port.facts import admission_of
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.scheduler.reuse import reused_tokens, with_unused_hits

COLLECTIONS = 2
"""Freeze after so many collections of the middle generation, each after some thousands of new objects."""
_METRICS = "_sglang_lazy_chunk_metrics"
HOOKS = Hooks()
_SCHEDULER = HOOKS.on("sglang.srt.managers.scheduler.Scheduler")


@HOOKS.on("sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator").required(
    "__init__", "BEFORE", "scheduler", "answers report reused chunks"
)
def report_reuse(accumulator: Any, *, get_cached_tokens_details: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Before `_GenerationStreamAccumulator.__init__`, once a step: add chunks to the details that it asks for.

    A hook on the method that it asks would cost plain traffic most of all: it is called for every token.
    """

    def details(req: Req) -> dict | None:
        state, unused = linked(req), unused_hits(req)
        if state is None:
            return with_unused_hits(get_cached_tokens_details(req), unused, req.finished())
        reported = cached_tokens_details(req, state)
        if "storage" in reported:  # as SGLang reports it
            reported["storage_backend"] = get_cached_tokens_details.__self__.tree_cache.tiers.storage.name
        return reported

    return (accumulator,), {**kwargs, "get_cached_tokens_details": details}


def cached_tokens_details(req: Req, state: LinkedRequest) -> dict[str, Any]:
    """What results report of a linked request."""
    return reused_tokens(state, req.cached_tokens, unused_hits(req), req.finished())


def attach_metrics(scheduler: Any) -> None:
    """Publish the chunk metrics of a scheduler whose cache has chunks, if its metrics are enabled."""
    if scheduler.metrics_reporter.current_scheduler_metrics_enabled:
        collector = scheduler.metrics_collector
        setattr(collector, _METRICS, ChunkMetrics(scheduler.tree_cache.store, collector.labels))


@HOOKS.on("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector").feature(
    "log_stats", "AFTER", "metrics of chunks"
)
def publish(_result: Any, collector: Any, _stats: Any = None) -> None:
    metrics = getattr(collector, _METRICS, None)
    if metrics is not None:
        metrics.publish()


def freeze() -> None:
    """Collect, and freeze what is left, which will stay."""
    gc.collect()
    gc.freeze()


@_SCHEDULER.required("on_idle", "AROUND", "scheduler", "an idle scheduler checks its locks")
def on_idle(original: Callable, scheduler: Any) -> None:
    """Around `Scheduler.on_idle`, which may sleep until a request comes, and logs statistics every 30 seconds."""
    publish(None, scheduler.metrics_collector)
    collect(scheduler)
    original(scheduler)
    check(scheduler)


def collect(scheduler: Any) -> None:
    """Freeze where nothing runs or waits."""
    if gc.get_count()[2] >= COLLECTIONS and scheduler.is_fully_idle() and admission_of(scheduler) is not None:
        freeze()


def check(scheduler: Any) -> None:
    """Nothing is locked when nothing runs."""
    admission = admission_of(scheduler)
    if admission is not None and scheduler.is_fully_idle():
        admission.check_idle()


@_SCHEDULER.required("is_fully_idle", "AROUND", "scheduler", "a scheduler that copies chunks is not idle")
def is_fully_idle(
    original: Callable, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    """Not while the tree of chunks copies, since SGLang asks only the tree of text.

    And a paused scheduler is idle if nothing has a row, whoever asks: in SGLang a flush that may wait, unlike one that
    may not, would wait for its queue.
    """
    if for_health_check:
        return original(scheduler, for_health_check, ignore_waiting)
    idle = original(scheduler, for_health_check, ignore_waiting or scheduler._engine_paused)
    return idle and (admission_of(scheduler) is None or not scheduler.tree_cache.is_copying)
