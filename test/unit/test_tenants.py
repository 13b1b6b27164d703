"""The salt, the client's own key and the adapter: what becomes of them on the way to the cache never makes two the
same."""

import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.datastructures import Headers

from sglang_lazy.chunks.catalog import tenant_of
from sglang_lazy.core.keys import Namespace
from sglang_lazy.policies import get_policy
from sglang_lazy.port.serving.malformed import convert_request
from sglang_lazy.port.serving.tokenizer_manager import begin, to_scheduler
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.salts import check_cache_salt, salt_of

pytestmark = pytest.mark.usefixtures("sglang_context")
repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=500)

ADAPTERS = ("a" * 32, "0" * 32)
"""Ids as SGLang makes them, all of one length."""
names = st.none() | st.text("a0/", min_size=1, max_size=3) | st.sampled_from(ADAPTERS)
identities = st.tuples(names, names, st.none() | st.sampled_from(ADAPTERS))


def request_of(salt, extra_key, adapter):
    """As the scheduler makes it, after which SGLang has appended the adapter."""
    params = SamplingParams()
    params.normalize(None)
    sent = to_scheduler(types.SimpleNamespace(extra_key=extra_key, sampling_params=params))
    fields = dict(extra_key=sent.extra_key, cache_salt=salt, lora_id=adapter)
    return Req("r", "", [1], params, vocab_size=9, **fields)


@repeatable
@given(identities, identities)
def test_distinct_tenants_share_nothing(one, other):
    """Neither text (SGLang's key in its tree) nor chunks."""
    reqs = [request_of(*identity) for identity in (one, other)]
    places = [RadixKey([1, 2], req.extra_key, cache_salt=req.cache_salt).child_key() for req in reqs]
    assert (places[0] == places[1]) == (one == other)
    chunks = [Namespace("chunk", req.extra_key, req.cache_salt, None, req.lora_id) for req in reqs]
    assert (chunks[0] == chunks[1]) == (one == other)
    stored = [(chunk.own_key, chunk.cache_salt, chunk.adapter) for chunk in chunks]  # in the names of stored objects
    assert (stored[0] == stored[1]) == (one == other)


@repeatable
@given(identities)
def test_a_namespace_says_whose_it_is(identity):
    salt, extra_key, adapter = identity
    chunk = Namespace("chunk", request_of(*identity).extra_key, salt, None, adapter)
    assert chunk.own_key == (None if extra_key is None else f"{extra_key}/")
    assert tenant_of(chunk) == (salt if extra_key is None else (chunk.own_key, salt))


def test_an_empty_key_is_none():
    assert request_of(None, "", None).extra_key in (None, "")
    assert request_of(None, "", "a" * 32).extra_key == "a" * 32


def headers(*salts):
    return Headers(raw=[(b"x-cache-salt", salt.encode("latin-1")) for salt in salts])


def no_state(_manager, _obj, _request):
    """In place of SGLang's method."""


def request_to(path, *salts):
    """An HTTP request with this header."""
    return types.SimpleNamespace(url=types.SimpleNamespace(path=path), headers=headers(*salts))


def test_the_header_holds_on_every_route():
    def salted(*salts, **fields):
        obj = GenerateReqInput(**{"text": "Who?", **fields})
        obj.normalize_batch_and_arguments()
        begin(no_state, None, obj, request_to("/generate", *salts))
        return obj.cache_salt

    assert salted("a") == salted("a", cache_salt="a") == salted(cache_salt="a") == "a" and salted() is None
    assert salted("a", text=["x", "y"]) == ["a"] * 2
    assert salted("a", text=["x", "y"], sampling_params={"n": 2}) == ["a"] * 4
    assert salted(text=["x", "y"], cache_salt=["a", "b"]) == ["a", "b"]
    for fields in ({"cache_salt": "b"}, {"text": ["x", "y"], "cache_salt": ["a", "b"]}):
        with pytest.raises(ValueError, match="cache_salt and X-Cache-Salt disagree"):
            salted("a", **fields)
    with pytest.raises(ValueError, match="X-Cache-Salt is given twice"):
        salted("a", "a")


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/behind/a/proxy/health"])
def test_a_health_check_has_no_tenant(path):
    """Nor can a header make it fail."""
    obj = GenerateReqInput(input_ids=[0])
    obj.normalize_batch_and_arguments()
    begin(no_state, None, obj, request_to(path, "a", "\xe9"))
    assert obj.cache_salt is None


def test_an_engines_requests_have_no_headers():
    obj = GenerateReqInput(text="Who?", cache_salt="a")
    obj.normalize_batch_and_arguments()
    begin(no_state, None, obj)
    assert obj.cache_salt == "a"


def test_the_salt_of_body_and_header():
    assert salt_of("a", headers()) == "a" and salt_of(None, headers()) is None and salt_of(3, headers()) == 3
    assert salt_of(None, headers("a")) == salt_of("a", headers("a")) == salt_of([None, "a"], headers("a")) == "a"
    for body in ("b", ["a", "b"], 3):
        with pytest.raises(ValueError, match="cache_salt and X-Cache-Salt disagree"):
            salt_of(body, headers("a"))
    for salts in (("",), ("é",), ("a", "a"), ("a", "b"), ("a" * 257,), ("a\tb",)):
        with pytest.raises(ValueError, match="X-Cache-Salt (must be a non-empty|is given twice)"):
            salt_of(None, headers(*salts))


@pytest.mark.parametrize("salt", ["", 7, ["a"], "\ud800", "a\0b", "a\nb", "a" * 257])
def test_salts_are_printable(salt):
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string of at most 256 printable characters"):
        check_cache_salt(salt)
    assert check_cache_salt("é 東" + "x" * 253) and check_cache_salt(None) is None


@pytest.mark.parametrize("bad", ["a\nb", "\ud800", "a" * 257])
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_names_of_plain_prompts_are_printable(field, bad):
    for value in (bad, ["a", bad]):
        with pytest.raises(ValueError, match=f"{field} must be"):
            convert_request(GenerateReqInput(text="Who?", **{field: value}))


def test_messages_to_the_scheduler_have_plain_strings():
    """msgpack knows no others."""
    packed = Plan.of(((0, 1),), get_policy("block")).pack()
    params = SamplingParams(custom_params={"sglang_lazy": packed, "mine": 1})
    sent = to_scheduler(types.SimpleNamespace(sampling_params=params))
    assert type(sent.sampling_params.custom_params["sglang_lazy"]) is str
    assert sent.sampling_params.custom_params == {"sglang_lazy": str(packed), "mine": 1}
