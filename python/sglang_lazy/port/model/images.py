"""Images in prompts with chunks: their tokens in the prompt, their embeddings and positions in the row."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from sglang_lazy.attention.rows import AttentionRow
from sglang_lazy.core.device import to_device
from sglang_lazy.core.prompt import Images
from sglang_lazy.core.rows import Row
from sglang_lazy.port.view import View
from sglang_lazy.serving.images import expand, image_ranges
from sglang_lazy.serving.requests import layout_of, with_layout
from sglang_lazy.serving.tokenization import TokenizedPrompt

# In the HTTP process


def keeping_tokens(manager: Any, obj: Any) -> Any:
    """A tokenizer manager that keeps the token ids of `obj`, if that is a prompt with chunks and images.

    SGLang's processors decode a prompt with images and encode it again, which would move the boundaries of chunks.
    """
    if not getattr(obj, "image_data", None) or obj.input_ids is None:
        return manager
    layout, processor = layout_of(obj), manager.mm_processor
    if layout is None or not layout.chunks:
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
        tokens, prompt = processor.mm_tokens, TokenizedPrompt(list(obj.input_ids), layout.chunks)
        ranges = image_ranges(prompt, tokens.image_token_id, [processor.VIDEO_TOKEN_ID])
        if len(ranges) != len(image_data):
            raise ValueError(f"the prompt has places for {len(ranges)} images, but {len(image_data)} are given")
        if any(prompt.input_ids[start - 1 : start] != [processor.IM_START_TOKEN_ID] for start, _ in ranges):
            raise ValueError("an image must follow the token that begins an image")
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
        moved = dataclasses.replace(layout, chunks=prompt.chunks)
        obj.sampling_params = with_layout(obj.sampling_params, moved, manager)
        return msgspec.structs.replace(
            processed,
            mm_items=items,
            input_ids=prompt.input_ids,
            padded_input_ids=processed.build_padded_input_ids(prompt.input_ids, items),
            mrope_positions=positions,
            mrope_position_delta=delta,
        )

    return View(manager, mm_processor=View(processor, process_mm_data_async=process))


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


# In the scheduler


def place_rows(forward_batch: Any, batch: Any, rows: Sequence[AttentionRow]) -> None:
    """Set the multi-axis positions of a prefill batch whose rows are permuted.

    Text has the same position on all axes, unless images precede it; then SGLang has listed the axes' positions by
    position in the prompt.
    """
    inputs_of = batch.multimodal_inputs
    places = [places_of(inputs_of[row.request], row.positions[row.prefix_len :]) for row in rows]
    forward_batch.mrope_positions = to_device(torch.cat(places, 1).numpy(), forward_batch.positions.device)


def places_of(inputs: Any, positions: np.ndarray) -> torch.Tensor:
    """The positions on all axes of tokens at `positions`, int64 [3, n], even after the prompt's end.

    inputs: SGLang's, of their request; None without images.
    """
    index = torch.from_numpy(positions).long()
    if inputs is None:
        return index.expand(3, -1)
    listed = inputs.mrope_positions.to(index)
    last = listed.shape[1] - 1
    return torch.where(index <= last, listed[:, index.clamp(max=last)], index + inputs.mrope_position_delta.item())


def order_images(inputs: Any, images: Images, row: Row) -> None:
    """Set the offsets and order of the images in SGLang's `inputs` of a request to those in its row, by which SGLang
    finds them. Each image is contiguous in the row, see `RowCache`."""
    places = np.argsort(row.positions)
    for item, (start, end) in zip(images.items, images.ranges, strict=True):
        item.offsets = [(int(places[start]), int(places[end - 1]))]
    inputs.mm_items.sort(key=lambda item: item.offsets[0])
