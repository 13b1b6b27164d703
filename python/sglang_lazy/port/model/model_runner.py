"""Hooks on SGLang's model runner, which give forward passes their linked rows; and the backend factory."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_lazy.attention import cost
from sglang_lazy.attention.kernels import choose_kernels
from sglang_lazy.attention.metadata import axes_of_rows
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable, measuring, table_of
from sglang_lazy.attention.unrotated import UnrotatedBatch
from sglang_lazy.comb.cross import CrossBatch
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.device import to_device
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.policy import ServerTraits, refusal
from sglang_lazy.core.state import by_policy, lazy_state, linked
from sglang_lazy.core.supported import TESTED, Unfit
from sglang_lazy.policies import policy_elsewhere
from sglang_lazy.port.comb.pool import ChunkPool, chunk_pool_of, num_cross_layers, with_cross_attention
from sglang_lazy.port.facts import flags_of, pass_of, tp_size
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.model.attention import KeysStored, with_link_path
from sglang_lazy.port.model.compat import architecture, known_traits, unfit_draft, unfit_flags, unfit_model
from sglang_lazy.port.model.latents import LatentAttention
from sglang_lazy.port.model.layers import attention_layers, check_layers, describe_layers, window_of
from sglang_lazy.port.model.recurrent import RecurrentLayers, has_latents, state_layout, unfit_states

logger = logging.getLogger(__name__)
HOOKS = Hooks()


@HOOKS.on("sglang.srt.configs.model_config.ModelConfig").feature(
    "from_server_args", "AFTER", "window layers keep the KV of all tokens where one pool serves all layers"
)
def keep_all_tokens(config: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """If chunks may be reused, let window layers keep the KV of all tokens with the host tier, which copies one pool,
    and if all layers have windows. One pool needs heads of one shape."""
    may_fit = LazyConfig.current().untested_model or TESTED.intersection(config.hf_config.architectures or ())
    if not config.is_hybrid_swa or not may_fit:
        return
    shapes = (config.head_dim, config.get_num_kv_heads(1)), (config.swa_head_dim, config.get_swa_num_kv_heads(1))
    needs_one_pool = flags_of(server_args).enable_hierarchical_cache or not config.full_attention_layer_ids
    if needs_one_pool and shapes[0] == shapes[1]:
        logger.info("sglang-lazy: layers with windows keep the KV of all tokens (--disable-hybrid-swa-memory)")
        config.disable_hybrid_swa_memory = True
        config._derive_hybrid_model()


def wrap_backend(factory: Callable) -> Callable:
    """An attention backend factory like `factory`, whose backends have the link path if chunks can be reused. Models
    that draft keep SGLang's own."""

    def create(runner: Any) -> Any:
        backend = factory(runner)
        if runner.is_draft_worker:
            return backend
        config = LazyConfig.current()
        pool = runner.req_to_token_pool
        try:
            if table_of(pool) is None:
                pool.segment_table = new_table(runner, config, backend)
        except Unfit as error:
            if not config.fallback:
                raise
            logger.warning("Serving without chunk reuse: %s", "; ".join(error.reasons))
            return backend
        if has_latents(runner.model_config):
            return with_link_path(backend, runner, pool.segment_table, path=LatentAttention)
        attach = with_link_path if chunk_pool_of(runner) is None else with_cross_attention
        return attach(backend, runner, pool.segment_table)

    return create


def new_table(runner: Any, config: LazyConfig, backend: Any) -> SegmentTable:
    """The segment table of a `ModelRunner` whose model is loaded. Raises Unfit if chunks cannot be reused here.

    backend: SGLang's own attention.
    """
    args, model_config = runner.server_args, runner.model_config
    reasons = unfit_flags(args) + unfit_states(args, model_config) + unfit_draft(args, model_config)
    if reasons := reasons + unfit_model(runner, untested=config.untested_model):
        raise Unfit(reasons)
    default = policy_elsewhere(config.default_link)
    if reason := refusal(default, server_traits(runner)):
        raise Unfit([f"--lazy-default-link {config.default_link}: {reason}"])
    num_rows = len(runner.req_to_token_pool.req_to_token)
    kinds = torch.device(runner.device), runner.dtype, runner.kv_cache_dtype
    if num_cross_layers(runner.model_config):
        runner.req_to_token_pool.chunk_pool = pool = ChunkPool(runner, config.chunk_pool)
        layers = choose_kernels(config, pool.layers, *kinds)
        cross_layers = ServedModel({layer_id: pool.kv.get_kv_buffer(layer_id) for layer_id in layers}, layers)
        return SegmentTable(num_rows, config.max_chunks, runner.device, cross_layers, CrossBatch)
    latents = has_latents(runner.model_config)
    try:
        layers = describe_layers(runner.model, runner.model_config.context_len, runner.device)
        if not latents:  # which rotate nothing
            layers = check_layers(runner.model, layers, runner.model_config.hidden_size, runner.dtype)
    except ValueError as error:
        raise Unfit([str(error)]) from error
    if architecture(runner.model_config) not in TESTED:
        logger.warning(
            "%s passed the start-up check, but no test of sglang-lazy has served it: compare its answers with those "
            "under link full (python -m sglang_lazy.verify)",
            architecture(runner.model_config),
        )
    if not latents:  # which SGLang's own attention reads
        layers = choose_kernels(config, layers, *kinds)
    kv_buffers = {layer_id: runner.token_to_kv_pool.get_kv_buffer(layer_id) for layer_id in layers}
    hybrid = isinstance(runner.token_to_kv_pool, SWAKVPool)
    window_slots = runner.token_to_kv_pool.full_to_swa_index_mapping if hybrid else None
    model = ServedModel(kv_buffers, layers, window_slots)
    default.warm_up(model)
    attends = stock_attends(backend, layers, hybrid)
    batch_type = UnrotatedBatch if latents else LinkedBatch
    table = SegmentTable(num_rows, config.max_chunks, runner.device, model, batch_type, attends)
    if (layout := state_layout(runner.model_config)) is not None:
        table.recurrent = RecurrentLayers(runner, layout)
    return table


def stock_attends(backend: Any, layers: Mapping[int, AttentionLayer], hybrid: bool) -> bool:
    """Whether SGLang's own attention is correct for these layers.

    Its CPU backend ignores sinks and logit caps, and with two pools it reads slots of one in the other.
    """
    takes_sinks = "sinks" in inspect.signature(backend.forward_extend).parameters
    for_cpus = isinstance(backend, TorchNativeAttnBackend)
    capped = any(layer.logit_cap is not None for layer in layers.values())
    if for_cpus and (capped or hybrid):
        return False
    return takes_sinks or not any(layer.sinks for layer in layers.values())


def server_traits(runner: Any) -> ServerTraits:
    """The properties of a `ModelRunner`'s server that policies and admission depend on."""
    layout = state_layout(runner.model_config)
    return known_traits(runner.model_config)._replace(
        fp8_cache=runner.kv_cache_dtype != runner.dtype,
        # In a batch that mixes prefill and decode, the pass would end for both; drafts need what the whole pass gives.
        partial_pass=runner.model_config.num_hidden_layers > 1
        and not flags_of(runner.server_args).enable_mixed_chunk
        and runner.spec_algorithm.is_none(),
        whole_layers=any(window_of(attn) is None for attn, _ in attention_layers(runner.model)),
        window_pool=isinstance(runner.token_to_kv_pool, SWAKVPool),
        masks_images=hasattr(runner.model, "prepare_attn_masks"),
        min_chunk=0 if layout is None else layout.min_chunk,
    )


@HOOKS.on("sglang.srt.managers.tp_worker.TpModelWorker").required(
    "forward_batch_generation", "AROUND", "scheduler", "forward passes know the linked rows of their batch"
)
def forward_batch_generation(original: Callable, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Make a batch's linked rows known to its whole forward pass."""
    table = table_of(worker.model_runner.req_to_token_pool)
    if table is None or batch is None or batch.forward_mode.is_target_verify():  # in a step of `decode_with_drafts`
        return original(worker, batch, *args, **kwargs)
    with linking(batch, worker.model_runner, table):
        return original(worker, batch, *args, **kwargs)


@HOOKS.on(
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2",
    "sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2",
).feature("forward_batch_generation", "AROUND", "so do those that draft and verify")
def decode_with_drafts(original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for a step of decode that drafts and verifies. In prefill these workers call the target's."""
    runner = worker.target_worker.model_runner
    table = table_of(runner.req_to_token_pool)
    if table is None or not batch.forward_mode.is_decode():
        return original(worker, batch, *args, **kwargs)
    with linking(batch, runner, table):
        return original(worker, batch, *args, **kwargs)


@contextlib.contextmanager
def linking(batch: Any, runner: Any, table: SegmentTable) -> Iterator[None]:
    """A context for a batch's forward pass: make its linked rows the table's current batch, and launch before it what
    policies and chunks need."""
    involved = involves_chunks(batch, table)
    if batch.reqs:
        mode = "decode" if batch.forward_mode.is_decode() else "prefill"
        batch.tree_cache.store.counts.batches[mode, involved] += 1
    if not involved and table.stock_attends:
        yield
        return
    if table.loads is not None and any(
        state.needs_resident for req in batch.reqs if (state := linked(req)) is not None
    ):
        table.loads.wait_all()  # attention waits for its own layer, but these read KV before it does
    for policy, reqs in by_policy(batch.reqs).items():
        policy.before_forward(reqs, table.model, batch.tree_cache.rows)
    batch.tree_cache.admission.producer.before_forward()
    separate = batch.forward_mode.is_extend() and cost.second_kernel_pays(layer_time(runner, batch.extend_num_tokens))
    max_rows = runner.req_to_token_pool.size if table.stock_attends else 0
    current = table.batch_type.of(pass_of(batch), separate, max_rows, windows=bool(table.model.windows))
    all_reduce = get_tp_group().all_reduce if tp_size() > 1 else lambda tensor: tensor
    states = contextlib.nullcontext() if table.recurrent is None else table.recurrent.running(batch)
    with states, measuring(table, current, batch.reqs, batch.chunked_req, batch.tree_cache.rows, all_reduce):
        yield


@HOOKS.on("sglang.srt.model_executor.runner.eager_runner.EagerRunner").feature(
    "execute", "AROUND", "passes of probes that end at the keys of a layer"
)
def end_at_keys(original: Callable, eager_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Return no logits from a pass that ends at keys."""
    try:
        return original(eager_runner, *args, **kwargs)
    except KeysStored:
        return LogitsProcessorOutput(next_token_logits=None)


def involves_chunks(batch: Any, table: SegmentTable) -> bool:
    """Whether a batch has linked requests or fills. Returns early for plain decode, which runs for every token."""
    if batch.forward_mode.is_decode() and not table.linked_rows:
        return False
    return any(lazy_state(req) is not None for req in batch.reqs)


@HOOKS.on("sglang.srt.model_executor.forward_batch_info.ForwardBatch").required(
    "init_new", "AFTER", "scheduler", "tokens of linked rows have their own positions"
)
def init_new(forward_batch: Any, _cls: Any, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Set positions explicitly, since rows are permuted."""
    table = table_of(runner.req_to_token_pool)
    if table is not None and table.current is not None and table.current.rows:
        positions = to_device(table.current.q_positions, forward_batch.positions.device)
        forward_batch.positions = positions.to(forward_batch.positions.dtype)
        if forward_batch.mrope_positions is not None:
            given = [
                (None, 0) if inputs is None else (inputs.mrope_positions, inputs.mrope_position_delta.item())
                for inputs in batch.multimodal_inputs
            ]
            places = axes_of_rows(table.current.rows, given)
            forward_batch.mrope_positions = to_device(places.numpy(), positions.device)


@HOOKS.on("sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner").feature(
    "can_run_graph", "AROUND", "batches that prefill graphs do not fit run without"
)
def can_run_prefill_graph(original: Callable, graph_runner: Any, forward_batch: Any) -> bool:
    """Do not pad a large batch with chunks to the size of a graph."""
    runs = original(graph_runner, forward_batch)
    runner, num_tokens = graph_runner.model_runner, len(forward_batch.input_ids)
    table = table_of(runner.req_to_token_pool)
    if not runs or table is None or not table.has_chunks:
        return runs
    # Graphs run all layers, and no others; recurrent layers within them would not see the pieces of a batch.
    if table.last_layer is not None or isinstance(table.current, CrossBatch):
        return False
    breakable = graph_runner.prefill_backend_name == Backend.BREAKABLE
    if table.recurrent is not None and not (breakable and table.recurrent.breaks_graphs):
        return False
    if num_tokens in graph_runner.capture_num_tokens:
        return True
    padded = min(size for size in graph_runner.capture_num_tokens if size > num_tokens)
    return cost.padding_pays(layer_time(runner, num_tokens), layer_time(runner, padded))


def layer_time(runner: Any, num_tokens: int) -> float:
    """A lower bound of the device time for one layer of this model, in milliseconds; see `cost.layer_time`."""
    on_gpu = torch.device(runner.device).type == "cuda"
    return cost.layer_time(num_tokens, runner.model_config.hidden_size, tp_size(), on_gpu)
