"""Chunks beside images on models with recurrent layers, whose attention has positions on several axes."""

import pytest
import torch
from test_mrope import GREEDY, TOLERANCE, data_url, picture, post, with_image

from fakes import hybrids_on_cpu
from oracle.scenarios import Dice
from oracle.segments import Segment, token_ids
from oracle.vision import HYBRIDS, HybridVisionOracle, build_vision_model
from sglang_lazy.testing import device_flags, running_server

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]
FLAGS = [
    *("--max-total-tokens", "2048", "--max-running-requests", "4", "--disable-cuda-graph"),
    "--disable-fast-image-processor",
    *("--chunked-prefill-size", "48"),  # parts end inside images
]


@pytest.fixture(scope="module", params=HYBRIDS)
def served(request, tmp_path_factory, with_plugin):
    """A server's URL, and its oracle."""
    folder = tmp_path_factory.mktemp(request.param)
    path = build_vision_model(request.param, folder / "model")
    flags = ["--model-path", str(path), *FLAGS, *device_flags()]
    with with_plugin(hybrids_on_cpu.load):
        how = dict(environment=hybrids_on_cpu.ENVIRONMENT, timeout=150)
        with running_server(flags, folder / "server.log", **how) as url:
            yield url, HybridVisionOracle(str(path))


def ask(served, prompt: list[Segment], images: list) -> dict:
    """Answer the prompt and compare each token's log-probability with the oracle's."""
    url, oracle = served
    body = {"segments": [segment.to_request() for segment in prompt], "sampling_params": GREEDY}
    shown = {"image_data": [data_url(image) for image in images]} if images else {}
    response = post(url, {**body, **shown, "return_logprob": True})
    assert response.ok, response.text
    output, expanded = response.json(), oracle.show(prompt, images)
    tokens = output["output_ids"]
    expected = oracle.logprobs(expanded, tokens)[len(token_ids(expanded)) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
    assert (chosen - reported).abs().max() <= TOLERANCE
    assert (expected.amax(-1) - chosen).max() <= TOLERANCE
    return output["meta_info"]


def hits(meta: dict) -> list[bool]:
    return [entry["hit"] for entry in meta["chunks"]]


def test_images_beside_chunks(served):
    """In the question, before chunks and between them; cold, warm and reordered; another image is another prompt."""
    dice = Dice("states and images")
    docs, question = dice.chunks(2, 20, 60), with_image(dice, 3, 6)
    wide, high, other = picture(1, 168, 56), picture(2, 56, 140), picture(3)
    assert hits(ask(served, [dice.text(7), *docs, question], [wide])) == [False, False]
    between = [with_image(dice, 2, 4), docs[1], with_image(dice, 3, 1), docs[0], question]
    for images in ([high, other, wide], [high, other, wide], [high, wide, wide]):
        assert hits(ask(served, between, images)) == [True, True]


def test_text_chunks(served):
    """The model's own positions of text are those of a model without axes."""
    dice = Dice("states and axes")
    docs = dice.chunks(2, 20, 60)
    assert hits(ask(served, [dice.text(7), *docs, dice.text(5)], [])) == [False, False]
    assert hits(ask(served, [docs[1], dice.text(3), docs[0], dice.text(5)], [])) == [True, True]
