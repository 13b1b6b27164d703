"""What a scheduler tells of chunks: reused tokens in answers, and metrics."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from sglang_lazy.chunks.metrics import ChunkMetrics
from sglang_lazy.core.state import LinkedRequest, linked, unused_hits
from sglang_lazy.port.hooks import on

_METRICS = "_sglang_lazy_chunk_metrics"


def report_reuse(accumulator: Any, *, get_cached_tokens_details: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Before `_GenerationStreamAccumulator.__init__`, once a step: add chunks to the details that it asks for.

    A hook on the method that it asks would cost plain traffic most of all: it is called for every token.
    """

    def details(req: Req) -> dict | None:
        state = linked(req)
        if state is None and not unused_hits(req):
            return get_cached_tokens_details(req)
        if state is None:
            return {
                **(get_cached_tokens_details(req) or {"device": 0, "host": 0}),
                "chunk": 0,
                **hits_by_chunk(req, None),
            }
        reported = cached_tokens_details(req, state)
        if "storage" in reported:  # as SGLang reports it
            reported["storage_backend"] = get_cached_tokens_details.__self__.tree_cache.tiers.storage.name
        return reported

    return (accumulator,), {**kwargs, "get_cached_tokens_details": details}


def cached_tokens_details(req: Req, state: LinkedRequest) -> dict[str, Any]:
    """A linked request's reused tokens by source, as results report them."""
    host, storage = state.num_loaded_tokens(fetched=False), state.num_loaded_tokens(fetched=True)
    return {
        "device": req.cached_tokens - host - storage,
        "host": host,
        **({"storage": storage} if storage else {}),
        "chunk": state.num_reused_tokens,
        **hits_by_chunk(req, state),
        **({"prompt": len(state.prompt.chunks[0].prompt_ids)} if state.prompt.cross else {}),
    }


def hits_by_chunk(req: Any, state: LinkedRequest | None) -> dict[str, str]:
    """Which chunks of a prompt were cached, a bit mask; once it has been answered, also those that it reuses in part.

    Strings: with many chunks the mask exceeds the integers of a message.
    """
    mask, unused = state.hit_mask if state is not None else 0, unused_hits(req)
    hits = {"chunk_hits": f"{mask | unused:x}"}
    if req.finished():
        none = [(i, 0) for i in range(unused.bit_length()) if unused >> i & 1]
        hits["chunk_parts"] = ",".join(f"{i}:{n}" for i, n in (state.partly_reused if state is not None else []) + none)
    return hits


def attach_metrics(scheduler: Any) -> None:
    """Publish the chunk metrics of a scheduler whose cache has chunks, if its metrics are enabled."""
    if scheduler.metrics_reporter.current_scheduler_metrics_enabled:
        collector = scheduler.metrics_collector
        setattr(collector, _METRICS, ChunkMetrics(scheduler.tree_cache.store, collector.labels))


def publish(collector: Any) -> None:
    metrics = getattr(collector, _METRICS, None)
    if metrics is not None:
        metrics.publish()


def log_stats(_result: Any, collector: Any, _stats: Any) -> None:
    """After `SchedulerMetricsCollector.log_stats`."""
    publish(collector)


HOOKS = (
    on("sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator").required(
        "__init__", report_reuse, "BEFORE", "scheduler", "answers report reused chunks"
    ),
    on("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector").feature(
        "log_stats", log_stats, "AFTER", "metrics of chunks"
    ),
)
