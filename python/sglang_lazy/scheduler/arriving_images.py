"""Images in prompts with chunks: where they are, and which such prompts are refused."""

import hashlib

from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import Images
from sglang_lazy.core.refusal import Refusal
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.scheduler.facts import GivenImages


def images_of(given: GivenImages | None, layout: PromptLayout, policy: Policy) -> Images | None:
    """The images of a request with chunks; None if it has none.

    Raises ValueError for an image inside a chunk, and for policies that do not support images.
    """
    if given is None:
        return None
    if policy.probes:
        raise Refusal("policy", f"link {policy}: its probes see no images")
    for first, end in given.ranges:
        if any(first < chunk_end and start < end for start, chunk_end in layout.chunks):
            raise ValueError("an image is inside a chunk: images are allowed only in text")
        if policy.preamble == "lead" and first < layout.chunks[0][0]:
            raise Refusal("policy", f"link {policy}: chunks cannot be computed after an image")
    digests = []
    for (first, end), content in zip(given.ranges, given.hashes, strict=True):
        axes = given.places[:, first:end] - given.places[0, first]
        digests.append(hashlib.sha256(b"%d %b" % (content, axes.tobytes())).digest())
    return Images(given.items, given.ranges, digests, given.places[0])
