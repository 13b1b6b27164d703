"""Text chunks on models whose positions have several axes, against Hugging Face models with explicit positions."""

import base64
import io

import numpy as np
import pytest
import requests
import torch
import transformers
from PIL import Image

from oracle.block_mask import greedy, visibility
from oracle.scenarios import Dice
from oracle.segments import Segment, token_ids
from oracle.vision import VISION_MODELS, build_vision_model
from sglang_lazy.testing import device_flags, running_server

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 5
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}


class VisionOracle:
    """The model in fp32 under the mask of chunks, text at the same place on all three axes."""

    def __init__(self, path):
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.language, self.head = model.model.language_model.eval(), model.lm_head

    @torch.inference_mode()
    def logprobs(self, prompt: list[Segment], generated: list[int]) -> torch.Tensor:
        """Of the next token after the prompt and after each generated one, [1 + len(generated), vocab_size]."""
        ids = torch.tensor(token_ids(prompt) + generated)
        visible = visibility(prompt, len(generated))
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        hidden = self.language(
            inputs_embeds=self.language.embed_tokens(ids[None]),
            attention_mask=mask[None, None],
            position_ids=torch.arange(len(ids)).expand(3, 1, -1),
            use_cache=False,
        ).last_hidden_state
        return self.head(hidden[0, len(ids) - len(generated) - 1 :]).log_softmax(-1)


def check(oracle: VisionOracle, prompt: list[Segment], output: dict) -> None:
    """Each token is the oracle's choice after those before it, with its log-probability."""
    tokens = output["output_ids"]
    expected = oracle.logprobs(prompt, tokens[:-1])
    assert greedy(expected) == tokens
    reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
    assert (expected.amax(-1) - reported).abs().max() <= TOLERANCE


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
        yield url, VisionOracle(path)


def post(url: str, body: dict, path: str = "/generate") -> requests.Response:
    return requests.post(url + path, json=body, timeout=120)


def ask(served, *prompts: list[Segment], **more) -> list[list[bool]]:
    """Answer the prompts as one batch and hold each against the oracle; of each, whether its chunks were hits."""
    url, oracle = served
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    body = {"segments": segments, "sampling_params": GREEDY, "return_logprob": True, **more}
    response = post(url, body)
    assert response.ok, response.text
    for prompt, output in zip(prompts, response.json(), strict=True):
        check(oracle, prompt, output)
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


def test_a_chat_of_text(served):
    """Its chunks are hits where /generate has brought them; the prompt is what the template gives."""
    url, _ = served
    question = [{"type": "chunk", "text": "The bridge is old."}, {"type": "text", "text": "Who built it?"}]

    def chat(*parts):
        body = {"messages": [{"role": "user", "content": [*question, *parts]}], "temperature": 0, "max_tokens": 2}
        return post(url, {"model": "default", "return_cached_tokens_details": True, **body}, "/v1/chat/completions")

    segments = {"segments": [{"type": "chunk", "text": "The bridge is old."}, "Where?"], "sampling_params": GREEDY}
    (brought,) = post(url, segments).json()["meta_info"]["chunks"]
    answer = chat()
    assert answer.ok, answer.text
    assert answer.json()["sglext"]["cached_tokens_details"]["chunk"] == brought["tokens"]
    refused = chat({"type": "image_url", "image_url": {"url": image()}})
    assert refused.status_code == 400 and "images" in refused.text


def test_images_with_chunks_are_refused(served):
    url, _ = served
    segments = [{"type": "chunk", "text": "The bridge is old."}, f"What is this? {IMAGE_TEXT}"]
    refused = post(url, {"segments": segments, "image_data": image(), "sampling_params": GREEDY})
    assert refused.status_code == 400 and "images" in refused.text
    assert post(url, {"text": "Who?", "sampling_params": GREEDY}).ok
