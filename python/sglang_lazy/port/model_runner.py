"""Hooks on SGLang's model runner: where a forward pass learns of its linked rows. Registered in `plugin.HOOKS`."""

import logging
import math

import torch

from sgl_kernel_lazy import get_implementation
from sglang_lazy.attention.table import LinkedBatch, SegmentTable, table_of, to_device
from sglang_lazy.core.config import LazyConfig, LinkMethod
from sglang_lazy.policies.copy import ChunkCopier, copier_of, write_copies
from sglang_lazy.port.attention import kv_scales, with_link_path
from sglang_lazy.port.compat import Unfit, unfit_flags, unfit_model
from sglang_lazy.port.rope import attention_layers
from sglang_lazy.scheduler.admission import is_fill, is_linked

logger = logging.getLogger(__name__)

LINK_VARIANT = "link"
"""Names the decode graphs of batches with linked rows, beside the stock ones of the same size."""

FASTEST_GPU = 8e11
"""Operations in a millisecond."""
LAUNCH_TIME = 0.5
"""Milliseconds that a host takes to launch a layer; at times one takes nearly twice as long."""


def wrap_backend(factory):
    """An attention backend factory like `factory`, whose backends have the link path wherever it fits."""

    def create(runner):
        backend = factory(runner)
        config = LazyConfig.from_env()
        reasons = unfit_flags(runner.server_args) + unfit_model(runner)
        if not reasons:
            link_backend = best_link_backend(runner) if config.link_backend == "auto" else config.link_backend
            reasons = unfit_way(config.link, link_backend, runner)
        if reasons:
            if not config.fallback:
                raise Unfit(reasons)
            logger.warning("Serving without chunk reuse: %s", "; ".join(reasons))
            return backend
        pool = runner.req_to_token_pool
        if table_of(pool) is None:
            pool.segment_table = SegmentTable(len(pool.req_to_token), config.max_chunks, runner.device)
        backend = with_link_path(backend, runner, link_backend)
        if config.link == "materialize" and copier_of(pool) is None:
            pool.chunk_copier = ChunkCopier(runner.token_to_kv_pool, backend.link_ops, backend.link_ropes)
        return backend

    return create


def best_link_backend(runner) -> str:
    """The fastest implementation that can serve this model on this machine."""
    if torch.device(runner.device).type != "cuda":
        return "torch"
    if reason := unfit_kernels("cuda", runner):
        logger.info("Chunks are linked by the triton kernels instead of the CUDA ones: %s", reason)
        return "triton"
    return "cuda"


def unfit_way(link: LinkMethod, link_backend: str, runner) -> list[str]:
    """Why chunks cannot be linked this way on this machine; the model fits otherwise."""
    reasons = []
    if reason := unfit_kernels(link_backend, runner):
        reasons.append(f"--lazy-link-backend {link_backend}: {reason}")
    if runner.kv_cache_dtype == runner.dtype:
        return reasons
    if link == "materialize":
        reasons.append("--lazy-link materialize: keys of an fp8 cache would be rounded again when they are turned")
    scaled = any(kv_scales(attn) != (1.0, 1.0) for attn, _ in attention_layers(runner.model))
    if scaled and "torch_native" in runner.server_args.get_attention_backends():
        reasons.append("the model's scales of fp8 keys and values: attention backend torch_native does not apply them")
    return reasons


def unfit_kernels(name: str, runner) -> str | None:
    attn, rope = next(attention_layers(runner.model))
    dims = (attn.tp_q_head_num, attn.tp_k_head_num, attn.qk_head_dim, rope.rotary_dim)
    ops = get_implementation(name)
    return ops.unsupported(torch.device(runner.device), runner.dtype, runner.kv_cache_dtype, *dims)


def forward_batch_generation(original, worker, batch=None, *args, **kwargs):
    """Around `TpModelWorker.forward_batch_generation`: the whole forward pass of a batch knows its linked rows."""
    runner = worker.model_runner
    table = table_of(runner.req_to_token_pool)
    if table is None or batch is None or not involves_chunks(batch, table):
        return original(worker, batch, *args, **kwargs)
    write_copies(batch)
    # A second attention kernel for each layer costs a fifth more launches; what it saves grows with the batch.
    apart = batch.forward_mode.is_extend() and layer_time(runner, batch.extend_num_tokens) > 3 * LAUNCH_TIME
    with table.running(LinkedBatch.of(batch, apart, runner.req_to_token_pool.size)):
        return original(worker, batch, *args, **kwargs)


def involves_chunks(batch, table: SegmentTable) -> bool:
    """Whether a batch has linked requests or fills; of plain decode, asked with each token, it is told at once."""
    if batch.forward_mode.is_decode() and not table.linked_rows:
        return False
    return any(is_linked(req) or is_fill(req) for req in batch.reqs)


def init_new(forward_batch, _cls, _batch, runner, *args, **kwargs) -> None:
    """After `ForwardBatch.init_new`: rows are permuted, so positions are set explicitly."""
    table = table_of(runner.req_to_token_pool)
    if table is not None and table.current is not None and table.current.rows:
        positions = to_device(table.current.q_positions, forward_batch.positions.device)
        forward_batch.positions = positions.to(forward_batch.positions.dtype)


def capture_one_shape(original, graph_runner, size, forward, stream_idx=None, variant_label=None):
    """Around `DecodeCudaGraphRunner.capture_one_shape`: capture each shape a second time, for linked rows.

    Rows whose chunks are copies decode like any other.
    """
    original(graph_runner, size, forward, stream_idx, variant_label)
    table = table_of(graph_runner.model_runner.req_to_token_pool)
    if table is not None and LazyConfig.from_env().link == "attention":
        with table.running(LinkedBatch()):
            original(graph_runner, size, forward, stream_idx, LINK_VARIANT)


def resolve_variant(original, graph_runner, forward_batch):
    """Around `DecodeCudaGraphRunner._resolve_lora_variant`: linked batches replay their own graphs."""
    table = table_of(graph_runner.model_runner.req_to_token_pool)
    if table is not None and table.current is not None:
        return LINK_VARIANT
    return original(graph_runner, forward_batch)


def can_run_prefill_graph(original, graph_runner, forward_batch):
    """Around `PrefillCudaGraphRunner.can_run_graph`: a large batch with chunks is not padded to fit a graph.

    Graphs are up to 512 tokens apart. Where the host is faster than the device anyway, they save nothing.
    """
    runs = original(graph_runner, forward_batch)
    runner, num_tokens = graph_runner.model_runner, len(forward_batch.input_ids)
    table = table_of(runner.req_to_token_pool)
    if not runs or table is None or not table.has_chunks or num_tokens in graph_runner.capture_num_tokens:
        return runs
    return layer_time(runner, num_tokens) < 2 * LAUNCH_TIME


def layer_time(runner, num_tokens: int) -> float:
    """Milliseconds that a layer takes the device at least, by the operations of a dense one of its width.

    Without limit on a CPU, where nothing is launched.
    """
    if torch.device(runner.device).type != "cuda":
        return math.inf
    weights = 12 * runner.model_config.hidden_size**2 / runner.ps.tp_size
    return 2 * weights * num_tokens / FASTEST_GPU
