"""Values of requests' fields: converted into the request to the types that SGLang declares, or refused by name."""

import dataclasses

import msgspec
import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.port.serving.malformed import check_lists, convert_request, convert_sampling_params
from sglang_lazy.serving.fields import INTERNAL_PARAMS


def test_sampling_parameters_get_the_types_that_sglang_declares():
    given = {
        "max_new_tokens": 16.0,
        "skip_special_tokens": 0,
        "ignore_eos": 1,
        "temperature": 1,
        "n": 2.0,
        "top_p": None,
    }
    given |= {"stop": ["a"], "stop_token_ids": [1, None], "logit_bias": {"5": 1}, "custom_params": {"mine": [[1]]}}
    params = convert_sampling_params(given)
    assert params == given
    assert [type(params[name]) for name in ("max_new_tokens", "n", "temperature")] == [int, int, float]
    assert params["skip_special_tokens"] is False and params["ignore_eos"] is True
    assert type(params["logit_bias"]["5"]) is float
    assert convert_sampling_params([given, None]) == [params, None] and convert_sampling_params(None) is None


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("temperature", "0", "temperature: Expected `float`, got `str`"),
        ("top_p", [1], "top_p: Expected `float`, got `array`"),
        ("max_new_tokens", "16", "max_new_tokens: Expected `int"),
        ("max_new_tokens", 1.5, "max_new_tokens: Expected `int"),
        ("min_new_tokens", 2**31, "min_new_tokens must be an integer of 32 bits"),
        ("sampling_seed", 2**63, "sampling_seed must be an integer of 64 bits"),
        ("stop_token_ids", [2**31], "stop_token_ids must be an integer of 32 bits"),
        ("n", "2", "n: Expected `int`, got `str`"),
        ("stop", 5, "stop: Expected `str"),
        ("stop_token_ids", ["x"], "stop_token_ids: Expected `int"),
        ("ignore_eos", "yes", "ignore_eos: Expected `bool`, got `str`"),
        ("skip_special_tokens", 2, "skip_special_tokens: Expected `bool`"),
        ("json_schema", {"type": "object"}, "json_schema: Expected `str"),
        ("custom_params", 3, "custom_params: Expected `object"),
        ("temprature", 0, "unknown parameter 'temprature'"),
        *((name, True, f"unknown parameter '{name}'") for name in INTERNAL_PARAMS),
    ],
)
def test_mistyped_sampling_parameters_are_named(name, value, reason):
    for params in ({name: value}, [{}, {name: value}]):
        with pytest.raises(ValueError, match=f"sampling_params: {reason}"):
            convert_sampling_params(params)
    with pytest.raises(ValueError, match="sampling_params must be an object, got str"):
        convert_sampling_params("x")


def normalized(**fields):
    obj = GenerateReqInput(text="Who?", **fields)
    check_lists(GenerateReqInput.normalize_batch_and_arguments, obj)
    return obj


def test_fields_get_the_types_that_sglang_declares():
    params = {"max_new_tokens": 2.0}
    fields = {
        "priority": 3.0,
        "stream": 0,
        "return_logprob": 1,
        "top_logprobs_num": "2",
        "session_params": {"offset": 1.0},
    }
    obj = normalized(sampling_params=params, **fields)
    assert type(obj.priority) is int and type(obj.sampling_params["max_new_tokens"]) is int
    assert obj.stream is False and obj.return_logprob is True and obj.top_logprobs_num == 2
    assert type(obj.session_params["offset"]) is int
    assert params == {"max_new_tokens": 2.0} and type(params["max_new_tokens"]) is float, "the caller's own stay"


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("priority", 0.5, "priority: Input should be a valid integer"),
        ("priority", 2**63, "priority must be an integer of 64 bits"),
        ("logprob_start_len", [2**70], "logprob_start_len must be an integer of 64 bits"),
        ("stream", "maybe", "stream: Input should be a valid boolean"),
        ("return_hidden_states", "first", "return_hidden_states: Input should be"),
        ("custom_labels", {"a": 1}, "custom_labels: Input should be a valid string"),
        ("rid", 5, "rid: Input should be a valid string"),
        ("rid", "\0fill-1", "rid must be a non-empty string of at most 256 printable characters"),
        ("rid", ["a", "b" * 257], "rid must be"),
        ("rid", "", "rid must be"),
        ("lora_path", "a\nERROR: forged", "lora_path must be"),
        ("session_params", {"id": 5}, "session_params: id: Expected `str"),
        ("session_params", {"rid": {}}, "session_params: rid: Expected `str"),
        ("session_params", {"offset": "x"}, "session_params: offset: Expected `int"),
        ("session_params", {"off": 1}, "session_params: unknown parameter 'off'"),
        ("session_params", [], "session_params must be an object"),
    ],
)
def test_mistyped_fields_are_named(name, value, reason):
    with pytest.raises(ValueError, match=reason):
        normalized(**{name: value})


def test_nothing_is_done_to_what_is_not_given():
    obj = GenerateReqInput(text="Who?", extra_key="b", cache_salt="a", sampling_params={})
    before = dict(vars(obj))
    convert_request(obj)
    assert vars(obj) == before and obj.extra_key is before["extra_key"]


@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_every_field_is_converted_or_read_by_a_check_of_its_own(kind):
    """No value is of a type that no field has, so every field refuses it but these: of any type, or read elsewhere."""
    prompts = {"text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data", "watermark"}
    of_any_type = {"positional_embed_overrides", "embed_overrides"}
    accepted = set()
    for field in dataclasses.fields(kind):
        obj = kind(**{"text": "Who?", field.name: object()})
        try:
            convert_request(obj)
            accepted.add(field.name)
        except ValueError:
            pass
    assert accepted <= prompts | of_any_type


@pytest.mark.parametrize("kind, convert", [(SamplingParams, convert_sampling_params), (SessionParams, None)])
def test_every_parameter_is_converted(kind, convert):
    for field in msgspec.structs.fields(kind):
        with pytest.raises(ValueError):
            if convert is not None:
                convert({field.name: object()})
            else:
                normalized(session_params={field.name: object()})
