"""Models with recurrent layers: their pool of states, its share of the memory, and the layers' own backends."""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.falcon_h1 import FalconH1Config
from sglang.srt.configs.granitemoehybrid import GraniteMoeHybridConfig
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mamba2_config, mambaish_config
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.lfm2 import Lfm2Config
from sglang.srt.configs.lfm2_moe import Lfm2MoeConfig
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend, Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend, ShortConvMetadata
from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry
from sglang.srt.runtime_context import get_parallel

from sglang_lazy.attention.table import SegmentTable, table_of
from sglang_lazy.cache.states import States
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.device import read_here
from sglang_lazy.core.state import as_linked, lazy_state, linked
from sglang_lazy.port.facts import flags_of, pass_of
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.model.linked_states import LinkDeltaRule, LinkKDA, LinkMamba2
from sglang_lazy.recurrent.beginnings import begin_rows
from sglang_lazy.recurrent.passes import LinkStates
from sglang_lazy.recurrent.pieces import Pieces
from sglang_lazy.recurrent.pool import StateLayout, StateMemory, StatePool, Transition, usual_share
from sglang_lazy.recurrent.rows import RowStates, rows_of

logger = logging.getLogger(__name__)

CONVOLUTIONS = (Lfm2Config, Lfm2MoeConfig)
MAMBA2 = (FalconH1Config, GraniteMoeHybridConfig, NemotronHConfig)
"""SGLang's configurations of models whose recurrent layers are short convolutions only, or Mamba-2."""

UNADAPTABLE = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Classes that leave it to SGLang to guess the sizes of adapters, which has their scheduler fail when it loads one."""
HOOKS = Hooks()


class Recurrence(NamedTuple):
    """What a model's configuration says of its recurrent layers.

    config: SGLang's, of models with such layers.
    keeps_states: whether chunks keep the layers' states.  transition: see `StateLayout`.
    breaks_graphs: whether SGLang's prefill graphs leave these layers out, so that they run between parts of a graph, on
        a batch's own tokens. Layers in graphs know only the batch of the capture.
    inputs_last: whether SGLang keeps a convolution's last inputs as [width, dim].
    """

    config: Any
    keeps_states: bool
    transition: Transition | None = None
    breaks_graphs: bool = False
    inputs_last: bool = False

    @classmethod
    def of(cls, config: Any) -> "Recurrence | None":
        """Of SGLang's `ModelConfig`; None for a model without recurrent layers."""
        if (recurrent := mambaish_config(config)) is None:
            return None
        if hybrid_gdn_config(config) is not None:
            return cls(recurrent, True, "matrix", breaks_graphs=True)
        if isinstance(recurrent, KimiLinearConfig):
            return cls(recurrent, True, "matrix", inputs_last=True)
        mamba2 = mamba2_config(config)
        return cls(
            recurrent,
            isinstance(mamba2, (*CONVOLUTIONS, *MAMBA2)),
            "number" if isinstance(mamba2, MAMBA2) else None,
            isinstance(mamba2, NemotronHConfig),
        )

    @property
    def num_attention_layers(self) -> int:
        """How many layers have attention."""
        return len(self.config.full_attention_layer_ids)

    @property
    def layout(self) -> StateLayout:
        """Of the states on this rank, once ranks are known; of a model whose chunks keep them."""
        params = self.config.mamba2_cache_params
        shapes = tuple(tuple(shape[::-1] if self.inputs_last else shape) for shape in params.shape.conv)
        convolutions = len(params.layers), shapes, params.dtype.conv
        if self.transition is None:
            return StateLayout(*convolutions)
        return StateLayout(*convolutions, tuple(params.shape.temporal), params.dtype.temporal, self.transition)


def state_layout(config: Any) -> StateLayout | None:
    """The states of a model's recurrent layers on this rank; None if it has none, or chunks keep none."""
    recurrence = Recurrence.of(config)
    return recurrence.layout if recurrence is not None and recurrence.keeps_states else None


def has_latents(config: Any) -> bool:
    """Whether a model's attention is over latents that are not rotated, which chunks serve: that of Kimi Linear."""
    recurrence = Recurrence.of(config)
    return recurrence is not None and isinstance(recurrence.config, KimiLinearConfig)


_memories = weakref.WeakKeyDictionary[Any, StateMemory]()
"""By SGLang's `ModelConfig`: what `leave_room` has set aside."""


def unfit_states(args: Any, config: Any) -> list[str]:
    """Reasons in the server's flags, if the model has recurrent layers.

    args: SGLang's `ServerArgs`.  config: its `ModelConfig`.
    """
    if Recurrence.of(config) is None:
        return []
    flags = flags_of(args)
    strategy = flags.mamba_radix_cache_strategy
    architecture = (config.hf_config.architectures or ["unknown"])[0]
    wanted = {
        f"--mamba-radix-cache-strategy {strategy}: it takes slots for states in decode, which is not tested": (
            strategy not in ("no_buffer", "extra_buffer")
        ),
        "--speculative-algorithm with recurrent layers: tested with gated delta rules and EAGLE, NEXTN or STANDALONE": (
            flags.speculative_algorithm not in (None, "EAGLE", "STANDALONE")
            or (flags.speculative_algorithm is not None and hybrid_gdn_config(config) is None)
        ),
        f"LoRA with {architecture}: SGLang's memory for adapters has no room for the gate in its queries' weights": (
            bool(flags.enable_lora or flags.lora_paths) and architecture in UNADAPTABLE
        ),
        f"LoRA with {architecture}: not tested": (bool(flags.enable_lora or flags.lora_paths) and has_latents(config)),
        "--enable-linear-replayssm: the state of a request is not in its slot": (
            flags.enable_linear_replayssm or flags.enable_linear_replayssm_spec
        ),
        "--enable-int8-mamba-checkpoint: cached states have slots of another kind": flags.enable_int8_mamba_checkpoint,
        "--enable-page-major-kv-layout: the states of a layer are not in one tensor": flags.enable_page_major_kv_layout,
    }
    return [reason for reason, applies in wanted.items() if applies]


def kv_bytes(configurator: Any) -> int:
    """Of a token on this rank.  configurator: SGLang's, of a model with recurrent layers."""
    config, recurrence = configurator.model_config, Recurrence.of(configurator.model_config)
    assert recurrence is not None
    if config.attention_arch == AttentionArch.MLA:  # all ranks have the same latents
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = config.get_num_kv_heads(get_parallel().attn_tp_size) * (config.head_dim + config.v_head_dim)
    return recurrence.num_attention_layers * width * configurator.kv_cache_dtype.itemsize


class RecurrentLayers:
    """The recurrent layers of a `ModelRunner`.

    pool: of what chunks do to states.  max_pieces: how many pieces a pass has memory for.
    breaks_graphs: see `Recurrence`.
    knows_ends: whether the state of a request that ends is known. With drafts and the overlap scheduler it has gone on
        over a run of which nobody hears.
    pieces: of the current pass; None if SGLang's own description will do.
    finish: what the backend has to do at the end of the pass.
    """

    def __init__(self, runner: Any, layout: StateLayout):
        num_states, self.max_pieces = _memories[runner.model_config]
        recurrence = Recurrence.of(runner.model_config)
        assert recurrence is not None, "it has a layout of states"
        self.breaks_graphs, self._inputs_last = recurrence.breaks_graphs, recurrence.inputs_last
        if has_latents(runner.model_config):  # SGLang's attention has a row for each piece
            self.max_pieces = min(self.max_pieces, runner.req_to_token_pool.size)
        self.pool = StatePool(layout, min(num_states, runner.token_to_kv_pool.size), runner.device)
        self._requests, self._streams = runner.req_to_token_pool, torch.get_device_module(runner.device)
        self._of_passes = self._streams.current_stream()
        flags = flags_of(runner.server_args)
        self.knows_ends = flags.speculative_algorithm is None or flags.disable_overlap_schedule
        self.pieces: Pieces | None = None
        self.finish: Callable[[], None] = lambda: None
        logger.info(
            "sglang-lazy: states of %d chunks, %.2f MB each, %.2f GB in all; %d pieces in a pass (--lazy-state-share)",
            self.pool.size,
            layout.slot_bytes / 1e6,
            self.pool.size * layout.slot_bytes / 1e9,
            self.max_pieces,
        )
        if not self.knows_ends:
            logger.info(
                "sglang-lazy: with drafts and the overlap scheduler, a second turn computes the text of earlier turns "
                "again; --disable-overlap-schedule avoids that"
            )

    @contextmanager
    def running(self, batch: Any) -> Iterator[None]:
        """A context for the forward pass of a `ScheduleBatch` that has linked requests or fills."""
        self._of_passes, current = self._streams.current_stream(), pass_of(batch)
        if current.prefix_lens is None:  # decode
            yield
            return
        states = batch.tree_cache.store.states
        slots = [
            RowStates() if linked(req) is None else self._slots(states, req, prefix_len)
            for req, prefix_len in zip(batch.reqs, current.prefix_lens, strict=True)
        ]
        width = self.pool.layout.min_chunk
        self.pieces = Pieces.of(rows_of(current, slots), width, torch.device(self.pool.conv[0].device))
        try:
            yield
            self.finish()
        finally:
            self.pieces, self.finish = None, lambda: None

    @staticmethod
    def _slots(states: States, req: Any, prefix_len: int) -> RowStates:
        """Of a linked request.  prefix_len: how much of its row has been computed before the pass."""
        nodes, row = req.last_node, as_linked(req).row
        text = [node for node, count in zip(nodes.spans, row.cached, strict=True) if count]
        first = nodes.spans[0] if nodes.spans and prefix_len == row.computed_start[0] and not text else None
        return RowStates(
            [*map(states.slot, nodes.chunks.nodes)],
            states.slot(text[-1]) if text else None,
            states.slot(first) if first is not None and states.has(first) else None,
        )

    def begin_rows(self, pieces: Pieces, link_states: LinkStates | None = None) -> None:
        """See `beginnings.begin_rows`. After it, SGLang's own description of the pass will do.

        pieces: with slots of SGLang's pool.
        """
        cache = self._requests.mamba_pool.mamba_cache
        begin_rows(
            pieces, self.pool, self.inputs_of(cache), None if link_states is None else cache.temporal, link_states
        )
        self.pieces = None

    def inputs_of(self, cache: Any) -> list[torch.Tensor]:
        """The last inputs of convolutions in SGLang's cache of states, of a layer or all: [..., slots, dim, width]."""
        return [conv.mT for conv in cache.conv] if self._inputs_last else cache.conv

    def save(self, req: Any, slot: int) -> None:
        """Copy the state of a request after the passes launched so far, as what makes it of a state of zero."""
        cache, own = self._requests.mamba_pool.mamba_cache, req.kv.mamba_pool_idx[None]  # as a number, it would be read
        self._of_passes.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._of_passes):
            for of_chunks, of_requests in zip(self.pool.conv, self.inputs_of(cache), strict=True):
                of_chunks[:, slot] = of_requests[:, own][:, 0]
            if self.pool.h is not None and self.pool.p is not None:
                self.pool.h[:, slot] = cache.temporal[:, own][:, 0]
                self.pool.p[:, slot] = 0
            read_here(own)


class LinkConvolutions(AttentionBackend):
    """Mixed into SGLang's backend of short convolutions by `with_states`.

    link_pieces: of the current pass, with slots of SGLang's pool.
    link_ends: by layer, the last inputs before each piece, and after the layer's kernel has run, at its end.
    """

    def init_link_states(self, layers: RecurrentLayers) -> None:
        self.link_layers = layers
        self.link_pieces: Pieces | None = None
        self.link_ends: dict[int, torch.Tensor] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self.link_pieces, self.link_ends = None, {}
        if (pieces := self.link_layers.pieces) is not None:
            if pieces.inputs.behind is not None:
                raise RuntimeError("a piece of text directly follows another, whose convolution inputs are not known")
            pieces = pieces.in_slots(self.forward_metadata.mamba_cache_indices)
            if pieces.is_text_behind_chunks:
                self.link_layers.begin_rows(pieces)
            else:
                self.link_pieces, self.link_layers.finish = pieces, self._write

    def conv_state_metadata(self, layer_id: int, forward_batch: Any) -> ShortConvMetadata:
        """Of the pieces of the batch, each a sequence with a state of its own."""
        # mypy does not know the class that this is mixed into.
        handle = super().conv_state_metadata(layer_id, forward_batch)  # type: ignore[misc]
        if (pieces := self.link_pieces) is None:
            return handle
        index, (requests,) = self.req_to_token_pool.mamba2_layer_index(layer_id), handle.layer_cache.conv
        before = pieces.inputs.before(requests, self.link_layers.pool.conv[0][index], requests[:0, :, 0])
        self.link_ends[layer_id] = before
        return handle._replace(
            layer_cache=SimpleNamespace(conv=[before]),
            cache_indices=pieces.indices.to(self.cache_indices_dtype),
            query_start_loc=pieces.cu_seqlens,
            has_initial_state=pieces.known,
        )

    def _write(self) -> None:
        """Copy the last inputs of pieces to requests and chunks."""
        assert self.link_pieces is not None
        last, chunks = self.link_pieces.last, self.link_pieces.chunks
        for layer_id, ends in self.link_ends.items():
            index = self.req_to_token_pool.mamba2_layer_index(layer_id)
            if last is not None:
                self.req_to_token_pool.mamba_pool.mamba_cache.conv[0][index][last.slots] = ends[last.pieces]
            if chunks is not None:
                self.link_layers.pool.conv[0][index][chunks.slots] = ends[chunks.pieces]
        self.link_pieces, self.link_ends = None, {}


LINKS = {
    ShortConvAttnBackend: LinkConvolutions,
    GDNAttnBackend: LinkDeltaRule,
    KDAAttnBackend: LinkKDA,
    Mamba2AttnBackend: LinkMamba2,
}
"""What is mixed into SGLang's backends of recurrent layers."""


@HOOKS.on("sglang.srt.layers.attention.attention_registry").feature(
    "attn_backend_wrapper", "AFTER", "recurrent layers know the chunks of their batch"
)
def with_states(backend: Any, runner: Any, *_args: Any) -> Any:
    """After `attn_backend_wrapper`, which adds the backend of recurrent layers: have it know of chunks.

    Raises ValueError for recurrent layers that chunks do not serve.
    """
    table: SegmentTable | None = table_of(runner.req_to_token_pool)
    has_states = isinstance(backend, HybridLinearAttnBackend)  # a model that drafts may have no recurrent layers
    if has_states and table is not None and table.recurrent is not None:
        linear = backend.linear_attn_backend
        stock = type(linear)
        if stock not in LINKS:
            raise ValueError(f"sglang-lazy: chunks do not keep the states of recurrent layers in {stock.__name__}")
        linear.__class__ = type(f"Link{stock.__name__}", (LINKS[stock], stock), {})
        linear.init_link_states(table.recurrent)
    return backend


@HOOKS.on("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator").feature(
    "_handle_max_mamba_cache", "AROUND", "the states of chunks get their share of the memory"
)
def leave_room(original: Callable, configurator: Any, rest_memory: float) -> float:
    """Around `KVCacheConfigurator._handle_max_mamba_cache`, which takes the states of requests from the memory that is
    left, in GiB: take those of chunks first."""
    layout, args = state_layout(configurator.model_config), configurator.server_args
    if layout is not None and not unfit_states(args, configurator.model_config):
        share = LazyConfig.current().state_share or usual_share(layout, kv_bytes(configurator))
        budget = share * rest_memory
        _memories[configurator.model_config] = StateMemory.within(budget * 2**30, layout)
        rest_memory -= budget
    return original(configurator, rest_memory)


@HOOKS.on("sglang.srt.managers.schedule_batch.ScheduleBatch").feature(
    "_mamba_radix_cache_v2_req_prepare_for_extend",
    "AROUND",
    "no state of a request with chunks, or of a fill, reaches SGLang's cache",
)
def untracked(original: Callable, batch: Any, req: Any) -> Any:
    """Around `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`, which plans where in its new tokens a
    request's state is kept for SGLang's cache: nowhere, for requests of ours."""
    if lazy_state(req) is None:
        return original(batch, req)
    return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=req.kv.mamba_next_track_idx, track_seqlen=-1)
