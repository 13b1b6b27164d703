"""Drafting over chunks: the model that drafts reads their KV, its own in the same slots or the target's, through the
link path.

Nothing that it reads changes an answer, only how many of its drafts are accepted.
"""

import logging
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_lazy.attention.decode_rows import deepest_paths, plan_rows
from sglang_lazy.attention.kernels import choose_kernels
from sglang_lazy.attention.table import SegmentTable, table_of
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.device import to_device
from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.state import as_linked, fill_of, linked
from sglang_lazy.core.supported import Unfit
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.graphs import batch_of_graph, captures_linked_rows
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.model.attention import LinkAttention, step_rows, with_link_path
from sglang_lazy.port.model.compat import unfit_layers
from sglang_lazy.port.model.layers import check_layers, describe_layers
from sglang_lazy.port.model.model_runner import decode_with_drafts, involves_chunks

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""In place of a token that only SGLang knows."""
HOOKS = Hooks()
_WORKER = HOOKS.on("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker")


class LinkStep(LinkAttention):
    """The link path of one drafting pass, whose rows `LinkSteps` copies with those of all others.

    It plans them as it begins, in a graph, too: all passes have one workspace, which the one before has left by then.
    """

    def _forward_planned(self, q, k, v, layer, *args: Any) -> torch.Tensor:
        assert self.link_planned is not None
        plan = self.link_model.layers[layer.layer_id].decode_plan
        if layer.layer_id == self.link_model.first_layers[plan]:
            plan_rows(self.link_planned, plan)
        return super()._forward_planned(q, k, v, layer, *args)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super(LinkAttention, self).init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> None:
        super(LinkAttention, self).init_cuda_graph_state(*args, **kwargs)

    def init_forward_metadata_out_graph(self, *args: Any, **kwargs: Any) -> None:
        super(LinkAttention, self).init_forward_metadata_out_graph(*args, **kwargs)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        super(LinkAttention, self).init_forward_metadata_in_graph(forward_batch)


class LinkTarget(LinkAttention):
    """The link path of a model that drafts from the target's KV: its passes decode, and store nothing."""

    def init_link_path(self, runner: Any, table: SegmentTable, model: ServedModel) -> None:
        super().init_link_path(runner, table, model)
        self.link_pool = target_kv(runner)

    def _compile_extend(self, *_args: Any) -> None:
        pass


class LinkSteps:
    """Mixed into the class of SGLang's container of drafting passes, `attn_backends`."""

    # mypy does not know the class that this is mixed into: hence what it ignores below.
    attn_backends: list[Any]
    link_table: SegmentTable

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not self._copy_rows(forward_batch, self.link_table.current is not None, for_graph=False):
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        for step in self.attn_backends:
            step.link_decode.allocate_for_graphs(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if batch_of_graph(self.link_table, in_capture) is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)  # type: ignore[misc]

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if not self._copy_rows(forward_batch, captures_linked_rows(), for_graph=True):
            super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]

    def _copy_rows(self, forward_batch: ForwardBatch, linked: bool, for_graph: bool) -> bool:
        """Copy the rows of all passes of a batch with linked ones. Returns `linked`, whether it is one."""
        for i, step in enumerate(self.attn_backends):
            step.link_planned = None
            if linked:
                # Each sees the drafts before it and its own token.
                rows = step_rows(forward_batch)._replace(first=i + 1)
                step.link_planned = step.link_decode.unplanned(rows, for_graph=for_graph)
        return linked


@_WORKER.feature("init_attention_backend", "AFTER", "drafts read chunks rotated to their places")
def read_chunks(_result: Any, worker: Any) -> None:
    """After `EagleDraftWorker.init_attention_backend`: give the attention of its passes the link path, if the model is
    fit for it. Raises ValueError if the host cannot keep its KV, which is a part of each chunk's."""
    runner = worker.draft_runner
    table = table_of(runner.req_to_token_pool)
    if table is None:
        return
    if isinstance(runner.token_to_kv_pool, SWAKVPool) and flags_of(runner.server_args).enable_hierarchical_cache:
        raise ValueError("--enable-hierarchical-cache: window layers of the model that drafts have a pool of their own")
    table.drafter = runner
    if (model := fit_draft(runner, runner.token_to_kv_pool, set())) is None:
        return
    table.model.draft = model
    with_link_path(worker.draft_extend_attn_backend, runner, table, model)
    if (steps := worker.draft_attn_backend) is not None:
        for step in steps.attn_backends:
            with_link_path(step, runner, table, model, LinkStep)
        steps.__class__ = type(f"Link{type(steps).__name__}", (LinkSteps, type(steps)), {})
        steps.link_table = table


@HOOKS.on("sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker").feature(
    "init_attention_backends", "AFTER", "so do drafts that read the KV of the model itself"
)
def read_target(_result: Any, worker: Any) -> None:
    """After `FrozenKVMTPDraftWorker.init_attention_backends`: the same where the KV is the target's, and each pass of a
    step reads what the step before has left. With chains, one backend serves all passes."""
    runner = worker.draft_runner
    table = table_of(runner.req_to_token_pool)
    if table is None:
        return
    if (model := fit_draft(runner, target_kv(runner), table.model.windows)) is not None:
        table.model.draft = model
        with_link_path(worker.draft_attn_backend, runner, table, model, LinkTarget)


def target_kv(runner: Any) -> Any:
    """The target's KV pool, which a draft's `ModelRunner` reads: its layers have the ids of those whose KV that is."""
    return runner.model.kv_context.target_token_to_kv_pool


def fit_draft(runner: Any, pool: Any, windows: set[int]) -> ServedModel | None:
    """`describe_draft`, or None and a warning if the link path cannot serve the model."""
    try:
        return describe_draft(runner, pool, windows)
    except Unfit as error:
        reasons = "; ".join(error.reasons)
        logger.warning("sglang-lazy: drafts read chunks unrotated, so fewer are accepted: %s", reasons)
        return None


def describe_draft(runner: Any, pool: Any, windows: set[int]) -> ServedModel:
    """The loaded model of a draft's `ModelRunner`. Raises Unfit if the link path cannot serve it.

    pool: of the KV that it reads.  windows: those that its layers may have.
    """
    if reasons := unfit_layers(runner.model, may_lack_rotation=False):
        raise Unfit(reasons)
    try:
        layers = describe_layers(runner.model, runner.model_config.context_len, runner.device)
        layers = check_layers(runner.model, layers, runner.model_config.hidden_size, runner.dtype)
    except ValueError as error:
        raise Unfit([str(error)]) from error
    kinds = torch.device(runner.device), runner.dtype, runner.kv_cache_dtype
    layers = choose_kernels(LazyConfig.current(), layers, *kinds)
    model = ServedModel({layer_id: pool.get_kv_buffer(layer_id) for layer_id in layers}, layers)
    if model.windows - windows:
        raise Unfit(["its layers have windows"])
    return model


@_WORKER.feature(
    "_draft_extend_for_prefill", "AROUND", "passes that compute the KV of drafts know the linked rows of their batch"
)
def extend_drafts(extend: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `EagleDraftWorker._draft_extend_for_prefill`: the model that drafts sees the same linked rows as the
    target, which has run."""
    runner = worker.draft_runner
    table = table_of(runner.req_to_token_pool)
    if table is None or not involves_chunks(batch, table):
        return extend(worker, batch, *args, **kwargs)
    if table.loads is not None:
        table.loads.wait_all()  # the draft's layers are the last that are loaded, so its passes wait for nothing else
    with table.running(table.last):
        return extend(worker, batch, *args, **kwargs)


@HOOKS.on("sglang.srt.model_executor.forward_batch_info.ForwardBatch").feature(
    "init_new", "AFTER", "drafts follow the prompt's order, not the row's"
)
def follow_prompts(forward_batch: Any, _cls: Any, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After `ForwardBatch.init_new`: in a prefill of the model that drafts, which reads the token after each one.
    SGLang takes the next in the row, and rows of ours are permuted."""
    table = table_of(runner.req_to_token_pool)
    if not runner.is_draft_worker or table is None or not table.has_chunks or batch.forward_mode.is_decode_or_idle():
        return
    if batch.forward_mode.is_draft_extend_v2():
        return
    parts, input_ids = [], forward_batch.input_ids
    for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        following = tokens_after(req)
        known = np.full(length, UNKNOWN) if following is None else np.array(following)[start : start + length]
        parts.append(known)
    tokens = np.concatenate(parts)
    tokens[tokens >= runner.model_config.vocab_size] = UNKNOWN  # stand for an image, whose embeddings SGLang has
    known = to_device(tokens, input_ids.device)
    forward_batch.input_ids = torch.where(known == UNKNOWN, input_ids, known.to(input_ids.dtype))


def tokens_after(req: Any) -> array | None:
    """For each token in the row of a linked request or a fill, the token after it, int64; None for other requests.

    UNKNOWN for the last one of a prompt. After a chunk its own first token is taken, so that the KV of its last depends
    on nothing else: what follows most often is another chunk that begins alike.
    """
    if (fill := fill_of(req)) is not None:
        following = array("q")
        for part in fill.parts:
            following += part.tokens[1:] + part.tokens[:1]
        return fill.row.permuted(following)
    if linked(req) is None:
        return None
    tokens = array("q", req.origin_input_ids) + array("q", req.output_ids)
    return as_linked(req).row.permuted(tokens[1:] + array("q", [UNKNOWN]))


@HOOKS.on("sglang.srt.mem_cache.kv_cache_builder").feature(
    "maybe_register_hicache_draft", "AROUND", "servers that draft have a host tier for chunks only"
)
def copy_to_host(register: Callable, *, tree_cache: Any, draft_plan: Any) -> None:
    """Around `maybe_register_hicache_draft`, which has SGLang's host tier copy the draft's KV: it may be off."""
    if tree_cache.cache_controller is not None:
        register(tree_cache=tree_cache, draft_plan=draft_plan)


class DraftPaths:
    """Mixed into the class of SGLang's worker that finds drafts in earlier answers: trees, of which a batch with chunks
    verifies the deepest path, since linked rows verify chains."""

    # mypy does not know the class that this is mixed into: hence what it ignores below.
    target_worker: Any
    draft_token_num: int

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super().forward_batch_generation  # type: ignore[misc]
        return decode_with_drafts(lambda _worker, *given, **named: stock(*given, **named), self, batch, *args, **kwargs)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = super()._prepare_draft_tokens(batch)  # type: ignore[misc]
        table = table_of(self.target_worker.model_runner.req_to_token_pool)
        if table is None or table.current is None:
            return tokens, mask
        return deepest_paths(tokens, mask, self.draft_token_num)


@HOOKS.on("sglang.srt.speculative.spec_info.SpeculativeAlgorithm").feature(
    "create_worker", "AFTER", "batches with chunks verify chains that were found in earlier answers"
)
def with_paths(worker: type, algorithm: Any, *_args: Any, **_kwargs: Any) -> type:
    """After `SpeculativeAlgorithm.create_worker`, which returns a class."""
    return type(f"Link{worker.__name__}", (DraftPaths, worker), {}) if algorithm.is_ngram() else worker
