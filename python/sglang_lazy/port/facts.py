"""Facts about SGLang's flags, ranks and requests, whose places move with its releases: each is read here alone."""

import dataclasses
import itertools
from array import array
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_parallel

from sglang_lazy.attention.rows import Pass
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.core.state import RowNodes, lazy_state
from sglang_lazy.policies import policy_elsewhere
from sglang_lazy.scheduler.admission import ChunkAdmission
from sglang_lazy.scheduler.facts import GivenImages, Taken

UPDATES = tuple(f"update_weights_from_{source}" for source in ("disk", "distributed", "ipc", "tensor"))
"""Ways to change a server's weights: names of methods of SGLang's."""


def flags_of(args: Any) -> Any:
    """A server's flags as SGLang has resolved them.  args: its `ServerArgs`, which keep what the user gave."""
    return resolved_view(args)


def attention_backends(args: Any) -> set[str | None]:
    """The names of the attention backends for prefill and decode, and of the one that both default to."""
    flags = flags_of(args)
    return {flags.attention_backend, *attention_backends_of(flags)}


def pass_of(batch: Any) -> Pass:
    """A `ScheduleBatch` that is about to run."""
    states = [lazy_state(req) for req in batch.reqs]
    return (
        Pass(states) if batch.forward_mode.is_decode_or_idle() else Pass(states, batch.prefix_lens, batch.extend_lens)
    )


def dp_size() -> int:
    return get_parallel().dp_size


def dp_rank() -> int:
    """This process's data-parallel rank; 0 without data parallelism."""
    return get_parallel().dp_rank or 0


def tp_size() -> int:
    return get_parallel().tp_size


def tp_rank() -> int:
    return get_parallel().tp_rank


def admission_of(owner: Any) -> ChunkAdmission | None:
    """The admission of a scheduler, None if it serves without chunk reuse.  owner: it, or another with its cache."""
    return getattr(owner.tree_cache, "admission", None)


class RequestFacts:
    """The `Requests` of SGLang."""

    rid = attrgetter("rid")
    prompt = attrgetter("origin_input_ids")
    output = attrgetter("output_ids")
    row = attrgetter("kv.req_pool_idx")
    num_cached = attrgetter("prefix_len")
    nodes = attrgetter("last_node")

    def priority(self, req: Any) -> int:
        return req.priority or 0

    def lay_out(self, req: Any, tokens: array) -> None:
        req.full_untruncated_fill_ids = tokens

    def count_computed(self, req: Any, num_tokens: int) -> None:
        if not req.retracted_stain:
            req.already_computed = num_tokens

    def own(self, req: Any, num_tokens: int) -> None:
        req.kv.cache_protected_len = num_tokens

    def hold(self, req: Any, nodes: RowNodes) -> RowNodes:
        held = req.lock.node
        req.lock = dataclasses.replace(req.lock, node=nodes)
        req.last_node = nodes
        return held


class SchedulerFacts(RequestFacts):
    """The `Facts` of an SGLang `Scheduler`."""

    slots = attrgetter("out_cache_loc")
    extra_key = attrgetter("extra_key")
    adapter = attrgetter("lora_id")
    max_new_tokens = attrgetter("sampling_params.max_new_tokens")
    is_launched = attrgetter("kv.holds_kv")
    is_finished = methodcaller("finished")
    chunked = property(attrgetter("_scheduler.chunked_req"))
    growth_ratio = property(attrgetter("_scheduler.new_token_ratio_tracker.current"))

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler

    @property
    def waiting(self) -> list[Any]:
        return self._scheduler.waiting_queue

    @waiting.setter
    def waiting(self, requests: list[Any]) -> None:
        self._scheduler.waiting_queue = requests

    @property
    def max_prefill(self) -> int:
        return self._scheduler.chunked_prefill_size or 0

    @property
    def num_ahead(self) -> int:
        return 0 if self._scheduler.spec_algorithm.is_none() else get_alloc_reserve_per_decode()

    def taken(self, batch: Any) -> list[Taken]:
        ends = itertools.accumulate(batch.extend_lens)
        parts = zip(batch.reqs, ends, batch.extend_lens, strict=True)
        return [Taken(req, end - num_new, end, req is not batch.chunked_req) for req, end, num_new in parts]

    def plan(self, req: Any) -> tuple[PromptLayout, Policy] | None:
        params = req.sampling_params.custom_params
        if not isinstance(params, dict) or LAYOUT_PARAM not in params:
            return None
        layout = PromptLayout.unpack(params[LAYOUT_PARAM] or "", len(req.origin_input_ids))
        return layout, policy_elsewhere(layout.link)

    def drop_layout(self, req: Any) -> None:
        """SGLang has put the request itself beside it, a cycle that would leave all it holds to the garbage
        collector."""
        params = req.sampling_params
        if isinstance(params.custom_params, dict) and params.custom_params.keys() <= {LAYOUT_PARAM, "__req__"}:
            params.custom_params = None

    def images(self, req: Any) -> GivenImages | None:
        inputs = req.multimodal_inputs
        if inputs is None:
            return None
        if inputs.mrope_positions is None or not all(
            item.is_image() and len(item.offsets) == 1 for item in inputs.mm_items
        ):
            raise ValueError("chunks cannot be combined with multimodal inputs other than images with M-RoPE")
        items = sorted(inputs.mm_items, key=lambda item: item.offsets[0])
        ranges = [(first, last + 1) for ((first, last),) in (item.offsets for item in items)]
        places = inputs.mrope_positions.cpu().numpy().astype(np.int64)
        return GivenImages(items, ranges, [item.hash for item in items], places)

    def has_media(self, req: Any) -> bool:
        return req.multimodal_inputs is not None

    def unsupported(self, req: Any) -> list[str]:
        asked = {
            "a session": req.session is not None,
            "input embeddings": req.input_embeds is not None or req.positional_embed_overrides is not None,
            "returned hidden states": bool(req.return_hidden_states),
            "returned routed experts": req.return_routed_experts,
        }
        return [feature for feature, is_asked in asked.items() if is_asked]

    def first_logprob(self, req: Any) -> int | None:
        return req.logprob_start_len if req.return_logprob and req.logprob_start_len >= 0 else None

    def num_left(self, req: Any) -> int:
        return len(req.full_untruncated_fill_ids) - req.extend_end

    def is_refused(self, req: Any) -> bool:
        return req.to_finish is not None or req.finished_reason is not None

    def refuse(self, req: Any, reason: str) -> None:
        req.set_finish_with_abort(reason)

    def limit_answer(self, req: Any, max_new_tokens: int) -> None:
        req.sampling_params.max_new_tokens = max_new_tokens

    def keep_text(self, req: Any, text: array) -> None:
        if req.logprob_start_len >= 0:
            req.logprob_start_len = max(0, req.logprob_start_len - len(req.origin_input_ids) + len(text))
        req.origin_input_ids = req.origin_input_ids_unpadded = text

    def hurry(self, req: Any, parent: Any) -> None:
        if None not in (req.priority, parent.priority):  # without priority scheduling, some have one
            first = min if self._scheduler.schedule_low_priority_values_first else max
            req.priority = first(req.priority, parent.priority)
