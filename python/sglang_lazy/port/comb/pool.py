"""The KV pool of encoded chunks, its size, and the attention that reads it; and LoRA adapters, which change the decoder
alone.

As with the link path, an attention backend keeps its name and gets a subclass of its class.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_lazy.attention.table import SegmentTable, table_of
from sglang_lazy.comb.config import ARCHITECTURE, CROSS, ENCODER
from sglang_lazy.comb.cross import CrossReader
from sglang_lazy.comb.producer import Encoder
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.model import NO_ROTATION, AttentionLayer, LayerRope
from sglang_lazy.port.facts import tp_size
from sglang_lazy.port.graphs import batch_of_graph
from sglang_lazy.port.hooks import Hooks

logger = logging.getLogger(__name__)

HOOKS = Hooks()


def num_cross_layers(model_config: Any) -> int:
    """The number of cross layers of a Comb model; 0 for other models."""
    config = model_config.hf_config
    return len(config.cross_attention_layers) if ARCHITECTURE in (config.architectures or ()) else 0


class ChunkPool:
    """The KV pool of chunks, which has its own slots and only the cross layers.

    kv: a pool of SGLang's, whose layers are the cross layers.  allocator: of its slots.
    layers: the cross layers as attention sees them, without rotation.
    """

    def __init__(self, runner: Any, share: float):
        """share: of the memory for KV; the decoder's pool has the rest."""
        config, num_layers = runner.model_config, num_cross_layers(runner.model_config)
        per_slot = config.num_hidden_layers / num_layers  # slots of this pool in the memory of one decoder slot
        size = int(runner.token_to_kv_pool.size * per_slot * share / (1 - share))
        self.kv = MHATokenToKVPool(
            size,
            1,
            runner.kv_cache_dtype,
            config.get_num_kv_heads(tp_size()),
            config.head_dim,
            num_layers,
            runner.device,
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        self.allocator = TokenToKVPoolAllocator(size, runner.kv_cache_dtype, runner.device, self.kv, need_sort=False)
        heads = config.get_num_attention_heads(tp_size()), config.get_num_kv_heads(tp_size())
        rope = LayerRope(torch.zeros(NO_ROTATION), 1, True, runner.device)
        self.layers = dict.fromkeys(range(num_layers), AttentionLayer(*heads, config.head_dim, rope))
        logger.info("sglang-lazy: a pool of %d tokens for chunks, %d for text", size, runner.token_to_kv_pool.size)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.kv.set_kv_buffer(None, KVWriteLoc(slots), keys, values, layer_id_override=layer)


def chunk_pool_of(runner: Any) -> ChunkPool | None:
    """The pool of chunks of a `ModelRunner`; None if chunks share the runner's own pool."""
    return getattr(runner.req_to_token_pool, "chunk_pool", None)


def new_encoder(runner: Any, max_tokens: int) -> Encoder | None:
    """What computes missing chunks; None if the model has no encoder.

    max_tokens: of one pass, unless a single chunk is longer.
    """
    pool, table = chunk_pool_of(runner), table_of(runner.req_to_token_pool)
    if pool is None or table is None:
        return None
    causal = getattr(runner.model_config.hf_config, "chunk_is_causal", False)
    return Encoder(runner.model.encode, pool.write, table.model.layers[0], causal, max_tokens)


class CrossAttention(AttentionBackend):
    """Mixed into a stock backend's class by `with_cross_attention`: it also prepares cross-attention for each batch.

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
        decoder.reader = CrossReader(table, runner.dtype, runner.req_to_token_pool.chunk_pool.kv.get_kv_buffer)
    backend.__class__ = type(f"Cross{stock.__name__}", (CrossAttention, stock), {})
    backend.cross_reader, backend.cross_max_context = decoder.reader, runner.req_to_token_pool.req_to_token.shape[1]
    return backend


@HOOKS.on("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator").feature(
    "_apply_token_constraints", "AROUND", "the pool of encoded chunks gets its share of the memory"
)
def leave_room(original: Callable, configurator: Any, token_capacity: int) -> int:
    """Take the chunks' share from the decoder's pool, whose size SGLang has measured or was given."""
    num_tokens = original(configurator, token_capacity)
    if not num_cross_layers(configurator.model_config):
        return num_tokens
    return int(num_tokens * (1 - LazyConfig.current().chunk_pool))


@HOOKS.on("sglang.srt.arg_groups.overrides").feature(
    "post_capture_kv_sizing_planned",
    "AROUND",
    "the pools of Comb models, and of models with recurrent layers, keep their size",
)
def plans_to_resize(original: Callable, args: Any) -> bool:
    """The pools are sized once, before graphs are captured."""
    config = model_config_of(args)
    return original(args) and not (num_cross_layers(config) or mambaish_config(config))


@HOOKS.on("sglang.srt.model_executor.model_runner.ModelRunner").feature("initialize", "BEFORE", "Comb models")
def register_model(_runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """Register our models with SGLang, like those of an external package."""
    from sglang.srt.models.registry import ModelRegistry

    from sglang_lazy.port.comb.llama import EntryClass

    ModelRegistry.models[ARCHITECTURE] = EntryClass


@HOOKS.on("sglang.srt.lora.lora_manager.LoRAManager").feature(
    "init_lora_modules", "AFTER", "LoRA adapters of Comb models change the decoder alone"
)
def keep_to_the_decoder(_result: Any, manager: Any) -> None:
    """After `LoRAManager.init_lora_modules`, which selects modules by the end of their names: restore those of the
    encoder and the cross layers."""
    from sglang.srt.utils import replace_submodule

    for modules in manager.lora_modules:
        for name in [name for name in modules if name.startswith((CROSS, ENCODER))]:
            replace_submodule(manager.base_model, name, modules.pop(name).base_layer)


@HOOKS.on("sglang.srt.lora.lora.LoRAAdapter").feature(
    "_process_weight", "BEFORE", "LoRA adapters that do not fit a Comb model are refused"
)
def check_weight(adapter: Any, name: str, *_args: Any) -> None:
    """Before `LoRAAdapter._process_weight`, which selects layers by their number: raise ValueError for a weight of the
    encoder or a cross layer."""
    is_comb = ARCHITECTURE in (adapter.base_hf_config.architectures or ())
    if is_comb and any(part in name for part in (".cross_layers.", ENCODER)):
        raise ValueError(f"adapters of a Comb model may change only its decoder; this one has {name!r}")
