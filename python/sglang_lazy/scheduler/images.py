"""Images in prompts with chunks: where they are, and which such prompts are refused."""

import hashlib
from typing import Any

import numpy as np

from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import Images
from sglang_lazy.core.refusal import Refusal
from sglang_lazy.core.segments import PromptLayout


def images_of(req: Any, layout: PromptLayout, policy: Policy) -> Images | None:
    """The images of a request with chunks; None if it has none.

    Raises ValueError for other media, for an image inside a chunk, and for policies that do not support images.
    """
    inputs = req.multimodal_inputs
    if inputs is None:
        return None
    if inputs.mrope_positions is None or not all(
        item.is_image() and len(item.offsets) == 1 for item in inputs.mm_items
    ):
        raise ValueError("chunks cannot be combined with multimodal inputs other than images with M-RoPE")
    if policy.probes:
        raise Refusal("policy", f"link {policy}: its probes see no images")
    items = sorted(inputs.mm_items, key=lambda item: item.offsets[0])
    ranges = [(first, last + 1) for ((first, last),) in (item.offsets for item in items)]
    for first, end in ranges:
        if any(first < chunk_end and start < end for start, chunk_end in layout.chunks):
            raise ValueError("an image is inside a chunk: images are allowed only in text")
        if policy.preamble == "lead" and first < layout.chunks[0][0]:
            raise Refusal("policy", f"link {policy}: chunks cannot be computed after an image")
    places = inputs.mrope_positions.cpu().numpy().astype(np.int64)
    digests = []
    for item, (first, end) in zip(items, ranges, strict=True):
        axes = places[:, first:end] - places[0, first]
        digests.append(hashlib.sha256(b"%d %b" % (item.hash, axes.tobytes())).digest())
    return Images(items, ranges, digests, places[0])
