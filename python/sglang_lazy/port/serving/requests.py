"""What SGLang's `GenerateReqInput` has of a prompt with chunks: its plan, its data-parallel rank, and its report.

Each rank has its own cache, so a prompt goes to a rank that has its chunks. SGLang's controller sends a request to the
rank that it names, and distributes others by `--load-balance-method`.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Mapping
from typing import Any

from sglang_lazy.core.keys import digests
from sglang_lazy.core.segments import LAYOUT_PARAM, ChunkLimit, PromptLayout
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving.picker import learning
from sglang_lazy.serving.plans import PackedPlan, Plan
from sglang_lazy.serving.results import Served, SharedReport

_SHARED_ATTR, _PICK = "_sglang_lazy_shared_report", "_sglang_lazy_pick"

_REFUSED = {
    "input_embeds": "input embeddings",
    "positional_embed_overrides": "input embeddings",
    "mm_hashes": "hashes of images",
    "video_data": "videos",
    "audio_data": "audio",
    "session_params": "sessions",
    "multi_item_delimiter_indices": "multi-item scoring",
}
"""Request fields that cannot be combined with reused chunks."""


def plan_of(obj: Any) -> Plan | None:
    """The plan that travels with one request of a batch, None for an ordinary request.

    Raises ValueError for one that no surface of this process has made.
    """
    params = getattr(obj, "sampling_params", None)
    custom_params = params.get("custom_params") if isinstance(params, Mapping) else None
    if not isinstance(custom_params, Mapping) or LAYOUT_PARAM not in custom_params:
        return None
    packed = custom_params[LAYOUT_PARAM]
    if not isinstance(packed, PackedPlan):
        raise ValueError(f"custom_params.{LAYOUT_PARAM} is set by the server: give a prompt as segments instead")
    if obj.input_ids is None:
        raise ValueError("a prompt layout needs the input_ids that it describes")
    return packed.plan


def check_request(obj: Any, layout: PromptLayout, limit: ChunkLimit) -> None:
    """Raise ValueError if chunks cannot be reused together with the rest of a request."""
    limit.check(len(layout.chunks))
    for field, what in _REFUSED.items():
        if getattr(obj, field, None):
            raise ValueError(f"a prompt with chunks cannot be combined with {what} ({field})")
    if (obj.sampling_params.get("beam_width") or 1) > 1:
        raise ValueError("a prompt with chunks cannot be combined with beam search (beam_width)")
    chunks_end = layout.chunks[-1][1]
    start = getattr(obj, "logprob_start_len", None)
    if getattr(obj, "return_logprob", False) and start is not None and 0 <= start < chunks_end:
        raise ValueError(
            f"prompt logprobs from position {start} need tokens that are reused from chunks: the last chunk ends at "
            f"position {chunks_end}, so logprob_start_len must be at least {chunks_end}, or -1 for none"
        )


def choose_rank(manager: Any, obj: Any, plan: Plan, input_ids: list[int]) -> None:
    """Choose the rank of a prompt that reuses chunks, unless the request names one. Does nothing with a single rank."""
    if manager.server_args.dp_size == 1:
        return
    running = Counter(getattr(state.obj, "routed_dp_rank", None) for state in manager.rid_to_state.values())
    named = obj.routed_dp_rank
    ranks = range(manager.server_args.dp_size) if named is None else (named,)
    names = _names(obj, plan, input_ids)
    sizes = {name: end - start for name, (start, end) in zip(names, plan.layout.chunks, strict=True)}
    pick = frontend_of(manager).picker.pick(sizes, {rank: running[rank] for rank in ranks})
    obj.routed_dp_rank = pick.worker
    setattr(obj, _PICK, (pick, names))


def _names(obj: Any, plan: Plan, input_ids: list[int]) -> list[Hashable]:
    """Keys that identify each chunk's KV, as far as the HTTP process knows."""
    chunks, kind = plan.layout.chunks, plan.policy.preamble
    lead = input_ids[: chunks[0][0]] if kind == "lead" else ()
    namespace = (obj.extra_key, obj.cache_salt, obj.lora_id, kind, *lead)
    return [(digest, hash(namespace)) for digest in digests(input_ids, chunks)]


def learned(outputs: AsyncGenerator[dict, None], obj: Any) -> AsyncGenerator[dict, None]:
    """`outputs` of a request, learning from its chunk report which chunks its rank had."""
    chosen = getattr(obj, _PICK, None)
    return outputs if chosen is None else learning(outputs, *chosen)


def share_report(obj: Any) -> None:
    """Let the samples of a prompt, which SGLang makes as copies of `obj`, share one report."""
    setattr(obj, _SHARED_ATTR, SharedReport())


def served(obj: Any, plan: Plan) -> Served:
    """A request that the scheduler has got."""
    return Served(
        plan,
        obj,
        obj.rid,
        obj.input_ids,
        obj.sampling_params,
        obj.extra_key,
        obj.lora_id,
        has_images=bool(obj.image_data),
        is_single=getattr(obj, "is_single", False),
        is_counted=obj.log_metrics,
        shared=getattr(obj, _SHARED_ATTR, None),
    )
