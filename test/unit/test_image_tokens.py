"""Images in prompts with chunks: where their tokens go, and how images are told apart."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.policies import get_policy
from sglang_lazy.port.facts import SchedulerFacts
from sglang_lazy.port.serving.requests import keeping_tokens, name_apart
from sglang_lazy.scheduler.arrival import images_of
from sglang_lazy.serving.images import check_places, expand, image_ranges
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.tokenization import TokenizedPrompt

IMAGE, VIDEO = 50, 51


def test_each_image_expands_to_its_tokens():
    """Before, between and after the chunks; expanding an expanded prompt changes nothing."""
    prompt = TokenizedPrompt([1, IMAGE, 2, 3, 4, IMAGE, 5, 6, IMAGE], ((2, 4), (6, 8)))
    ranges = image_ranges(prompt, IMAGE, [VIDEO])
    assert ranges == [(1, 2), (5, 6), (8, 9)]
    expanded, places = expand(prompt, IMAGE, ranges, [3, 1, 2])
    assert expanded.input_ids == [1, *[IMAGE] * 3, 2, 3, 4, IMAGE, 5, 6, IMAGE, IMAGE]
    assert expanded.chunks == ((4, 6), (8, 10))
    assert places == image_ranges(expanded, IMAGE, [VIDEO]) == [(1, 4), (7, 8), (10, 12)]
    assert expand(expanded, IMAGE, places, [3, 1, 2]) == (expanded, places)


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_chunks_hold_no_images(token):
    with pytest.raises(ValueError, match="chunk at position 1 .* only in text"):
        image_ranges(TokenizedPrompt([1, 2, token, 3], ((1, 3),)), IMAGE, [VIDEO])


def test_each_image_has_a_place():
    """Behind the token that begins an image: at the very start there is none, whatever the prompt ends with."""
    begins, prompt = 49, TokenizedPrompt([49, IMAGE, 2, 3, 49, IMAGE, 49], ((2, 4),))
    check_places(prompt, [(1, 2), (5, 6)], 2, begins)
    for num_images in (1, 3):
        with pytest.raises(ValueError, match=f"places for 2 images, but {num_images} are given"):
            check_places(prompt, [(1, 2), (5, 6)], num_images, begins)
    for place in ((0, 1), (3, 4)):
        with pytest.raises(ValueError, match="an image must follow"):
            check_places(prompt, [(1, 2), place], 2, begins)


def test_text_models_refuse_images():
    params = {"custom_params": {LAYOUT_PARAM: Plan.of(((0, 2),), get_policy("block")).pack()}}
    obj = SimpleNamespace(image_data=["image"], input_ids=[1, 2, 3], sampling_params=params)
    with pytest.raises(ValueError, match="images on this model"):
        keeping_tokens(SimpleNamespace(mm_processor=None), obj)


def item(grid, offsets=((0, 3),)):
    """An image of white patches."""
    patches, grid = torch.ones(grid[0] * grid[1], 4), torch.tensor([[1, *grid]])
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=patches, offsets=list(offsets))
    item.set("image_grid_thw", grid)
    return item


def test_images_of_another_shape_differ():
    wide, high, same = item((2, 8)), item((8, 2)), item((2, 8))
    for image in (wide, high, same):
        name_apart(image)
    assert wide.hash == same.hash != high.hash and wide.pad_value == same.pad_value != high.pad_value


def request(*items, places=None):
    places = np.arange(12)[None].repeat(3, 0) if places is None else places
    return SimpleNamespace(
        multimodal_inputs=SimpleNamespace(mm_items=list(items), mrope_positions=torch.tensor(places))
    )


def images(req, link="block"):
    return images_of(SchedulerFacts(None).images(req), PromptLayout(((4, 6),), link=link), get_policy(link))


def hashed(value, *offsets):
    image = item((2, 8), offsets)
    image.set_hash(value)
    return image


def test_an_images_digest_covers_its_whole_hash_and_shape():
    one, other = hashed(5, (0, 3)), hashed(5 + (1 << 30), (0, 3))
    (digest,) = images(request(one)).digests
    assert images(request(other)).digests != [digest]
    places = np.arange(12)[None].repeat(3, 0)
    places[2, 1] = 0
    assert images(request(one, places=places)).digests != [digest]
    moved = images(request(hashed(5, (7, 10))))
    assert moved.digests == [digest] and moved.ranges == [(7, 11)]


@pytest.mark.parametrize(
    "item, link, reason",
    [
        (hashed(1, (5, 8)), "block", "inside a chunk"),
        (hashed(1, (0, 1), (7, 8)), "block", "other than images"),
        (MultimodalDataItem(modality=Modality.VIDEO, offsets=[(7, 8)]), "block", "other than images"),
        (hashed(1, (7, 8)), "query", "its probes see no images"),
        (hashed(1, (0, 1)), "base:preamble=lead", "after an image"),
    ],
)
def test_refused_images(item, link, reason):
    with pytest.raises(ValueError, match=reason):
        images(request(item), link)


def test_no_images():
    assert images(SimpleNamespace(multimodal_inputs=None)) is None
