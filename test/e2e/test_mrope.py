"""Text chunks on models whose positions have several axes, with images too, against Hugging Face models with explicit
positions and masks."""

import base64
import contextlib
import io

import numpy as np
import pytest
import requests
import torch
from PIL import Image

from fakes import remembered_drafts, speculation_on_cpu
from oracle.models.drafts import build_draft
from oracle.policies import PolicyOracle, epic, keep_all_but, without_best_of_each
from oracle.scenarios import Dice
from oracle.segments import Segment, chunk, text
from oracle.vision import (
    IMAGE,
    IMAGE_TEXT,
    LAYERS,
    VISION_END,
    VISION_MODELS,
    VISION_START,
    VisionOracle,
    build_vision_model,
)
from sglang_lazy.core.config import PREAMBLE
from sglang_lazy.testing import device_flags, running_server

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 5
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}


def kept(oracle: PolicyOracle, prompt: list[Segment], link: str):
    """What the policy `link` keeps of each chunk."""
    name, _, value = link.partition("=")
    match name:
        case "block" | "base" | "copy":
            return keep_all_but(prompt, ())
        case "full":
            return [() for segment in prompt if segment.kind == "chunk"]
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
    """Each token is the oracle's best after the preceding ones, and the log-probabilities are equal."""
    tokens = output["output_ids"]
    preamble = oracle.tokenizer.encode(PREAMBLE) if link == "base" else ()
    expected = oracle.logprobs(prompt, tokens[:-1], kept(oracle, prompt, link), preamble)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
    assert (chosen - reported).abs().max() <= TOLERANCE
    assert (expected.amax(-1) - chosen).max() <= TOLERANCE


def picture(seed: int, width: int = 112, height: int = 84) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


SPECULATING = "qwen3-vl with drafts"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in (*VISION_MODELS, SPECULATING)]
)
def served(request, tmp_path_factory, with_plugin):
    """A server's URL, and its oracle."""
    folder, name = tmp_path_factory.mktemp("mrope"), request.param.partition(" ")[0]
    path = build_vision_model(name, folder / "model")
    flags = ["--model-path", str(path), "--max-total-tokens", "2048", "--disable-fast-image-processor"]
    if name == "qwen3-vl":  # chunked prefill, with pieces that end inside an image
        flags += ["--chunked-prefill-size", "32"]
    if request.param == SPECULATING:
        if torch.cuda.is_available():
            pytest.skip("replaces kernels that a GPU has")
        flags += ["--speculative-draft-model-path", build_draft("EAGLE3", str(path), folder)]
        for option, value in {"speculative_algorithm": "EAGLE3", **speculation_on_cpu.OPTIONS}.items():
            flags += [f"--{option.replace('_', '-')}", str(value)]
    plugin = with_plugin(remembered_drafts.load) if request.param == SPECULATING else contextlib.nullcontext()
    with plugin, running_server([*flags, *device_flags()], folder / "server.log") as url:
        yield url, VisionOracle(str(path))


def post(url: str, body: dict, path: str = "/generate") -> requests.Response:
    return requests.post(url + path, json=body, timeout=120)


def ask(served, *prompts: list[Segment], link: str = "block", images: list | None = None) -> list[list[bool]]:
    """Answer the prompts as one batch and compare each with the oracle; returns whether each one's chunks were hits.

    images: a list for each prompt.
    """
    return [
        [entry["hit"] for entry in output["meta_info"].get("chunks", [])]
        for output in answers(served, *prompts, link=link, images=images)
    ]


def answers(served, *prompts: list[Segment], link: str = "block", images: list | None = None) -> list[dict]:
    url, oracle = served
    images = images or [[] for _ in prompts]
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    body = {"segments": segments, "sampling_params": GREEDY, "return_logprob": True, "link": link}
    if any(images):
        body["image_data"] = [[data_url(image) for image in shown] for shown in images]
    response = post(url, body)
    assert response.ok, response.text
    for prompt, shown, output in zip(prompts, images, response.json(), strict=True):
        check(oracle, oracle.show(prompt, shown), link, output)
    return response.json()


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
def test_policies(served, link, request):
    """Policies that recompute tokens, over missing and cached chunks."""
    if SPECULATING in request.node.name and link.startswith("blend"):
        pytest.skip("servers that draft refuse it")
    dice = Dice(f"axes {link}")
    docs, lead, question = dice.chunks(2, 20, 40), dice.text(6), dice.text(5)
    ask(served, [lead, *docs, question], link=link)
    assert ask(served, [dice.text(9), *reversed(docs), question], link=link) == [[True, True]]


def test_a_chat_of_text(served):
    """Its chunks are hits if /generate has computed them; the prompt is the rendered template."""
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
        refused = chat({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, link=link)
        assert refused.status_code == 400 and "chunk parts cannot be combined with video parts" in refused.text


def with_image(dice: Dice, before: int, behind: int) -> Segment:
    """A text segment with an image in it."""
    return text([*dice.text(before).ids, VISION_START, IMAGE, VISION_END, *dice.text(behind).ids])


def test_images_beside_chunks(served):
    """In the question, between chunks and before them; cold, warm, reordered, and batched with others."""
    dice = Dice("images")
    docs = dice.chunks(3, 20, 60)
    wide, high, other = picture(1, 168, 56), picture(2, 56, 140), picture(3)
    question = with_image(dice, 3, 6)
    assert ask(served, [dice.text(7), docs[0], docs[1], question], images=[[wide]]) == [[False, False]]
    between = [with_image(dice, 2, 4), docs[1], with_image(dice, 3, 1), docs[0], docs[2], question]
    shown = [high, other, wide]
    beside = [dice.text(30)], [with_image(dice, 5, 5)], [dice.text(4), docs[0], dice.text(3)]
    first, *_ = ask(served, between, *beside, images=[shown, [], [other], []])
    assert first == [True, True, False]
    again, changed = answers(served, between, between, images=[shown, [high, wide, wide]])
    assert again["meta_info"]["cached_tokens"] > changed["meta_info"]["cached_tokens"]
    assert ask(served, [docs[2], with_image(dice, 1, 1), docs[0], dice.text(5)], images=[[other]]) == [[True, True]]


def test_images_of_equal_patches(served):
    """Two white images that differ only in shape, with the same question, one after the other and batched."""
    dice = Dice("white images")
    prompt = [dice.text(3), dice.chunk(9), with_image(dice, 1, 4)]
    shapes = [Image.new("RGB", size, "white") for size in ((168, 56), (56, 168))]
    for image in shapes:
        ask(served, prompt, images=[[image]])
    ask(served, prompt, prompt, images=[[image] for image in shapes])


@pytest.mark.parametrize("link", ["full", "copy", "epic:tokens=4", "base"])
def test_policies_beside_images(served, link):
    dice = Dice(f"images {link}")
    docs = dice.chunks(2, 20, 40)
    prompt = [with_image(dice, 4, 2), docs[0], with_image(dice, 0, 3), docs[1], with_image(dice, 2, 5)]
    shown = [picture(4, 168, 56), picture(5), picture(6, 56, 140)]
    for _ in range(2):
        ask(served, prompt, link=link, images=[shown])


def test_a_chat_with_images(served):
    """The prompt is the rendered template; a second turn finds the first one's images and text."""
    url, oracle = served
    document, shown = "The bridge is old.", [picture(7), picture(8, 56, 140)]
    first, second = ({"type": "image_url", "image_url": {"url": data_url(image)}} for image in shown)
    chunk_part = {"type": "chunk", "text": document}
    say = {"type": "text", "text": "Who built it?"}
    messages = [{"role": "user", "content": [first, chunk_part, second, say]}]

    def chat(messages, **more):
        body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, **more}
        return post(url, {**body, "return_cached_tokens_details": True, "logprobs": True}, "/v1/chat/completions")

    def encode(text):
        return tuple(oracle.tokenizer.encode(text))

    rendered = [f"<|user|>{IMAGE_TEXT}", f"{IMAGE_TEXT}Who built it?</s><|assistant|>"]
    prompt = [text(encode(rendered[0])), chunk(encode(document)), text(encode(rendered[1]))]
    answer = chat(messages, ignore_eos=True)
    assert answer.ok, answer.text
    shown_prompt = oracle.show(prompt, shown)
    assert answer.json()["usage"]["prompt_tokens"] == sum(len(segment.ids) for segment in shown_prompt)
    reported = [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]
    tokens, expected = [], []
    for _ in reported:
        logprob, token = oracle.logprobs(shown_prompt, tokens, kept(oracle, shown_prompt, "block"))[-1].max(-1)
        tokens.append(token.item())
        expected.append(logprob.item())
    assert len(tokens) == NUM_TOKENS and reported == pytest.approx(expected, abs=TOLERANCE)

    blocks = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data_url(image).split(",")[1]},
        }
        for image in shown
    ]
    anthropic = [{"role": "user", "content": [blocks[0], chunk_part, blocks[1], say]}]
    body = {"model": "default", "messages": anthropic, "temperature": 0, "max_tokens": NUM_TOKENS}
    same = post(url, body, "/v1/messages")
    assert same.ok, same.text
    written = "".join(block["text"] for block in same.json()["content"])
    assert written and written == chat(messages).json()["choices"][0]["message"]["content"]

    turns = [*messages, {"role": "assistant", "content": "Nobody."}, {"role": "user", "content": [first, say]}]
    later = chat(turns)
    assert later.ok, later.text
    assert later.json()["sglext"]["cached_tokens_details"]["device"] >= answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("link", ["query", "blend", "static", "base:preamble=lead"])
def test_policies_without_support_for_images(served, link):
    dice = Dice(f"unseen {link}")
    url, _ = served
    segments = [segment.to_request() for segment in [with_image(dice, 2, 2), *dice.chunks(1, 9, 9), dice.text(3)]]
    refused = post(url, {"segments": segments, "image_data": data_url(picture(1)), "link": link})
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and ("image" in message or "--speculative-algorithm" in message), refused.text


def test_options_that_exclude_images(served):
    """Each is refused with its reason, and the server goes on."""
    dice, url, image = Dice("refused images"), served[0], data_url(picture(1))
    prompt = [dice.text(3), dice.chunk(9), with_image(dice, 1, 4)]
    inside = [dice.text(3), chunk(with_image(dice, 2, 2).ids), dice.text(4)]
    bare = [dice.chunk(9), text([*dice.ids(2), IMAGE, *dice.ids(2)])]
    for segments, fields, reason in [
        (inside, {"image_data": image}, "images are allowed only in text"),
        (prompt, {"image_data": [image, image]}, "places for 1 images, but 2 are given"),
        (bare, {"image_data": image}, "must follow the token that begins an image"),
        (prompt, {"image_data": image, "mm_hashes": ["ab"]}, "mm_hashes is set by the server"),
        (prompt, {"image_data": image, "video_data": "v.mp4"}, "not with videos or audio"),
    ]:
        body = {"segments": [segment.to_request() for segment in segments], "sampling_params": GREEDY, **fields}
        refused = post(url, body)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text
    part = {"type": "chunk", "image_url": {"url": image}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Who?"}]}]
    refused = post(url, {"model": "default", "messages": messages}, "/v1/chat/completions")
    assert refused.status_code == 400 and "messages[0].content[0]" in refused.text
    ask(served, prompt, images=[[picture(1)]])
