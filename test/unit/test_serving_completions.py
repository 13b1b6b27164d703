"""Completions: what SGLang's conversion receives, and what the request becomes."""

from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_lazy.policies import get_policy
from sglang_lazy.port.serving.completions import CompletionsRequest, convert_request
from sglang_lazy.port.serving.requests import plan_of
from sglang_lazy.serving.plans import Plan

pytestmark = pytest.mark.usefixtures("http_process")

TEXT, CHUNK = {"type": "text", "input_ids": [1]}, {"type": "chunk", "input_ids": [2, 3]}


class Serving:
    """Stands in for `OpenAIServingCompletion`."""

    def __init__(self, template=None):
        self.template_manager = SimpleNamespace(completion_template_name=template)
        self.tokenizer_manager = SimpleNamespace(
            tokenizer=None, preferred_sampling_params=None, model_config=SimpleNamespace(vocab_size=100),
            context_len=32, allow_auto_truncate=False,
        )  # fmt: skip

    def convert(self, request, raw_request):
        assert request.cache_salt is None or isinstance(request.cache_salt, str), "SGLang concatenates it as a string"
        extra_key = (request.cache_salt or "") + (request.extra_key or "")
        params = {"n": request.n}
        return GenerateReqInput(text=request.prompt, sampling_params=params, extra_key=extra_key or None), request


def convert(serving=None, **body):
    request = CompletionsRequest.model_validate(body)
    adapted, same = convert_request(Serving.convert, serving or Serving(), request, None)
    assert same is request
    return adapted, request


def test_one_prompt():
    link = "base:preamble=lead+query:ratio=0.3"
    adapted, request = convert(segments=[TEXT, CHUNK], link=link, cache_salt="s", extra_key="e", n=2)
    assert adapted.text is None and adapted.input_ids == request.prompt == [1, 2, 3]
    assert plan_of(adapted) == Plan.of(((1, 3),), get_policy(link), "s")
    assert adapted.extra_key == "e" and adapted.sampling_params["n"] == 2


@pytest.mark.parametrize("empty", ["", [], None])
def test_a_prompt_may_be_empty_beside_segments(empty):
    """OpenAI's client does not let one leave it out."""
    adapted, request = convert(prompt=empty, segments=[TEXT, CHUNK])
    assert adapted.text is None and adapted.input_ids == request.prompt == [1, 2, 3]


def test_a_batch():
    adapted, request = convert(segments=[[TEXT, CHUNK], [TEXT]], link=["full", None], cache_salt=["s", None])
    assert adapted.input_ids == request.prompt == [[1, 2, 3], [1]]
    assert [params.keys() for params in adapted.sampling_params] == [{"n", "custom_params"}, {"n"}]


def test_plain_prompts_are_left_to_sglang():
    adapted, _ = convert(prompt="Who?", cache_salt="s")
    assert (adapted.text, adapted.extra_key, adapted.sampling_params) == ("Who?", "s", {"n": 1})
    stock = CompletionRequest(prompt="Who?")
    assert convert_request(Serving.convert, Serving(), stock, None)[1] is stock
    with pytest.raises(ValueError, match="prompt"):
        CompletionsRequest.model_validate({"model": "default"})


@pytest.mark.parametrize(
    "body, reason",
    [
        ({"segments": []}, "segments is empty"),
        ({"segments": [CHUNK], "prompt": "x"}, "segments cannot be combined with prompt: leave it out, or empty"),
        ({"segments": [CHUNK], "suffix": "x"}, "segments cannot be combined with suffix"),
        ({"segments": [CHUNK], "cache_salt": ""}, "cache_salt must be a non-empty string"),
        ({"segments": [CHUNK], "link": "epic:tokens=-1"}, "tokens must be at least 1 and at most 1048576, got -1"),
        ({"prompt": "x", "link": "full"}, "link needs a prompt given as segments"),
    ],
)
def test_refusals(body, reason):
    with pytest.raises(ValueError, match=reason):
        convert(**body)


def test_completion_templates_exclude_segments():
    with pytest.raises(ValueError, match="completion template"):
        convert(Serving(template="star_coder"), segments=[CHUNK])
