"""Plain prompts with images beside prompts with chunks, on models whose image tokens attend to later ones."""

import pytest
from sglang.srt.managers.schedule_batch import MultimodalInputs

from fakes.loop import QUESTION, A, B, Loop
from fakes.requests import TEXT
from sglang_lazy.core.policy import ServerTraits

pytestmark = pytest.mark.usefixtures("sglang_context")


def batches(masks_images, chunked_prefill_size):
    """The batches that a queue launches, each request by its first letter: image, parent or fill."""
    loop = Loop(chunked_prefill_size=chunked_prefill_size)
    limits = loop.admission.arrival.limits
    loop.admission.arrival.limits = limits._replace(traits=ServerTraits(masks_images=masks_images))
    for parts, rid in [
        ([A, QUESTION], "parent 0"),
        ([(TEXT, (3, 4, 5, 6, 7))], "image 0"),
        ([B, (TEXT, (9, 8, 7, 6, 5, 4))], "parent 1"),
        ([(TEXT, (6, 7, 5, 6, 7))], "image 1"),
        ([(TEXT, (1, 2))], "text"),
    ]:
        req = loop.submit(parts, rid)
        if rid.startswith("image"):
            req.multimodal_inputs = MultimodalInputs(mm_items=[])
    seen, prefills = set(), []
    while not loop.is_fully_idle() or not prefills:
        loop.step()
        is_extend, reqs = loop.last_batch is not None and loop.last_batch.forward_mode.is_extend(), loop.log[-1]
        if is_extend:
            prefills.append({rid.strip("\0")[0] for rid in reqs})
        seen |= set(reqs)
    assert {"image 0", "image 1", "parent 0", "parent 1", "text"} <= seen
    return prefills


@pytest.mark.parametrize("chunked_prefill_size", [4, 64])
def test_images_and_chunks_share_no_batch(chunked_prefill_size):
    """Even when one is a chunked prefill that continues: SGLang's image mask fits only the rows that SGLang lays
    out."""
    assert not any("i" in kinds and kinds & {"p", "f"} for kinds in batches(True, chunked_prefill_size))


def test_causal_images_and_chunks_share_batches():
    assert any({"i", "p"} <= kinds for kinds in batches(False, 64))
