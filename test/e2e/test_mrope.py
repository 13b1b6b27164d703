"""Text chunks on models whose positions have several axes, against Hugging Face models with explicit positions."""

import base64
import io

import numpy as np
import pytest
import requests
import torch
from PIL import Image

from oracle.policies import PolicyOracle, epic, keep_all_but, without_best_of_each
from oracle.scenarios import Dice
from oracle.segments import Segment
from oracle.vision import LAYERS, VISION_MODELS, build_vision_model
from sglang_lazy.testing import device_flags, running_server

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 5
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}


def kept(oracle: PolicyOracle, prompt: list[Segment], link: str):
    """What the policy `link` keeps of each chunk."""
    name, _, value = link.partition("=")
    match name:
        case "block" | "copy":
            return keep_all_but(prompt, ())
        case "epic:tokens":
            return epic(prompt, int(value))
        case "query:ratio":
            return oracle.query(prompt, float(value), [LAYERS - 1])
        case "blend:ratio":
            return oracle.blend(prompt, float(value))
        case "static:ratio":
            return without_best_of_each(prompt, -oracle.key_sizes(prompt), float(value))
    raise ValueError(link)


def check(oracle: PolicyOracle, prompt: list[Segment], link: str, output: dict) -> None:
    """Each token is the oracle's best after those before it, and the log-probabilities are its."""
    tokens = output["output_ids"]
    expected = oracle.logprobs(prompt, tokens[:-1], kept(oracle, prompt, link))
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
    assert (chosen - reported).abs().max() <= TOLERANCE
    assert (expected.amax(-1) - chosen).max() <= TOLERANCE


def image() -> str:
    pixels, file = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in VISION_MODELS])
def served(request, tmp_path_factory):
    """A server's URL, and its oracle."""
    folder = tmp_path_factory.mktemp(request.param)
    path = build_vision_model(request.param, folder / "model")
    flags = ["--model-path", str(path), "--max-total-tokens", "2048", "--disable-fast-image-processor"]
    with running_server([*flags, *device_flags()], folder / "server.log") as url:
        yield url, PolicyOracle(str(path))


def post(url: str, body: dict, path: str = "/generate") -> requests.Response:
    return requests.post(url + path, json=body, timeout=120)


def ask(served, *prompts: list[Segment], link: str = "block") -> list[list[bool]]:
    """Answer the prompts as one batch and hold each against the oracle; of each, whether its chunks were hits."""
    url, oracle = served
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    body = {"segments": segments, "sampling_params": GREEDY, "return_logprob": True, "link": link}
    response = post(url, body)
    assert response.ok, response.text
    for prompt, output in zip(prompts, response.json(), strict=True):
        check(oracle, prompt, link, output)
    return [[entry["hit"] for entry in output["meta_info"].get("chunks", [])] for output in response.json()]


def test_text_chunks(served):
    """Cold, warm, in a new order, beside a prompt without chunks, and copied."""
    dice = Dice("axes")
    docs = dice.chunks(3, 20, 60)
    assert ask(served, [dice.text(7), docs[0], docs[1], dice.text(5)]) == [[False, False]]
    second = [dice.text(3), docs[1], dice.text(9), docs[0], docs[2], dice.text(4)]
    assert ask(served, second, [dice.text(30)]) == [[True, True, False], []]
    assert ask(served, second) == [[True] * 3]
    assert ask(served, [dice.text(6), docs[2], docs[0], dice.text(5)], link="copy") == [[True, True]]


@pytest.mark.parametrize("link", ["epic:tokens=4", "query:ratio=0.2", "blend:ratio=0.2", "static:ratio=0.2"])
def test_policies(served, link):
    """Those that recompute tokens, with missing chunks and with cached ones."""
    dice = Dice(f"axes {link}")
    docs, lead, question = dice.chunks(2, 20, 40), dice.text(6), dice.text(5)
    ask(served, [lead, *docs, question], link=link)
    assert ask(served, [dice.text(9), *reversed(docs), question], link=link) == [[True, True]]


def test_a_chat_of_text(served):
    """Its chunks are hits where /generate has brought them; the prompt is what the template gives."""
    url, _ = served
    question = [{"type": "chunk", "text": "The bridge is old."}, {"type": "text", "text": "Who built it?"}]

    def chat(*parts, **more):
        body = {
            **more,
            "messages": [{"role": "user", "content": [*question, *parts]}],
            "temperature": 0,
            "max_tokens": 2,
        }
        return post(url, {"model": "default", "return_cached_tokens_details": True, **body}, "/v1/chat/completions")

    segments = {"segments": [{"type": "chunk", "text": "The bridge is old."}, "Where?"], "sampling_params": GREEDY}
    (brought,) = post(url, segments).json()["meta_info"]["chunks"]
    answer = chat()
    assert answer.ok, answer.text
    assert answer.json()["sglext"]["cached_tokens_details"]["chunk"] == brought["tokens"]
    for link in ("block", "full"):
        refused = chat({"type": "image_url", "image_url": {"url": image()}}, link=link)
        assert refused.status_code == 400 and "chunk parts cannot be combined with image parts" in refused.text


def test_images_with_chunks_are_refused(served):
    url, _ = served
    segments = [{"type": "chunk", "text": "The bridge is old."}, f"What is this? {IMAGE_TEXT}"]
    refused = post(url, {"segments": segments, "image_data": image(), "sampling_params": GREEDY})
    assert refused.status_code == 400 and "images" in refused.text
    assert post(url, {"text": "Who?", "sampling_params": GREEDY}).ok
