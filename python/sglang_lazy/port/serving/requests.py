"""What a `GenerateReqInput` has of a prompt with chunks: its plan, its data-parallel rank, its images, its report.

Each rank has its own cache, so a prompt goes to a rank that has its chunks. SGLang's controller sends a request to the
rank that it names, and distributes others by `--load-balance-method`.
"""

import hashlib
from collections import Counter
from typing import Any

import msgspec

from sglang_lazy.core.overlay import Overlay
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving.images import check_places, expand, image_ranges
from sglang_lazy.serving.plans import Plan, packed_in
from sglang_lazy.serving.results import OwnPlan, Served, report_in, with_own_plan
from sglang_lazy.serving.tokenization import TokenizedPrompt


def plan_of(obj: Any) -> Plan | None:
    """The plan that travels with one request of a batch, None for an ordinary request.

    Raises ValueError for one that no surface of this process has made.
    """
    packed = packed_in(getattr(obj, "sampling_params", None))
    if packed is None:
        return None
    if obj.input_ids is None:
        raise ValueError("a prompt layout needs the input_ids that it describes")
    return packed.plan


def own_plan(obj: Any) -> OwnPlan:
    """The plan of a request that has one, made its own first."""
    obj.sampling_params, own = with_own_plan(obj.sampling_params)
    return own


def choose_rank(manager: Any, obj: Any, plan: Plan, input_ids: list[int]) -> None:
    """Choose the rank of a prompt that reuses chunks, unless the request names one. Does nothing with a single rank."""
    if manager.server_args.dp_size == 1:
        return
    running = Counter(getattr(state.obj, "routed_dp_rank", None) for state in manager.rid_to_state.values())
    named = obj.routed_dp_rank
    ranks = range(manager.server_args.dp_size) if named is None else (named,)
    names = plan.chunk_names(input_ids, obj.extra_key, obj.cache_salt, obj.lora_id)
    sizes = {name: end - start for name, (start, end) in zip(names, plan.layout.chunks, strict=True)}
    pick = frontend_of(manager).picker.pick(sizes, {rank: running[rank] for rank in ranks})
    obj.routed_dp_rank = pick.worker
    own_plan(obj).pick = pick, names


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
        shared=report_in(obj.sampling_params),
    )


def keeping_tokens(manager: Any, obj: Any) -> Any:
    """A tokenizer manager that keeps the token ids of `obj`, if that is a prompt with chunks and images.

    SGLang's processors decode a prompt with images and encode it again, which would move the boundaries of chunks.
    """
    if not getattr(obj, "image_data", None) or obj.input_ids is None:
        return manager
    plan, processor = plan_of(obj), manager.mm_processor
    if plan is None or not plan.layout.chunks:
        return manager
    if processor is None or not _is_known(processor):
        raise ValueError("chunks cannot be combined with images on this model")
    if manager.server_args.language_only:
        raise ValueError("chunks cannot be combined with images that another server encodes (--language-only)")
    if obj.video_data or obj.audio_data:
        raise ValueError("chunks can be combined with images, but not with videos or audio")

    async def process(image_data: Any, input_text: Any, request_obj: Any, **kwargs: Any) -> Any:
        """In place of `process_mm_data_async`: process only the images, and insert them into the prompt."""
        if any(isinstance(image, dict) for image in image_data):
            raise ValueError("chunks cannot be combined with images that are processed already")
        tokens, prompt = processor.mm_tokens, TokenizedPrompt(list(obj.input_ids), plan.layout.chunks)
        ranges = image_ranges(prompt, tokens.image_token_id, [processor.VIDEO_TOKEN_ID])
        check_places(prompt, ranges, len(image_data), processor.IM_START_TOKEN_ID)
        processed = await processor.process_mm_data_async(
            image_data=image_data, input_text=tokens.image_token * len(ranges), request_obj=obj, **kwargs
        )
        items = sorted(processed.mm_items, key=lambda item: item.offsets[0])
        lens = [last - first + 1 for ((first, last),) in (item.offsets for item in items)]
        prompt, places = expand(prompt, tokens.image_token_id, ranges, lens)
        for item, (start, end) in zip(items, places, strict=True):
            item.offsets = [(start, end - 1)]
            name_apart(item)
        positions, delta = processor.compute_mrope_positions(prompt.input_ids, items)
        obj.input_ids = prompt.input_ids
        prompts = frontend_of(manager).prompts
        obj.sampling_params = prompts.with_plan(obj.sampling_params, plan.moved(prompt.chunks))
        return msgspec.structs.replace(
            processed,
            mm_items=items,
            input_ids=prompt.input_ids,
            padded_input_ids=processed.build_padded_input_ids(prompt.input_ids, items),
            mrope_positions=positions,
            mrope_position_delta=delta,
        )

    return Overlay(manager, mm_processor=Overlay(processor, process_mm_data_async=process))


def _is_known(processor: Any) -> bool:
    """Whether it is the image processor of Qwen's models."""
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor  # imports all of Qwen's models

    return isinstance(processor, QwenVLImageProcessor)


def name_apart(item: Any) -> None:
    """Include an image's shape in the hash by which SGLang finds its embedding. SGLang hashes only the patches, so that
    white images of 4 x 2 and 2 x 4 patches would be the same."""
    item.set_pad_value()
    named = b"%d %b" % (item.hash, repr(item.image_grid_thw.tolist()).encode())
    item.set_hash(int.from_bytes(hashlib.sha256(named).digest()[:8], "big"))
